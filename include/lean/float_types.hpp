// fp16, bf16 and fp8 as storage types, for who holds elements of those and has no types of his own. Converted by integer arithmetic,
// so while compiling and in code for a GPU too (nvcc: --expt-relaxed-constexpr), whatever becomes of subnormal floats there.
// For where speed does not matter; the backends convert with their own instructions and agree bit for bit on every finite value.
#pragma once

#include <bit>
#include <cstdint>

namespace lean {

/// IEEE 754's binary16.
struct Half {
  std::uint16_t bits = 0;
};
/// The upper half of an fp32.
struct BFloat16 {
  std::uint16_t bits = 0;
};
/// fp8 as in OCP's "8-bit Floating Point Specification" (OFP8): E4M3 has no infinity, its NaN is all ones behind the sign; E5M2 is
/// the upper half of an fp16.
struct Float8E4M3 {
  std::uint8_t bits = 0;
};
struct Float8E5M2 {
  std::uint8_t bits = 0;
};

/// Itself, so that code for any type of element reads one like the others.
[[nodiscard]] constexpr float to_float(float x) noexcept { return x; }

/// The number that an element stands for: exact, as for the types below.
[[nodiscard]] constexpr float to_float(BFloat16 x) noexcept {
  return std::bit_cast<float>(static_cast<std::uint32_t>(x.bits) << 16);
}

/// Subnormals too.
[[nodiscard]] constexpr float to_float(Half x) noexcept {
  const std::uint32_t sign = static_cast<std::uint32_t>(x.bits & 0x8000U) << 16;
  const std::uint32_t exponent = (x.bits >> 10) & 0x1FU;
  const std::uint32_t mantissa = x.bits & 0x3FFU;
  if (exponent == 0x1F) return std::bit_cast<float>(sign | 0x7F800000U | (mantissa << 13));
  if (exponent != 0) return std::bit_cast<float>(sign | ((exponent + 112) << 23) | (mantissa << 13));
  const float magnitude = static_cast<float>(mantissa) * 0x1p-24F;  // subnormal: exact in fp32
  return sign != 0 ? -magnitude : magnitude;
}

/// As an fp16 whose exponent has 8 more of bias.
[[nodiscard]] constexpr float to_float(Float8E4M3 x) noexcept {
  const auto sign = static_cast<std::uint16_t>((x.bits & 0x80U) << 8);
  const auto fields = static_cast<std::uint16_t>((x.bits & 0x7FU) << 7);
  if (fields == 0x3F80U) return to_float(Half{static_cast<std::uint16_t>(sign | 0x7E00U)});
  return to_float(Half{static_cast<std::uint16_t>(sign | fields)}) * 256.0F;
}

/// As the fp16 that it is the upper half of.
[[nodiscard]] constexpr float to_float(Float8E5M2 x) noexcept { return to_float(Half{static_cast<std::uint16_t>(x.bits << 8)}); }

/// The nearest element, of two the even one. fp16 and bf16 have infinity beyond their largest number; fp8 is saturating, as caches are
/// written: what is larger than the largest number, infinity too, becomes that number.
template <typename T>
[[nodiscard]] constexpr T from_float(float x) noexcept;

template <>
[[nodiscard]] constexpr float from_float<float>(float x) noexcept {
  return x;
}

template <>
[[nodiscard]] constexpr BFloat16 from_float<BFloat16>(float x) noexcept {
  const auto bits = std::bit_cast<std::uint32_t>(x);
  if ((bits & 0x7FFFFFFFU) > 0x7F800000U) return {static_cast<std::uint16_t>((bits >> 16) | 0x40U)};  // quiet NaN
  const std::uint32_t rounding = 0x7FFFU + ((bits >> 16) & 1U);
  return {static_cast<std::uint16_t>((bits + rounding) >> 16)};
}

template <>
[[nodiscard]] constexpr Half from_float<Half>(float x) noexcept {
  const auto bits = std::bit_cast<std::uint32_t>(x);
  const auto sign = static_cast<std::uint16_t>((bits >> 16) & 0x8000U);
  const std::uint32_t magnitude = bits & 0x7FFFFFFFU;
  const auto with_sign = [sign](std::uint32_t low) { return Half{static_cast<std::uint16_t>(sign | low)}; };
  if (magnitude > 0x7F800000U) return with_sign(0x7E00U | ((magnitude >> 13) & 0x3FFU));  // quiet NaN
  if (magnitude >= 0x477FF000U) return with_sign(0x7C00U);                                // rounds to infinity
  if (magnitude < 0x33000001U) return with_sign(0U);                                      // rounds to zero
  const std::uint32_t exponent = magnitude >> 23;
  std::uint32_t mantissa = (magnitude & 0x7FFFFFU) | 0x800000U;
  const std::uint32_t shift = exponent < 113 ? 126 - exponent : 13;  // subnormals lose more bits
  const std::uint32_t lost = mantissa & ((1U << shift) - 1U);
  const std::uint32_t half = 1U << (shift - 1);
  mantissa >>= shift;
  if (lost > half || (lost == half && (mantissa & 1U) != 0)) ++mantissa;
  return with_sign(exponent < 113 ? mantissa : mantissa + ((exponent - 113) << 10));
}

namespace detail {

/// The magnitude of an fp8 with these fields: rounded to nearest even, at most `largest`. x is no NaN.
[[nodiscard]] constexpr std::uint32_t fp8_magnitude(float x, std::uint32_t mantissa_bits, std::uint32_t bias,
                                                    std::uint32_t largest) noexcept {
  const std::uint32_t magnitude = std::bit_cast<std::uint32_t>(x) & 0x7FFFFFFFU;
  const std::uint32_t exponent = magnitude >> 23;
  const std::uint32_t smallest_normal = 128 - bias;  // as an fp32 exponent
  const std::uint32_t shift = 23 - mantissa_bits + (exponent < smallest_normal ? smallest_normal - exponent : 0);
  if (shift > 24) return 0;  // below half the smallest step
  const std::uint32_t mantissa = (magnitude & 0x7FFFFFU) | 0x800000U;
  const std::uint32_t lost = mantissa & ((1U << shift) - 1U);
  const std::uint32_t half = 1U << (shift - 1);
  std::uint32_t rounded = mantissa >> shift;
  if (lost > half || (lost == half && (rounded & 1U) != 0)) ++rounded;
  if (exponent >= smallest_normal) rounded += (exponent - smallest_normal) << mantissa_bits;
  return rounded < largest ? rounded : largest;
}

}  // namespace detail

template <>
[[nodiscard]] constexpr Float8E4M3 from_float<Float8E4M3>(float x) noexcept {
  const std::uint32_t sign = (std::bit_cast<std::uint32_t>(x) >> 24) & 0x80U;
  return {static_cast<std::uint8_t>(sign | (x != x ? 0x7FU : detail::fp8_magnitude(x, 3, 7, 0x7EU)))};
}

template <>
[[nodiscard]] constexpr Float8E5M2 from_float<Float8E5M2>(float x) noexcept {
  const std::uint32_t sign = (std::bit_cast<std::uint32_t>(x) >> 24) & 0x80U;
  return {static_cast<std::uint8_t>(sign | (x != x ? 0x7EU : detail::fp8_magnitude(x, 2, 15, 0x7BU)))};
}

}  // namespace lean
