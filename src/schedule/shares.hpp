// Shares: a line cut into equal shares. Share g begins at floor(g x total / parts). The divisions are done once, so that every
// boundary afterwards is a few multiplications: workers look boundaries up one by one, and a GPU divides 64 bits slowly.
#pragma once

#include <cstdint>
#include <type_traits>

#include "base/hd.hpp"
#include "base/int_math.hpp"

namespace lean::schedule {

template <typename TUnits>
class BasicShares {
 public:
  BasicShares() = default;
  /// total >= 0, 0 < parts < 2^31.
  LEAN_HD constexpr BasicShares(TUnits total, std::int32_t parts) noexcept
      : parts_(parts),
        quotient_(quotient(total, TUnits{parts})),
        remainder_(static_cast<std::int32_t>(total - quotient_ * parts)),
        total_(total) {}

  /// Shares of `length` each.
  [[nodiscard]] LEAN_HD static constexpr BasicShares equal(TUnits length, std::int32_t parts) noexcept {
    BasicShares shares;
    shares.parts_ = parts;
    shares.quotient_ = length;
    shares.total_ = length * parts;
    return shares;
  }

  /// Share g is [begin, end).
  struct Range {
    TUnits begin = 0;
    TUnits end = 0;
  };
  /// Share g's range, 0 <= g <= parts, by one division; there is no share `parts`, and only its begin, the total, means something.
  [[nodiscard]] LEAN_HD constexpr Range range(std::int32_t g) const noexcept {
    const TUnits extra = quotient(TUnits{g} * remainder_, TUnits{parts_});  // narrow_units(): parts^2 fits
    const TUnits left = TUnits{g} * remainder_ - extra * parts_;
    const TUnits begin = TUnits{g} * quotient_ + extra;
    const TUnits length = quotient_ + (left + remainder_ >= parts_ ? 1 : 0);
    using Modulo = std::make_unsigned_t<TUnits>;  // the end of a share `parts` may be none of TUnits
    return {begin, static_cast<TUnits>(static_cast<Modulo>(begin) + static_cast<Modulo>(length))};
  }

  /// floor(g x total / parts) for 0 <= g <= parts.
  [[nodiscard]] LEAN_HD constexpr TUnits begin(std::int32_t g) const noexcept { return range(g).begin; }

  /// Units of the smallest share, give or take one.
  [[nodiscard]] LEAN_HD constexpr TUnits least() const noexcept { return quotient_; }

  /// The first g with begin(g) >= place, for 0 <= place <= total: an estimate, then exact steps.
  [[nodiscard]] LEAN_HD constexpr std::int32_t first_from(TUnits place) const noexcept {
    const float estimate =
        total_ > 0 ? rough_quotient(static_cast<float>(place), static_cast<float>(total_)) * static_cast<float>(parts_) : 0.0F;
    auto g = estimate < static_cast<float>(parts_) ? static_cast<std::int32_t>(estimate) : parts_;
    while (begin(g) < place) ++g;
    while (g > 0 && begin(g - 1) >= place) --g;
    return g;
  }

 private:
  /// a / b to a few units in the last place, for an estimate.
  [[nodiscard]] LEAN_HD static constexpr float rough_quotient(float a, float b) noexcept {
#ifdef __CUDA_ARCH__
    return __fdividef(a, b);
#else
    return a / b;
#endif
  }

  std::int32_t parts_ = 1;
  TUnits quotient_ = 0;
  std::int32_t remainder_ = 0;
  TUnits total_ = 0;
};

using Shares = BasicShares<std::int64_t>;

/// Which of the workers a place of the grid is, or `workers` where it is none: places without work lie evenly among the others. A GPU
/// fills neighbouring places with CTAs in an order of its own, which a dependent launch takes up where the one ahead left it, and the
/// multiprocessors that share a way to the memory read no faster together for being more (docs/notebook/short-calls.md).
/// 0 <= place < places, 0 < workers, workers x places < 2^31.
LEAN_HD [[nodiscard]] constexpr std::int32_t spread_worker(std::int32_t place, std::int32_t workers, std::int32_t places) noexcept {
  if (workers >= places) return place;
  const std::int32_t worker = quotient(place * workers, places);
  return (place + 1) * workers >= (worker + 1) * places ? worker : workers;
}

}  // namespace lean::schedule
