// fp8 to fp16, two at a time and exactly: every code is an fp16, and NaN stays NaN (PTX ISA, "cvt").
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "backends/cuda/ptx/arch.cuh"
#include "lean/problem.hpp"

namespace lean::cuda::ptx {

/// E5M2 is the upper half of an fp16. The pair lies in the lower half of `pairs`, or the upper.
[[nodiscard]] __device__ __forceinline__ std::uint32_t e5m2_to_half(std::uint32_t pairs, bool upper) {
  return __byte_perm(pairs, 0U, upper ? 0x3424U : 0x1404U);
}

/// For what is older than sm_89: as an fp16 its exponent has 8 more of bias; all ones, 480 after that, are its NaN.
[[nodiscard]] __device__ __forceinline__ std::uint32_t e4m3_to_half_by_product(std::uint32_t pairs, bool upper) {
  const std::uint32_t wide = e5m2_to_half(pairs, upper);
  const std::uint32_t fields = (wide & 0x80008000U) | ((wide & 0x7F007F00U) >> 1);
  const __half2 x = __hmul2(*reinterpret_cast<const __half2*>(&fields), __float2half2_rn(256.0F));
  return *reinterpret_cast<const std::uint32_t*>(&x) | (__heq2_mask(__habs2(x), __float2half2_rn(480.0F)) & 0x7FFF7FFFU);
}

[[nodiscard]] __device__ __forceinline__ std::uint32_t e4m3_to_half(std::uint32_t pairs, bool upper) {
#if LEAN_CUDA_ARCH >= 890
  std::uint32_t halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(static_cast<std::uint16_t>(upper ? pairs >> 16 : pairs)));
  return halves;
#else
  return e4m3_to_half_by_product(pairs, upper);
#endif
}

template <DType kType>
[[nodiscard]] __device__ __forceinline__ std::uint32_t fp8_to_half(std::uint32_t pairs, bool upper) {
  return kType == DType::kFloat8E5M2 ? e5m2_to_half(pairs, upper) : e4m3_to_half(pairs, upper);
}

/// Eight codes.
template <DType kType>
[[nodiscard]] __device__ __forceinline__ uint4 eight_to_half(std::uint32_t first, std::uint32_t second) {
  return {fp8_to_half<kType>(first, false), fp8_to_half<kType>(first, true), fp8_to_half<kType>(second, false),
          fp8_to_half<kType>(second, true)};
}

}  // namespace lean::cuda::ptx
