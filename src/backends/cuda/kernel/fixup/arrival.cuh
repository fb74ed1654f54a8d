// Arrival on the device: whoever comes last of an output's contributors merges, or the paper's host waits for its peers
// (docs/fixup.md). Called by all consumer threads together.
#pragma once

#include <cuda/atomic>

#include <cstdint>

#include "backends/cuda/kernel/cta_memory.cuh"
#include "backends/cuda/kernel/segment_record.cuh"
#include "backends/cuda/ptx/barrier.cuh"
#include "backends/cuda/ptx/special_registers.cuh"
#include "fixup/arrival.hpp"
#include "fixup/workspace.hpp"

namespace lean::cuda {

/// fixup::arrive_last's atomic on device memory.
struct DeviceAtomic {
  using Ref = ::cuda::atomic_ref<fixup::Counter, ::cuda::thread_scope_device>;
  __device__ static fixup::Counter fetch_add_acq_rel(fixup::Counter& counter, fixup::Counter amount) {
    return Ref(counter).fetch_add(amount, ::cuda::memory_order_acq_rel);
  }
  __device__ static void store_relaxed(fixup::Counter& counter, fixup::Counter value) {
    Ref(counter).store(value, ::cuda::memory_order_relaxed);
  }
  __device__ static void store_release(fixup::Counter& counter, fixup::Counter value) {
    Ref(counter).store(value, ::cuda::memory_order_release);
  }
  __device__ static fixup::Counter load_acquire(fixup::Counter& counter) { return Ref(counter).load(::cuda::memory_order_acquire); }
  __device__ static void relax() { __nanosleep(20); }
};

/// Counts the worker in; true for all consumer threads when it is the last. What they stored comes before.
template <KernelConfig kConfig>
[[nodiscard]] __device__ __forceinline__ bool arrive(fixup::Counter& counter, std::int32_t contributors) {
  CtaShared<kConfig>& shared = cta_memory<kConfig>().shared;
  consumer_sync<kConfig>();
  if (ptx::thread_index() == 0) shared.arrived_last = fixup::arrive_last<DeviceAtomic>(counter, contributors) ? 1 : 0;
  consumer_sync<kConfig>();
  return shared.arrived_last != 0;
}

/// The paper's fix-up: peers raise a flag; the host, for whom this returns true, waits for all of them.
template <KernelConfig kConfig>
[[nodiscard]] __device__ __forceinline__ bool await_peers(const fixup::Slots& slots, const SegmentRecord& record) {
  const auto thread = static_cast<std::int32_t>(ptx::thread_index());
  if (record.contributor != 0) {
    consumer_sync<kConfig>();
    if (thread == 0) fixup::signal<DeviceAtomic>(slots.counter(record.slots.slot(record.contributor)));
    return false;
  }
  for (std::int32_t c = 1 + thread; c < record.contributors; c += kConfig.consumer_threads()) {
    fixup::wait_for<DeviceAtomic>(slots.counter(record.slots.slot(c)));
  }
  consumer_sync<kConfig>();
  return true;
}

}  // namespace lean::cuda
