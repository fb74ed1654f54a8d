// Integer arithmetic for counts, offsets and shares, in 64 bits, without products that could leave them.
#pragma once

#include <cstdint>

#include "base/hd.hpp"

namespace lean {

/// ceil(a / b) for a >= 0, b > 0.
LEAN_HD [[nodiscard]] constexpr std::int64_t ceil_div(std::int64_t a, std::int64_t b) noexcept {
  return a / b + (a % b != 0 ? 1 : 0);
}

/// a / b for a >= 0, b > 0. In 32 bits where both fit: a GPU divides 64 bits by several times as many instructions.
LEAN_HD [[nodiscard]] LEAN_OUTLINE constexpr std::int64_t quotient(std::int64_t a, std::int64_t b) noexcept {
  if (((a | b) >> 32) == 0) return static_cast<std::uint32_t>(a) / static_cast<std::uint32_t>(b);
  return a / b;
}
LEAN_HD [[nodiscard]] constexpr std::int32_t quotient(std::int32_t a, std::int32_t b) noexcept {
  return static_cast<std::int32_t>(static_cast<std::uint32_t>(a) / static_cast<std::uint32_t>(b));
}

/// What is divided by again and again, and known before: a division is a product with its reciprocal, rounded up. For L the power
/// of two's exponent at or above the value, 2^(31 + L) / value fits 32 bits, and rounding adds less than value <= 2^L to that times
/// value, so that the quotient of any number below 2^31 is exact.
class Divisor {
 public:
  Divisor() = default;
  /// 0 < value < 2^31.
  explicit constexpr Divisor(std::int32_t value) noexcept : value_(value) {
    while ((std::int64_t{1} << shift_) < value) ++shift_;
    reciprocal_ = static_cast<std::uint32_t>(((std::uint64_t{1} << (31 + shift_)) + static_cast<std::uint32_t>(value) - 1) /
                                             static_cast<std::uint32_t>(value));
  }

  [[nodiscard]] LEAN_HD constexpr std::int32_t value() const noexcept { return value_; }
  /// a / value for 0 <= a < 2^31.
  [[nodiscard]] LEAN_HD constexpr std::int32_t quotient_of(std::int32_t a) const noexcept {
    const std::uint32_t twice = static_cast<std::uint32_t>(a) << 1;
    return static_cast<std::int32_t>(static_cast<std::uint32_t>((std::uint64_t{twice} * reciprocal_) >> 32) >> shift_);
  }

 private:
  std::int32_t value_ = 1;
  std::uint32_t reciprocal_ = std::uint32_t{1} << 31;
  std::int32_t shift_ = 0;
};

LEAN_HD [[nodiscard]] constexpr std::int32_t quotient(std::int32_t a, const Divisor& b) noexcept { return b.quotient_of(a); }

/// The smaller and the larger of two values: of one type, or in 64 bits.
template <typename T>
LEAN_HD [[nodiscard]] constexpr T min_of(T a, T b) noexcept {
  return a < b ? a : b;
}
template <typename T>
LEAN_HD [[nodiscard]] constexpr T max_of(T a, T b) noexcept {
  return a < b ? b : a;
}
LEAN_HD [[nodiscard]] constexpr std::int64_t min_of(std::int64_t a, std::int64_t b) noexcept { return a < b ? a : b; }
LEAN_HD [[nodiscard]] constexpr std::int64_t max_of(std::int64_t a, std::int64_t b) noexcept { return a < b ? b : a; }

/// The smallest multiple of `step` that is >= a, for a >= 0, step > 0.
LEAN_HD [[nodiscard]] constexpr std::int64_t round_up(std::int64_t a, std::int64_t step) noexcept {
  return ceil_div(a, step) * step;
}

LEAN_HD [[nodiscard]] constexpr std::int64_t clamp_to(std::int64_t a, std::int64_t low, std::int64_t high) noexcept {
  return a < low ? low : (a > high ? high : a);
}

/// floor(total * index / parts) without forming the product: index <= parts < 2^31, total >= 0.
LEAN_HD [[nodiscard]] constexpr std::int64_t share_begin(std::int64_t total, std::int64_t index, std::int64_t parts) noexcept {
  return index * (total / parts) + index * (total % parts) / parts;
}

/// a * b, or -1 when it would exceed int64 or a factor is -1 already, so that products chain.
[[nodiscard]] constexpr std::int64_t checked_product(std::int64_t a, std::int64_t b) noexcept {
  if (a < 0 || b < 0) return -1;
  if (a == 0 || b == 0) return 0;
  return a > INT64_MAX / b ? -1 : a * b;
}

}  // namespace lean
