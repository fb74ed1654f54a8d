// Registers that the hardware keeps (PTX ISA, "Special Registers").
#pragma once

#include <cstdint>

namespace lean::cuda::ptx {

/// threadIdx.x, read anew each time: what is derived from it is not kept in registers across the loops around.
[[nodiscard]] __device__ __forceinline__ std::uint32_t thread_index() {
  std::uint32_t index;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
  return index;
}

/// Cycles of this multiprocessor's clock, of which differences mean something.
[[nodiscard]] __device__ __forceinline__ std::uint32_t clock_cycles() {
  std::uint32_t cycles;
  asm volatile("mov.u32 %0, %%clock;" : "=r"(cycles)::"memory");
  return cycles;
}

}  // namespace lean::cuda::ptx
