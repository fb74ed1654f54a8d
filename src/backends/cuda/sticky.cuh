// The device's one way to report a fault in data that only it reads: a sticky code in the workspace, which the host reads when it
// likes (sticky_status()). Any thread of any kernel may; the first fault stays until reset_workspace().
#pragma once

#include <cuda/atomic>

#include "fixup/workspace.hpp"
#include "lean/status.hpp"

namespace lean::cuda {

/// A compare-and-swap: two CTAs may find different faults at once.
__device__ __forceinline__ void report_sticky(fixup::StateHeader& header, StatusCode code) {
  using Code = ::cuda::atomic_ref<fixup::Counter, ::cuda::thread_scope_device>;
  fixup::Counter none = 0;
  Code(header.sticky_code).compare_exchange_strong(none, static_cast<fixup::Counter>(code), ::cuda::memory_order_relaxed);
}

}  // namespace lean::cuda
