// StairWalk: the segments of a stair line (schedule/stair_line.hpp), by the plan and the cursor of a GPU's kernels of many rows. These
// know rows and tiles when they are compiled; here the shape has them as it runs. Called by build_map().
#pragma once

#include <cstdint>
#include <limits>

#include "base/int_math.hpp"
#include "schedule/level_line.hpp"
#include "schedule/line_shape.hpp"
#include "schedule/plan.hpp"
#include "schedule/segments.hpp"
#include "schedule/stair_line.hpp"
#include "schedule/work_line.hpp"

namespace lean::explain {

/// The batch's work, read once: other threads may write its lengths meanwhile.
struct ListedWork {
  const schedule::SequenceWork* sequences = nullptr;

  [[nodiscard]] schedule::SequenceWork operator()(std::int64_t sequence) const noexcept { return sequences[sequence]; }
};

/// StairShape with rows and tiles of any number.
struct AnyStairShape : schedule::LineShape {
  static constexpr bool kStair = true;
  schedule::ShortStairStep step;

  explicit AnyStairShape(const schedule::LineShape& shape) noexcept
      : LineShape(shape), step(schedule::short_stair_step_of(shape)) {}

  [[nodiscard]] schedule::BasicSteepStair<std::int32_t, Divisor> stair_of(const schedule::SequenceWork& work) const noexcept {
    const schedule::SteepStair stair = steep_stair_of(work);
    return {{.offset = static_cast<std::int32_t>(stair.offset),
             .width = step.width,
             .highest = static_cast<std::int32_t>(stair.highest)},
            stair.rise_log2};
  }
};

/// Whether 32 bits count the line, as they do where lengths are what they should be (schedule::is_stair()).
[[nodiscard]] inline bool fits_stair_walk(const schedule::LineSums& sums, std::int32_t workers) noexcept {
  return sums.outputs > 0 && sums.cost <= std::numeric_limits<std::int32_t>::max() - std::int64_t{workers} * workers;
}

class StairWalk {
 public:
  /// Of a line with an output.
  StairWalk(const ListedWork& works, const schedule::LineShape& shape, const schedule::CostModel& model, std::int32_t workers)
      : rules_(works, AnyStairShape(shape), model, schedule::Measure::kCost),
        plan_(schedule::make_stair_plan(rules_.sum_sequences(0, shape.batch), model, shape.tile_tokens, workers)) {}

  /// All of the plan but its shares.
  [[nodiscard]] schedule::Plan plan() const noexcept {
    return {.kind = plan_.kind,
            .workers = plan_.workers,
            .splits = plan_.splits,
            .granularity_tiles = plan_.granularity_tiles,
            .snap_units = plan_.snap_units,
            .whole_outputs = plan_.whole_outputs,
            .level_parts = plan_.level_parts};
  }

  /// `take`: called with each segment of a worker of the plan.
  template <typename TTake>
  void for_each_segment(std::int32_t worker, const TTake& take) const {
    using Cursor = schedule::StairCursor<Rules>;
    const schedule::SequencePlace<std::int32_t> start{.begin = plan_.line_begin()};
    auto walk = Cursor::begin(plan_, worker, plan_.share_of(worker), start, rules_.lengths()(0));
    for (Cursor cursor(rules_, plan_, walk); cursor.next();) take(widened(walk.segment));
  }

 private:
  using Rules = schedule::LineRules<ListedWork, std::int32_t, AnyStairShape>;

  [[nodiscard]] static schedule::Segment widened(const schedule::BasicSegment<std::int32_t>& segment) noexcept {
    const schedule::BasicOutput<std::int32_t>& output = segment.output;
    return {.output = {.sequence = output.sequence,
                       .kv_head = output.kv_head,
                       .row_block = output.row_block,
                       .rows = output.rows,
                       .first_tile = output.first_tile,
                       .tiles = output.tiles,
                       .tile_cost = output.tile_cost,
                       .cost = output.cost,
                       .begin = output.begin,
                       .sequence_begin = output.sequence_begin},
            .tile_begin = segment.tile_begin,
            .tile_end = segment.tile_end,
            .contributor = segment.contributor,
            .contributors = segment.contributors,
            .slots = segment.slots};
  }

  Rules rules_;
  schedule::BasicStairPlan<std::int32_t> plan_;
};

}  // namespace lean::explain
