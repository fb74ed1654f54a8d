// The device's one way to report a fault in data that only it reads: a sticky code in the workspace, and from the plain kernel
// which entry it was, which the host reads when it likes (sticky_status()). Any thread of any kernel may; the first fault stays
// until reset_workspace(). backends/cpu/sticky.hpp does the same on a CPU.
#pragma once

#include <cuda/atomic>

#include "backends/cuda/ptx/arch.cuh"
#include "fixup/workspace.hpp"
#include "lean/status.hpp"
#include "problem/length_faults.hpp"

namespace lean::cuda {

/// Whether the code is the state's first. A compare-and-swap: two CTAs may find different faults at once.
__device__ __forceinline__ bool report_sticky(fixup::StateHeader& header, StatusCode code) {
  using Code = ::cuda::atomic_ref<fixup::Counter, ::cuda::thread_scope_device>;
  fixup::Counter none = 0;
  return Code(header.sticky_code).compare_exchange_strong(none, static_cast<fixup::Counter>(code), ::cuda::memory_order_relaxed);
}

/// Which entry it was, looked up once until the next reset by the thread whose code is the first. The plain kernel does so; in the
/// variants of the tile, whose registers are all taken, these calls made the loop over tiles spill (up to 916 bytes for 672).
__device__ __noinline__ inline void report_bad_length(const Problem& problem, fixup::StateHeader& header) {
  if (report_sticky(header, StatusCode::kBadLengths)) header.fault = first_bad_length(problem);
}
__device__ __noinline__ inline void report_bad_page(const Problem& problem, fixup::StateHeader& header, std::int64_t sequence) {
  if (report_sticky(header, StatusCode::kBadPageIndex)) header.fault = first_bad_page(problem, sequence);
}

}  // namespace lean::cuda
