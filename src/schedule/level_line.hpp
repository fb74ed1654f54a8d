// Level lines: a stair line whose outputs are dealt out whole, or in equal parts at the same tokens, instead of being cut anywhere.
// Workers that begin at the same token of a head read its K and V at the same time, so that one of them comes for both from memory,
// and whoever has whole outputs merges nothing. What that leaves unequal is bounded, and paid for by what it saves (make_stair_plan()).
#pragma once

#include <cstdint>

#include "base/hd.hpp"
#include "base/int_math.hpp"
#include "lean/options.hpp"
#include "schedule/line_shape.hpp"
#include "schedule/plan.hpp"
#include "schedule/shares.hpp"
#include "schedule/work_line.hpp"

namespace lean::schedule {

/// An equal share >> this is what workers that walk the same tokens of long K and V at one time are worth: a sixteenth of their time.
inline constexpr std::int32_t kFarWorthLog2 = 4;
/// Parts of an output that least_deal() tries, at most.
inline constexpr std::int32_t kMostLevelParts = 8;

/// The plan of a stair line. A level one is measured anew, every output as many units as it has parts (level_parts), a head's row blocks
/// in an order in which any two neighbours have as many tiles together (level_block()). A worker takes so many whole outputs first, one
/// or two neighbours at a time, all workers in turn; the line's zero is where these end, and what lies behind is dealt out by shares.
template <typename TUnits>
struct BasicStairPlan : BasicPlan<TUnits> {
  using Range = typename BasicShares<TUnits>::Range;

  TUnits level_units = 0;            // that are dealt out by shares,
  TUnits level_share = 0;            // of so many
  std::int32_t whole_turns = 0;      // outputs that every worker takes whole,
  std::int32_t neighbours_log2 = 0;  // 1 << this of them in a row

  /// A worker's share; empty, at the line's end, for those that have none.
  [[nodiscard]] LEAN_HD constexpr Range share_of(std::int32_t worker) const noexcept {
    if (this->level_parts == 0) return this->shares.range(worker);
    const TUnits begin = worker * level_share;
    return {min_of(begin, level_units), min_of(begin + level_share, level_units)};
  }
  /// Where the worker's whole output of a turn begins: before the line's zero.
  [[nodiscard]] LEAN_HD constexpr TUnits whole_begin(std::int32_t worker, std::int32_t turn) const noexcept {
    const std::int32_t round = turn >> neighbours_log2;
    const std::int32_t output = ((round * this->workers + worker - round) << neighbours_log2) + turn;
    return TUnits{output} * this->level_parts + line_begin();
  }
  /// Where the first of the line's outputs begins.
  [[nodiscard]] LEAN_HD constexpr TUnits line_begin() const noexcept {
    return -TUnits{whole_turns * this->workers} * this->level_parts;
  }
  /// Where a worker of the plan begins.
  [[nodiscard]] LEAN_HD constexpr TUnits begin_of(std::int32_t worker, const Range& share) const noexcept {
    return whole_turns > 0 ? whole_begin(worker, 0) : share.begin;
  }
};

/// The row block at a place among the `blocks` of a head of a level line: the first, the last, the second, the last but one, ...
LEAN_HD [[nodiscard]] constexpr std::int32_t level_block(std::int32_t place, std::int32_t blocks) noexcept {
  return (place & 1) == 0 ? place >> 1 : blocks - 1 - (place >> 1);
}

/// How a line may be dealt out level: in rounds of whole outputs, one or two neighbours a worker, then by shares of so many units, of
/// which an output has `parts`.
template <typename TUnits>
struct BasicLevelDeal {
  std::int32_t rounds = 0;
  std::int32_t neighbours_log2 = 0;
  TUnits rest = 0;  // outputs that are dealt out by shares; 0: no deal
  TUnits parts = 1;
  TUnits share_units = 1;
  TUnits longest = 0;  // what a worker may get, in cost

