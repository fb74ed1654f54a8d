// Words of device memory that another kernel may be writing: read whole, past the L1.
// Source: PTX ISA, "Memory Consistency Model": strong relaxed operations.
#pragma once

#include <cstdint>

#include "base/hd.hpp"

namespace lean::cuda::ptx {

/// Stays behind a wait for earlier kernels, as volatile assembly behind other (grid.cuh), and orders nothing else. What reads lengths is
/// compiled for a host, too, which calls this nowhere.
[[nodiscard]] LEAN_HD inline std::int32_t load_relaxed(const std::int32_t* at) noexcept {
#ifndef __CUDA_ARCH__
  return *at;
#else
  std::int32_t x;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(x) : "l"(at));
  return x;
#endif
}

}  // namespace lean::cuda::ptx
