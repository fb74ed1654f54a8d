// Plan: the numbers that turn a WorkLine into worker ranges, and the never-worse rules that choose them.
// Computed from the line's sums alone, by every worker for itself; integers only.
#pragma once

#include <cstdint>

#include "base/hd.hpp"
#include "base/int_math.hpp"
#include "lean/options.hpp"
#include "schedule/flash_decoding.hpp"
#include "schedule/line_shape.hpp"
#include "schedule/shares.hpp"
#include "schedule/work_line.hpp"

namespace lean::schedule {

template <typename TUnits>
struct BasicPlan {
  Policy::Kind kind = Policy::Kind::kLean;
  std::int32_t workers = 1;            // workers that get work; <= the grid
  std::int32_t splits = 1;             // kFixedSplit, kDataParallel: items per output
  std::int32_t granularity_tiles = 1;  // cuts lie at multiples of this many tiles of an output
  TUnits snap_units = 0;               // a cut this close to an output's edge moves to the edge
  bool whole_outputs = false;          // every cut moves to the nearer edge
  std::int32_t level_parts =
      0;  // of a stair: every output has so many workers, and costs as many units (level_line.hpp); 0: not so
  BasicShares<TUnits> shares{};  // of the line, where it is cut

  /// Ranges of the line (lean, fixed_chunk) or items dealt out in turn (fixed_split, data_parallel)?
  [[nodiscard]] LEAN_HD constexpr bool cuts_the_line() const noexcept {
    return kind == Policy::Kind::kLean || kind == Policy::Kind::kFixedChunk;
  }
};

using Plan = BasicPlan<std::int64_t>;

LEAN_HD [[nodiscard]] constexpr Measure measure_of(Policy::Kind kind) noexcept {
  return kind == Policy::Kind::kLean || kind == Policy::Kind::kFixedChunk ? Measure::kCost : Measure::kOutputs;
}

/// Chunk length in tiles: at least one.
LEAN_HD [[nodiscard]] constexpr std::int32_t chunk_tiles_of(const Policy& policy, std::int32_t tile_tokens) noexcept {
  if (policy.kind != Policy::Kind::kFixedChunk) return 1;
  const std::int32_t tokens = policy.chunk_tokens > 0 ? policy.chunk_tokens : Policy::kDefaultChunkTokens;
  return static_cast<std::int32_t>(ceil_div(tokens, tile_tokens));
}

/// How close to an output's edge a cut may not lie, for shares of so many units.
template <typename TUnits>
LEAN_HD [[nodiscard]] constexpr TUnits snap_of(const CostModel& model, TUnits share) noexcept {
  const TUnits sliver = min_of<TUnits>(TUnits{model.sliver_tiles} * model.tile_units, share / 8);
  return model.align_percent == 0 ? sliver : max_of<TUnits>(share / 200 * model.align_percent, sliver);
}

namespace detail {

/// Lining up with outputs when all cost the same and that costs at most align_percent of the workers, or whole_percent where
/// outputs stay whole, and no worker more than align_units; or whatever it costs, where no worker then has more than short_tiles, or a
/// quarter of them for whole outputs of no more than spare_tiles together. Outputs of unshared_tiles and fewer are not cut at all.
/// Outputs that are shared may differ by alike_percent: boundaries that are a little off the edges are moved there.
template <typename TUnits>
LEAN_HD constexpr void align_to_outputs(BasicPlan<TUnits>& plan, const BasicLineSums<TUnits>& sums,
                                        const CostModel& model) noexcept {
  const TUnits n = sums.outputs;
  const TUnits w = plan.workers;
  if (!sums.alike(n <= w ? model.alike_percent : 0)) return;
  if (n <= w) {  // w' = n x floor(w / n): every output gets the same whole number of workers
    const TUnits parts = sums.max_output_tiles <= model.unshared_tiles ? 1 : quotient(w, n);
    const TUnits aligned = n * parts;
    const std::int64_t limit = std::int64_t{model.align_units} * w;
    const bool cheap = std::int64_t{aligned} * 100 >= std::int64_t{w} * (100 - model.align_percent) &&
                       std::int64_t{quotient(sums.cost, aligned)} * (w - aligned) <= limit;
    const bool is_short = sums.max_output_tiles <= std::int64_t{max_of(model.short_tiles, model.unshared_tiles)} * parts;
    if (cheap || is_short) plan.workers = static_cast<std::int32_t>(aligned);
    return;
  }
  const TUnits rounds = quotient(n + w - 1, w);            // every worker gets `rounds` outputs or one fewer
  const std::int64_t idle = std::int64_t{rounds} * w - n;  // outputs that would fit too
  const bool cheap =
      idle * 100 <= std::int64_t{n} * model.whole_percent && idle * sums.max_output_cost <= std::int64_t{model.align_units} * w;
  const std::int64_t longest = std::int64_t{rounds} * sums.max_output_tiles;
  const bool spares = model.spare_tiles > 0 && longest <= model.spare_tiles && std::int64_t{4} * n >= std::int64_t{3} * rounds * w;
  if (cheap || spares || longest <= model.short_tiles) {
    plan.workers = static_cast<std::int32_t>(quotient(n + rounds - 1, rounds));
    plan.whole_outputs = true;
  }
}

}  // namespace detail

/// The plan for `grid` workers at most. Limits it keeps, tested in schedule_test, with share = total / workers rounded up and
/// snap <= max(share x align_percent / 200, share / 8):
///  - a worker's cost is at most share + one granule + 2 segment_units + 2 snap;
///  - with whole_outputs it is at most total / grid x (1 + whole_percent / 100), or short_tiles tiles and their segments, or
///    spare_tiles and theirs, which is at most total / grid x 4 / 3;
///  - with CostModel::plain() a worker's tiles lie less than one granule from the equal share (lean: one tile).
template <typename TUnits>
LEAN_HD [[nodiscard]] constexpr BasicPlan<TUnits> make_plan(const BasicLineSums<TUnits>& sums, const Policy& policy,
                                                            const CostModel& model, std::int32_t tile_tokens,
                                                            std::int32_t grid) noexcept {
  BasicPlan<TUnits> plan{.kind = policy.kind, .workers = grid};
  if (sums.outputs == 0) {
    plan.workers = 1;
    return plan;
  }
  if (!plan.cuts_the_line()) {
    if (policy.kind == Policy::Kind::kFixedSplit) {
      plan.splits = policy.splits > 0 ? policy.splits : flash_decoding_splits(sums.outputs, sums.max_output_tiles, grid);
    }
    plan.workers = static_cast<std::int32_t>(min_of(grid, std::int64_t{sums.outputs} * plan.splits));
    return plan;
  }
  plan.granularity_tiles = chunk_tiles_of(policy, tile_tokens);
  // Fewer workers when there is little work; and a share of at least one granule, so that cuts stay distinct (an output of
  // one granule or less is never cut, so no granule is larger than the longest output).
  const TUnits floor_tiles = max_of(1, model.min_worker_tiles);
  if (sums.tiles < std::int64_t{plan.workers} * floor_tiles) {
    plan.workers = max_of(1, static_cast<std::int32_t>(quotient(sums.tiles, floor_tiles)));
  }
  // Where outputs are alike and there are workers enough, a tile each is as distinct as cuts can be. Of outputs that only cost
  // the same, those of few tiles would get more workers than tiles.
  const bool a_tile_each = sums.same_outputs() && sums.tiles == plan.workers && plan.granularity_tiles == 1;
  const TUnits granule = TUnits{min_of(plan.granularity_tiles, sums.max_output_tiles)} * sums.max_tile_cost;
  if (!a_tile_each && sums.cost < std::int64_t{plan.workers} * granule) {
    plan.workers = max_of(1, static_cast<std::int32_t>(quotient(sums.cost, granule)));
  }
  detail::align_to_outputs(plan, sums, model);
  plan.shares = BasicShares<TUnits>(sums.cost, plan.workers);
  plan.snap_units = snap_of(model, plan.shares.least());
  return plan;
}

}  // namespace lean::schedule
