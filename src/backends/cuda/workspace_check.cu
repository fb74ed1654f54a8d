// The kernels around a call that checks its workspace (workspace_check.hpp): one takes the state for it and looks for counters that
// are not 0, one gives it back. What they find is a sticky code.
#include "backends/cuda/workspace_check.hpp"

#include <cuda/atomic>

#include <atomic>

#include "backends/cuda/device.hpp"
#include "backends/cuda/sticky.cuh"

namespace lean::cuda {
namespace {

constexpr unsigned kThreads = 256;

/// Puts `value` where `expected` is; false where something else is. Acquires what was released with the word.
__device__ bool exchange_acq_rel(fixup::Counter& word, fixup::Counter expected, fixup::Counter value) {
  using Ref = ::cuda::atomic_ref<fixup::Counter, ::cuda::thread_scope_device>;
  return Ref(word).compare_exchange_strong(expected, value, ::cuda::memory_order_acq_rel, ::cuda::memory_order_relaxed);
}

/// One CTA.
__global__ void claim(const fixup::Slots slots, const fixup::Counter ticket) {
  __shared__ bool mine;
  fixup::StateHeader& header = slots.header();
  if (threadIdx.x == 0) {
    mine = exchange_acq_rel(header.owner, 0, ticket);  // pairs with release()
    if (!mine) report_sticky(header, StatusCode::kWorkspaceInUse);
  }
  __syncthreads();
  if (!mine) return;  // the other call's counters are its own business
  bool dirty = false;
  const fixup::Counter* const all = slots.counters() - slots.counters_before;
  const std::int64_t count = slots.counters_before + slots.layout.counters();
  for (std::int64_t i = threadIdx.x; i < count; i += kThreads) dirty |= all[i] != 0;
  if (__syncthreads_or(dirty) != 0 && threadIdx.x == 0) report_sticky(header, StatusCode::kWorkspaceDirty);
}

/// One thread. Pairs with claim() of a later call.
__global__ void release(const fixup::Slots slots, const fixup::Counter ticket) {
  exchange_acq_rel(slots.header().owner, ticket, 0);
}

Status launch(const void* kernel, unsigned threads, fixup::Slots slots, fixup::Counter ticket, void* stream) noexcept {
  void* arguments[] = {&slots, &ticket};
  return cuda_status(cudaLaunchKernel(kernel, dim3(1), dim3(threads), arguments, 0, static_cast<cudaStream_t>(stream)),
                     "cudaLaunchKernel");
}

}  // namespace

fixup::Counter next_ticket() noexcept {
  static std::atomic<fixup::Counter> last{0};
  fixup::Counter ticket = 0;
  while (ticket == 0) ticket = last.fetch_add(1, std::memory_order_relaxed) + 1;
  return ticket;
}

Status claim_workspace(const fixup::Slots& slots, fixup::Counter ticket, void* stream) noexcept {
  return launch(reinterpret_cast<const void*>(claim), kThreads, slots, ticket, stream);
}

Status release_workspace(const fixup::Slots& slots, fixup::Counter ticket, void* stream) noexcept {
  return launch(reinterpret_cast<const void*>(release), 1, slots, ticket, stream);
}

}  // namespace lean::cuda