  /// The most that a worker gets, give or take what whole tiles make of it. Outputs one by one may all be the longest; of two neighbours
  /// one is as much shorter as the other is longer.
  [[nodiscard]] LEAN_HD constexpr TUnits longest_of(const BasicStairSums<TUnits>& sums, const CostModel& model) const noexcept {
    const TUnits round = neighbours_log2 > 0 ? sums.max_pair_cost : sums.max_output_cost;
    const TUnits over = share_units - parts;  // beyond an output
    TUnits share = sums.max_output_cost;
    if (over < 0) {
      share = share_units * (quotient(sums.max_output_tiles + parts - 1, parts) * model.tile_units) + model.segment_units;
    } else if (over > 0) {
      share += quotient(over * (sums.max_pair_cost - sums.max_output_cost), parts) + (over < parts ? model.tile_units : 0);
    }
    const bool is_cut = share_units > 1 && over != 0 && over != parts;  // shares begin in one output and end in another
    return rounds * round + share + (is_cut ? model.cut_units : 0);
  }
};

/// Whether a worker gets no more than so much, and an output has a tile for each of its parts.
template <typename TUnits>
LEAN_HD [[nodiscard]] constexpr bool holds(const BasicLevelDeal<TUnits>& deal, const BasicStairSums<TUnits>& sums,
                                           const CostModel& model, TUnits most) noexcept {
  return deal.longest <= most && (deal.parts == 1 || sums.min_output_cost >= deal.parts * model.tile_units + model.segment_units);
}

/// No more outputs than workers: each cut into as many equal parts, one a worker, or left whole (whole_each()). A worker of its own for
/// each part, so that nothing else is tried out: what precedes the first copy of a short chunk counts.
template <typename TUnits>
LEAN_HD [[nodiscard]] constexpr BasicLevelDeal<TUnits> part_each(const BasicStairSums<TUnits>& sums, const CostModel& model,
                                                                 std::int32_t grid) noexcept {
  TUnits parts = quotient(TUnits{grid}, sums.outputs);
  if (model.part_tiles > 1)
    parts = min_of(parts, max_of(TUnits{kOneLevelParts}, quotient(TUnits{sums.max_output_tiles}, TUnits{model.part_tiles})));
  const TUnits tiles = quotient(sums.max_output_tiles + parts - 1, parts);
  return {.rest = sums.outputs, .parts = parts, .longest = tiles * model.tile_units + model.segment_units};
}

/// The same, left whole whatever the number of workers: the first row blocks of a whole prompt have a tile, which has no parts.
template <typename TUnits>
LEAN_HD [[nodiscard]] constexpr BasicLevelDeal<TUnits> whole_each(const BasicStairSums<TUnits>& sums,
                                                                  const CostModel& model) noexcept {
  return {.rest = sums.outputs, .longest = sums.max_output_tiles * model.tile_units + model.segment_units};
}

/// Whole outputs in as many rounds as there are, the rest by shares: the deal in which the worker with most has the least, if that is
/// no more than `most`. `far`: parts are tried.
template <typename TUnits>
LEAN_HD [[nodiscard]] constexpr BasicLevelDeal<TUnits> least_deal(const BasicStairSums<TUnits>& sums, const CostModel& model,
                                                                  std::int32_t grid, TUnits most, bool far) noexcept {
  BasicLevelDeal<TUnits> best{.longest = most};
  for (std::int32_t log2 = 0; log2 <= 1; ++log2) {
    const TUnits a_round = TUnits{grid} << log2;
    BasicLevelDeal<TUnits> deal{.rounds = static_cast<std::int32_t>(quotient(sums.outputs - 1, a_round)), .neighbours_log2 = log2};
    deal.rest = sums.outputs - deal.rounds * a_round;
    TUnits held = grid;  // units that all shares hold
    for (deal.parts = 1; deal.parts <= (far ? kMostLevelParts : 1); ++deal.parts) {
      for (; held < deal.rest * deal.parts; held += grid) ++deal.share_units;
      deal.longest = deal.longest_of(sums, model);
      // Of a head's row blocks at one time, as many begin at the same tokens as there are to a share's units.
      const bool shared = deal.rounds > 0 || deal.share_units == 1 || sums.tiles >= 2 * deal.share_units * sums.key_tiles;
      const bool less = best.rest == 0 || deal.longest < best.longest;
      if ((shared || !far) && less && holds(deal, sums, model, best.longest)) best = deal;
    }
  }
  return best;
}

/// The plan of a stair line, whose policy is lean. It is dealt out level where nobody has more than an equal share and what cuts
/// anywhere cost more than such (CostModel::cut_units). Where several row blocks read long K and V (CostModel::far_tiles), workers that
/// walk the same tokens at one time are worth a sixteenth of their time (kFarWorthLog2): those of whole outputs do, and so do those of
/// shares of a few parts, each part begun at one time.
template <typename TUnits>
LEAN_HD [[nodiscard]] constexpr BasicStairPlan<TUnits> make_stair_plan(const BasicStairSums<TUnits>& sums, const CostModel& model,
                                                                       std::int32_t tile_tokens, std::int32_t grid) noexcept {
  const bool far = sums.key_tiles > model.far_tiles && sums.tiles >= 2 * sums.key_tiles && sums.outputs > 0;
  const TUnits equal = quotient(sums.cost, TUnits{grid});
  const TUnits most = equal + model.cut_units + (far ? equal >> kFarWorthLog2 : 0);
  BasicLevelDeal<TUnits> deal;
  if (model.cut_units > 0 && sums.outputs > 0 && sums.outputs <= grid) {
    deal = part_each(sums, model, grid);
    const BasicLevelDeal<TUnits> whole = whole_each(sums, model);
    if (whole.longest <= deal.longest + model.whole_units || !holds(deal, sums, model, most)) deal = whole;
  }
  const TUnits whole_units = deal.parts == 1 ? model.whole_units : 0;
  if (deal.rest == 0 || !holds(deal, sums, model, most + whole_units)) [[unlikely]] {
    const bool tried = model.cut_units > 0 && (far || sums.outputs > grid);
    deal = tried ? least_deal(sums, model, grid, most, far) : BasicLevelDeal<TUnits>{};
    if (deal.rest == 0) return {make_plan(sums, Policy::lean(), model, tile_tokens, grid)};
  }
  BasicStairPlan<TUnits> plan;
  plan.level_parts = static_cast<std::int32_t>(deal.parts);
  plan.level_units = deal.rest * deal.parts;
  plan.level_share = deal.share_units;
  plan.whole_turns = deal.rounds << deal.neighbours_log2;
  plan.neighbours_log2 = deal.neighbours_log2;
  plan.workers = grid;
  if (deal.rounds == 0) {
    plan.workers = static_cast<std::int32_t>(plan.level_units);
    if (deal.share_units > 1)
      plan.workers = static_cast<std::int32_t>(quotient(plan.level_units + deal.share_units - 1, deal.share_units));
  }
  plan.shares = BasicShares<TUnits>::equal(deal.share_units, plan.workers);
  return plan;
}

}  // namespace lean::schedule
