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

/// A number of which the compiler knows nothing.
[[nodiscard]] __device__ __forceinline__ std::uint32_t opaque(std::uint32_t number) {
  asm volatile("" : "+r"(number));
  return number;
}

/// Cycles of this multiprocessor's clock, of which differences mean something.
[[nodiscard]] __device__ __forceinline__ std::uint32_t clock_cycles() {
  std::uint32_t cycles;
  asm volatile("mov.u32 %0, %%clock;" : "=r"(cycles)::"memory");
  return cycles;
}

/// Nanoseconds of the GPU's clock, the same for all multiprocessors; how often it moves on is the GPU's matter.
[[nodiscard]] __device__ __forceinline__ std::int64_t global_nanoseconds() {
  std::int64_t nanoseconds;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(nanoseconds)::"memory");
  return nanoseconds;
}

/// The multiprocessor that this thread runs on.
[[nodiscard]] __device__ __forceinline__ std::uint32_t multiprocessor_id() {
  std::uint32_t id;
  asm volatile("mov.u32 %0, %%smid;" : "=r"(id));
  return id;
}

}  // namespace lean::cuda::ptx
