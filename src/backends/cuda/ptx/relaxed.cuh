// Words of device memory that another kernel may be writing: read whole, past the L1.
// Source: PTX ISA, "Memory Consistency Model": strong relaxed operations.
#pragma once

#include <cstdint>

namespace lean::cuda::ptx {

[[nodiscard]] __device__ __forceinline__ std::int32_t load_relaxed(const std::int32_t* at) {
  std::int32_t x;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(x) : "l"(at) : "memory");
  return x;
}

}  // namespace lean::cuda::ptx
