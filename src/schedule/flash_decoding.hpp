// FlashDecoding's own rule for its number of splits, so that the fixed-split policy is the rival people run and not a
// straw man. Source: FlashAttention-2, csrc/flash_attn/flash_api.cpp, num_splits_heuristic (called with 2 x SMs).
#pragma once

#include <cstdint>

#include "base/hd.hpp"
#include "base/int_math.hpp"
#include "lean/options.hpp"

namespace lean::schedule {

/// Splits for `outputs` outputs of up to `max_tiles` tiles on `workers` workers: none once 80 % of the workers have an
/// output of their own; else the fewest splits whose last wave is filled to 85 % of the best reachable filling.
LEAN_HD [[nodiscard]] constexpr std::int32_t flash_decoding_splits(std::int64_t outputs, std::int64_t max_tiles,
                                                                   std::int32_t workers) noexcept {
  if (outputs == 0 || outputs * 10 >= static_cast<std::int64_t>(workers) * 8) return 1;
  const std::int64_t limit = min_of(Policy::kMaxSplits, min_of(workers, max_tiles));
  // A split count is worth trying only if it makes the splits shorter.
  const auto eligible = [max_tiles](std::int64_t s) { return s == 1 || ceil_div(max_tiles, s) != ceil_div(max_tiles, s - 1); };
  // Filling of the waves: items / waves, exact, so that a count at 85 % of the best to the last bit is taken.
  struct Filling {
    std::int64_t items;
    std::int64_t waves;
  };
  const auto filling = [outputs, workers](std::int64_t s) { return Filling{outputs * s, ceil_div(outputs * s, workers)}; };
  Filling best = filling(1);
  for (std::int64_t s = 2; s <= limit; ++s) {
    const Filling f = filling(s);
    if (eligible(s) && f.items * best.waves > best.items * f.waves) best = f;
  }
  for (std::int64_t s = 1; s <= limit; ++s) {
    const Filling f = filling(s);
    if (eligible(s) && f.items * best.waves * 100 >= best.items * f.waves * 85) return static_cast<std::int32_t>(s);
  }
  return 1;
}

}  // namespace lean::schedule
