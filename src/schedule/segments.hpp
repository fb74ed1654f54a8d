// Segments: what each worker computes. A segment is the part of one output inside one worker's share; the worker
// walks its segments with a SegmentCursor, and each segment says who else contributes to its output and where the
// partials lie. Nothing is communicated: every worker derives all of it from the line and the plan.
//
// Cuts. Boundary g of the line is floor(g x total / workers). It lies in exactly one output and is moved within that
// output only, to a tile whose number is a multiple of the granularity or to one of the output's edges. The moved boundary
// is monotone in g, so shares stay disjoint and cover the line, and both neighbours compute the same cut.
#pragma once

#include <cstdint>

#include "base/hd.hpp"
#include "base/int_math.hpp"
#include "schedule/plan.hpp"
#include "schedule/work_line.hpp"

namespace lean::schedule {

/// Slot of contributor j of an output: first for j = 0, then second, second + stride, ...
struct SlotMap {
  std::int64_t first = 0;
  std::int64_t second = 0;
  std::int64_t stride = 1;

  [[nodiscard]] LEAN_HD constexpr std::int64_t slot(std::int32_t contributor) const noexcept {
    return contributor == 0 ? first : second + (contributor - 1) * stride;
  }
};

/// The slots of an output that the line cuts: a worker's last output takes its odd slot, its first (begun by another worker) its
/// even one.
LEAN_HD [[nodiscard]] constexpr SlotMap slots_from(std::int32_t host) noexcept {
  return {.first = 2 * std::int64_t{host} + 1, .second = 2 * (std::int64_t{host} + 1), .stride = 2};
}

template <typename TUnits>
struct BasicSegment {
  BasicOutput<TUnits> output;
  std::int32_t tile_begin = 0;  // tiles of the output, [begin, end)
  std::int32_t tile_end = 0;
  std::int32_t contributor = 0;   // this worker's index among the output's contributors
  std::int32_t contributors = 1;  // 1: nobody else, no slot, no counter
  SlotMap slots;

  [[nodiscard]] LEAN_HD constexpr bool sole() const noexcept { return contributors == 1; }
};

using Segment = BasicSegment<std::int64_t>;

/// Slots a call can touch: two per worker when the line is cut (its first and last output may be shared), one per
/// item when items are dealt out.
LEAN_HD [[nodiscard]] constexpr std::int64_t slot_count(const Plan& plan, std::int64_t outputs) noexcept {
  return plan.cuts_the_line() ? 2 * static_cast<std::int64_t>(plan.workers) : outputs * plan.splits;
}

/// Where a boundary that lies `units` into `output` is moved to, in tiles of the output, 0 and output.tiles included. The
/// output's fixed charge is spread over its length, so that equal shares of one output are equal runs of tiles.
template <typename TUnits>
LEAN_HD [[nodiscard]] constexpr std::int32_t cut_tile(const BasicOutput<TUnits>& output, TUnits units, const CostModel& model,
                                                      const BasicPlan<TUnits>& plan) noexcept {
  if (plan.level_parts > 0) return static_cast<std::int32_t>(quotient(units * output.tiles, TUnits{plan.level_parts}));
  const TUnits charge = model.segment_units == 0 ? 0 : quotient(units * model.segment_units, output.cost);
  const TUnits tile_cost = model.tile_cost(output.rows);  // as output.tile_cost; but of a constant model, a constant
  auto cut = static_cast<std::int32_t>(quotient(units - charge, tile_cost));
  if (plan.granularity_tiles > 1) {  // counted from the sequence's first tile, not the output's
    const std::int32_t granule_begin = quotient(output.first_tile + cut, plan.granularity_tiles) * plan.granularity_tiles;
    cut = max_of(0, granule_begin - output.first_tile);
  }
  const std::int32_t rest = output.tiles - cut;
  const bool near_begin = plan.whole_outputs || TUnits{cut} * tile_cost <= plan.snap_units;
  const bool near_end = plan.whole_outputs || TUnits{rest} * tile_cost <= plan.snap_units;
  if (near_begin && (!near_end || cut <= rest)) return 0;
  return near_end ? output.tiles : cut;
}

/// A worker's share of a line that is cut: what of an output is its own, and who has the rest.
template <typename TUnits>
class LineShare {
 public:
  using Range = typename BasicShares<TUnits>::Range;

  /// `range`: the worker's, which the caller may have at hand.
  LEAN_HD constexpr LineShare(const CostModel& model, const BasicPlan<TUnits>& plan, std::int32_t worker,
                              const Range& range) noexcept
      : model_(model), plan_(plan), worker_(worker), range_(range) {}
  LEAN_HD constexpr LineShare(const CostModel& model, const BasicPlan<TUnits>& plan, std::int32_t worker) noexcept
      : LineShare(model, plan, worker, plan.shares.range(worker)) {}

  [[nodiscard]] LEAN_HD constexpr const BasicPlan<TUnits>& plan() const noexcept { return plan_; }
  [[nodiscard]] LEAN_HD constexpr TUnits begin() const noexcept { return range_.begin; }
  [[nodiscard]] LEAN_HD constexpr TUnits end() const noexcept { return range_.end; }

