// 16-bit numbers as fp32, by arithmetic that every compiler of this folder does while it compiles: for the host and, under nvcc, for
// the device.
#pragma once

#include <bit>
#include <cstdint>

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

}  // namespace lean::ort
