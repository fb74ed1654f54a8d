// Programmatic dependent launch (PDL): kernels of a stream that overlap. Nothing before sm_90, where no such launch is made.
// Source: CUDA C++ Programming Guide, "Programmatic Dependent Launch and Synchronization"; PTX ISA, griddepcontrol.
#pragma once

#include "backends/cuda/ptx/arch.cuh"

namespace lean::cuda::ptx {

/// The next kernel of the stream may start once all CTAs have called this: it has a wait of its own.
__device__ __forceinline__ void start_dependents() {
#if LEAN_CUDA_ARCH >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/// Until the kernels before this one have ended and what they wrote is seen.
__device__ __forceinline__ void await_earlier_kernels() {
#if LEAN_CUDA_ARCH >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace lean::cuda::ptx