  /// Sets the worker's tiles of segment.output; false when a moved boundary left it none.
  LEAN_HD constexpr bool own_run(BasicSegment<TUnits>& segment) const noexcept {
    const BasicOutput<TUnits>& output = segment.output;
    segment.tile_begin = output.begin >= begin() ? 0 : cut_of(output, begin());
    segment.tile_end = output.begin + output.cost <= end() ? output.tiles : cut_of(output, end());
    return segment.tile_begin < segment.tile_end;
  }

  /// Sets the segment's contributors: the workers next to the boundaries whose cuts fall strictly inside the output.
  LEAN_HD constexpr void find_contributors(BasicSegment<TUnits>& segment) const noexcept {
    const BasicOutput<TUnits>& output = segment.output;
    std::int32_t host = worker_;
    if (segment.tile_begin > 0) {
      host = max_of(1, plan_.shares.first_from(output.begin));
      while (cut_of(output, plan_.shares.begin(host)) == 0) ++host;
      --host;
    }
    std::int32_t last = worker_;
    if (segment.tile_end < output.tiles) {
      last = min_of(plan_.shares.first_from(output.begin + output.cost), plan_.workers) - 1;
      while (cut_of(output, plan_.shares.begin(last)) == output.tiles) --last;
    }
    segment.contributor = worker_ - host;
    segment.contributors = last - host + 1;
    segment.slots = slots_from(host);
  }

 private:
  [[nodiscard]] LEAN_HD constexpr std::int32_t cut_of(const BasicOutput<TUnits>& output, TUnits boundary) const noexcept {
    return cut_tile(output, boundary - output.begin, model_, plan_);
  }

  const CostModel& model_;
  const BasicPlan<TUnits>& plan_;
  std::int32_t worker_;
  Range range_;
};

/// Walks the segments of one worker: `for (SegmentCursor cursor(line, plan, worker); cursor.next();) use(cursor.segment())`.
template <typename TLengths, typename TUnits = std::int64_t>
class SegmentCursor {
 public:
  LEAN_HD constexpr SegmentCursor(const WorkLine<TLengths, TUnits>& line, const BasicPlan<TUnits>& plan,
                                  std::int32_t worker) noexcept
      : line_(line), plan_(plan), share_(line.cost_model(), plan, worker) {
    if (worker >= plan.workers || line.total() == 0) return;
    place_ = plan.cuts_the_line() ? share_.begin() : worker;                  // items worker, worker + workers, ...
    end_ = plan.cuts_the_line() ? share_.end() : line.total() * plan.splits;  // fits: splits <= 128
  }

  /// Moves to the next segment; false when the worker is done.
  LEAN_HD constexpr bool next() noexcept {
    if (!next_run()) return false;
    find_contributors();
    return true;
  }

  /// The two halves of next(): the worker's own tiles, which is all it needs to begin, and who else has a part of the output.
  LEAN_HD constexpr bool next_run() noexcept { return plan_.cuts_the_line() ? next_of_range() : next_item(); }
  LEAN_HD constexpr void find_contributors() noexcept {
    if (plan_.cuts_the_line()) share_.find_contributors(segment_);
  }

  [[nodiscard]] LEAN_HD constexpr const BasicSegment<TUnits>& segment() const noexcept { return segment_; }
  /// Whether the worker has nothing to do behind the segment; true means so, false may too.
  [[nodiscard]] LEAN_HD constexpr bool ends_share() const noexcept { return place_ >= end_; }

 private:
  LEAN_HD constexpr bool next_of_range() noexcept {
    while (place_ < end_) {
      if (started_) {
        if (!line_.advance(segment_.output)) return false;
      } else {
        segment_.output = line_.locate(place_);
        started_ = true;
      }
      place_ = segment_.output.begin + segment_.output.cost;  // where the next output begins
      if (segment_.output.begin >= end_) return false;
      if (share_.own_run(segment_)) return true;
    }
    return false;
  }

  LEAN_HD constexpr bool next_item() noexcept {
    for (; place_ < end_; place_ += plan_.workers) {
      const TUnits output_index = quotient(place_, TUnits{plan_.splits});
      const auto split = static_cast<std::int32_t>(place_ - output_index * plan_.splits);
      const BasicOutput<TUnits> output = line_.locate(output_index, segment_.output);
      const auto tiles_per_split =
          static_cast<std::int32_t>(quotient(std::int64_t{output.tiles} + plan_.splits - 1, std::int64_t{plan_.splits}));
      const std::int32_t tile_begin = split * tiles_per_split;
      if (tile_begin >= output.tiles) continue;
      const std::int64_t first_slot = std::int64_t{output_index} * plan_.splits;
      segment_ = {.output = output,
                  .tile_begin = tile_begin,
                  .tile_end = tile_begin + min_of(output.tiles - tile_begin, tiles_per_split),
                  .contributor = split,
                  .contributors = static_cast<std::int32_t>(
                      quotient(std::int64_t{output.tiles} + tiles_per_split - 1, std::int64_t{tiles_per_split})),
                  .slots = {.first = first_slot, .second = first_slot + 1, .stride = 1}};
      place_ += plan_.workers;
      return true;
    }
    return false;
  }

  const WorkLine<TLengths, TUnits>& line_;
  const BasicPlan<TUnits>& plan_;
  LineShare<TUnits> share_;
  bool started_ = false;
  TUnits place_ = 0;  // how far the worker got, and where it ends: units of the line, or items
  TUnits end_ = 0;
  BasicSegment<TUnits> segment_;
};

}  // namespace lean::schedule
