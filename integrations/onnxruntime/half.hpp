// 16-bit numbers and fp32, by arithmetic that every compiler of this folder does while it compiles: for the host and, under nvcc, for
// the device.
#pragma once

#include <bit>
#include <cstdint>

#include "lean/problem.hpp"

namespace lean::ort {

[[nodiscard]] constexpr float from_half(std::uint16_t half) noexcept {
  const std::uint32_t sign = static_cast<std::uint32_t>(half & 0x8000U) << 16;
  const std::uint32_t rest = static_cast<std::uint32_t>(half & 0x7fffU) << 13;
  if ((half & 0x7c00U) == 0x7c00U) return std::bit_cast<float>(sign | 0x7f800000U | rest);
  return std::bit_cast<float>(sign | std::bit_cast<std::uint32_t>(std::bit_cast<float>(rest) * 0x1p112F));
}

[[nodiscard]] constexpr float from_bfloat16(std::uint16_t bits) noexcept {
  return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
}

/// Rounded to nearest, ties to even; beyond the largest: infinity.
[[nodiscard]] constexpr std::uint16_t to_half(float x) noexcept {
  const auto bits = std::bit_cast<std::uint32_t>(x);
  const auto sign = static_cast<std::uint16_t>(bits >> 16 & 0x8000U);
  const std::uint32_t rest = bits & 0x7fffffffU;
  if (rest > 0x7f800000U) return static_cast<std::uint16_t>(sign | 0x7e00U);
  if (rest >= 0x477ff000U) return static_cast<std::uint16_t>(sign | 0x7c00U);
  if (rest < 0x38800000U)  // below 2^-14 halves are multiples of 2^-24, which an fp32 beside 0.5 has as its last bit
    return static_cast<std::uint16_t>(sign | (std::bit_cast<std::uint32_t>(std::bit_cast<float>(rest) + 0.5F) - 0x3f000000U));
  return static_cast<std::uint16_t>(sign | ((rest + 0xc8000fffU + (rest >> 13 & 1U)) >> 13));
}

[[nodiscard]] constexpr std::uint16_t to_bfloat16(float x) noexcept {
  const auto bits = std::bit_cast<std::uint32_t>(x);
  if ((bits & 0x7fffffffU) > 0x7f800000U) return static_cast<std::uint16_t>(bits >> 16 | 0x40U);
  return static_cast<std::uint16_t>((bits + 0x7fffU + (bits >> 16 & 1U)) >> 16);
}

/// An element of float32, float16 or bfloat16.
[[nodiscard]] constexpr float load_number(const void* from, DType dtype, std::int64_t element) noexcept {
  if (dtype == DType::kFloat32) return static_cast<const float*>(from)[element];
  const std::uint16_t bits = static_cast<const std::uint16_t*>(from)[element];
  return dtype == DType::kBFloat16 ? from_bfloat16(bits) : from_half(bits);
}
constexpr void store_number(void* to, DType dtype, std::int64_t element, float x) noexcept {
  if (dtype == DType::kFloat32)
    static_cast<float*>(to)[element] = x;
  else
    static_cast<std::uint16_t*>(to)[element] = dtype == DType::kBFloat16 ? to_bfloat16(x) : to_half(x);
}

}  // namespace lean::ort
