// An element of float32, float16 or bfloat16 as an fp32 number: for the host and, under nvcc, for the device.
#pragma once

#include <cstdint>

#include "lean/float_types.hpp"
#include "lean/problem.hpp"

namespace lean::ort {

[[nodiscard]] constexpr float load_number(const void* from, DType dtype, std::int64_t element) noexcept {
  if (dtype == DType::kFloat32) return static_cast<const float*>(from)[element];
  const std::uint16_t bits = static_cast<const std::uint16_t*>(from)[element];
  return dtype == DType::kBFloat16 ? to_float(BFloat16{bits}) : to_float(Half{bits});
}
constexpr void store_number(void* to, DType dtype, std::int64_t element, float x) noexcept {
  if (dtype == DType::kFloat32)
    static_cast<float*>(to)[element] = x;
  else
    static_cast<std::uint16_t*>(to)[element] = dtype == DType::kBFloat16 ? from_float<BFloat16>(x).bits : from_float<Half>(x).bits;
}

}  // namespace lean::ort
