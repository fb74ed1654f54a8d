// 16-bit elements as fp32.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "lean/problem.hpp"

namespace lean::cuda {

template <DType kType>
[[nodiscard]] __device__ __forceinline__ float to_float(std::uint16_t bits) {
  if constexpr (kType == DType::kFloat16) {
    return __half2float(__ushort_as_half(bits));
  } else {
    return __uint_as_float(std::uint32_t{bits} << 16);
  }
}

}  // namespace lean::cuda
