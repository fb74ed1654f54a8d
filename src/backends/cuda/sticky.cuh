// The device's one way to report a fault in data that only it reads: a sticky code in the workspace, and which entry it was, which
// the host reads when it likes (sticky_status()). Any thread of any kernel may; the first fault stays until reset_workspace().
// backends/cpu/sticky.hpp does the same on a CPU.
#pragma once

#include "backends/cuda/device_atomic.cuh"
#include "backends/cuda/ptx/arch.cuh"
#include "fixup/sticky.hpp"
#include "fixup/workspace.hpp"
#include "lean/problem.hpp"
#include "lean/status.hpp"

namespace lean::cuda {

/// A compare-and-swap: two CTAs may find different faults at once.
__device__ __forceinline__ void report_sticky(fixup::StateHeader& header, StatusCode code) {
  fixup::report_sticky<DeviceAtomic>(header, code);
}

/// Called where nothing is kept in registers: inside a loop over tiles, whose registers are all taken, this made the loop spill.
__device__ LEAN_CUDA_CALLED void look_up_fault(const Problem& problem, fixup::StateHeader& header) {
  fixup::name_fault<DeviceAtomic>(problem, header);
}

/// Has the entry looked up where there is a fault. By who is done with a call, and had read all lengths and page ids that it reports:
/// without a fault one word is read.
__device__ __forceinline__ void name_fault(const Problem& problem, fixup::StateHeader& header) {
  if (fixup::has_fault<DeviceAtomic>(header)) look_up_fault(problem, header);
}

}  // namespace lean::cuda
