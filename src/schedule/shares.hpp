// Shares: a line cut into equal shares. Share g begins at floor(g x total / parts). The divisions are done once, so that every
// boundary afterwards is a few multiplications: workers look boundaries up one by one, and a GPU divides 64 bits slowly.
#pragma once

#include <cstdint>

#include "base/hd.hpp"
#include "base/int_math.hpp"

namespace lean::schedule {

class Shares {
 public:
  Shares() = default;
  /// total >= 0, 0 < parts < 2^31.
  LEAN_HD constexpr Shares(std::int64_t total, std::int32_t parts) noexcept
      : parts_(parts),
        quotient_(quotient(total, parts)),
        remainder_(static_cast<std::int32_t>(total - quotient_ * parts)),
        per_part_(1.0 / parts),
        shares_per_unit_(total > 0 ? parts / static_cast<double>(total) : 0.0) {}

  /// floor(g x total / parts) for 0 <= g <= parts.
  [[nodiscard]] LEAN_HD constexpr std::int64_t begin(std::int64_t g) const noexcept {
    return g * quotient_ + quotient_of(g * remainder_);
  }

  /// Units of the smallest share, give or take one.
  [[nodiscard]] LEAN_HD constexpr std::int64_t least() const noexcept { return quotient_; }

  /// The first g with begin(g) >= place, for 0 <= place <= total: an estimate, then exact steps.
  [[nodiscard]] LEAN_HD LEAN_OUTLINE constexpr std::int64_t first_from(std::int64_t place) const noexcept {
    auto g = clamp_to(static_cast<std::int64_t>(static_cast<double>(place) * shares_per_unit_), 0, parts_);
    while (begin(g) < place) ++g;
    while (g > 0 && begin(g - 1) >= place) --g;
    return g;
  }

 private:
  /// x / parts for 0 <= x < 2^62: the product with the reciprocal is off by less than 1, which the remainder tells.
  [[nodiscard]] LEAN_HD constexpr std::int64_t quotient_of(std::int64_t x) const noexcept {
    const auto estimate = static_cast<std::int64_t>(static_cast<double>(x) * per_part_);
    const std::int64_t rest = x - estimate * parts_;
    return estimate + (rest >= parts_ ? 1 : 0) - (rest < 0 ? 1 : 0);
  }

  std::int32_t parts_ = 1;
  std::int64_t quotient_ = 0;
  std::int32_t remainder_ = 0;
  double per_part_ = 1.0;
  double shares_per_unit_ = 0.0;
};

}  // namespace lean::schedule
