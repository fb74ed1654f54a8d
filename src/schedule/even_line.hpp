// The even line: all outputs alike and each shared by as many workers, so that a worker has one segment and knows it without a
// walk. That is every call of one sequence whose kv heads divide the workers well, where each instruction before the first copy
// counts. Plan, cuts and slots are make_plan()'s and FlatCursor's; a test holds the two against each other.
#pragma once

#include <cstdint>

#include "base/hd.hpp"
#include "base/int_math.hpp"
#include "schedule/plan.hpp"
#include "schedule/segments.hpp"
#include "schedule/shares.hpp"

namespace lean::schedule {

/// What is known of it before the lengths are.
struct EvenLine {
  std::int32_t outputs = 0;         // kv heads of all sequences; 0: no line of the call is taken as even
  std::int32_t workers = 0;         // the grid
  std::int32_t split = 0;           // workers an output gets where all get a tile
  std::int32_t most_cost = 0;       // of an output, then: beyond it the idle ones would cost too much, or shares are long
  std::int32_t unshared_tiles = 0;  // outputs of no more have one worker
};

/// `outputs`: of the whole call; `share_tiles`: shares of so many and more are left to the walk, but not whole outputs. For policy lean.
[[nodiscard]] constexpr EvenLine even_line_of(std::int64_t outputs, std::int32_t workers, const CostModel& model,
                                              std::int32_t share_tiles) noexcept {
  if (outputs < 1 || outputs > workers || model.min_worker_tiles != 1 || model.row_units != 0) return {};
  EvenLine line{.outputs = static_cast<std::int32_t>(outputs),
                .workers = workers,
                .split = workers / static_cast<std::int32_t>(outputs),
                .unshared_tiles = model.unshared_tiles};
  const std::int64_t split = line.split;
  const std::int64_t idle = workers - split * line.outputs;
  const auto cost_of = [&model](std::int64_t tiles) { return model.segment_units + tiles * model.tile_units; };
  std::int64_t most = model.short_tiles > 0 ? cost_of(model.short_tiles * split) : 0;
  if (idle == 0) {
    most = INT32_MAX;
  } else if (idle * 100 <= std::int64_t{workers} * model.align_percent) {
    most = max_of(most, (std::int64_t{model.align_units} * workers / idle + 1) * split - 1);
  }
  line.most_cost = static_cast<std::int32_t>(min_of(min_of(most, cost_of(share_tiles * split - 1)), INT32_MAX));
  return line;
}

/// A worker's part of an output.
struct EvenShare {
  bool even = false;  // else nothing is said here, and the line is walked
  std::int32_t output = 0;
  std::int32_t part = 0;  // of `parts`, one a worker
  std::int32_t parts = 1;
  std::int32_t tile_begin = 0;  // of the output; none for a worker beyond the last
  std::int32_t tile_end = 0;

  [[nodiscard]] LEAN_HD constexpr std::int32_t first_worker() const noexcept { return output * parts; }
};

/// Of a place of the grid. `head`: the sums of one output; all are like it.
LEAN_HD [[nodiscard]] constexpr EvenShare even_share(const EvenLine& line, const BasicLineSums<std::int32_t>& head,
                                                     const CostModel& model, std::int32_t place) noexcept {
  const BasicOutput<std::int32_t> output{.tiles = head.max_output_tiles, .cost = head.max_output_cost};
  if (output.tiles == 0) return {};
  const bool is_whole = output.tiles <= line.unshared_tiles;
  const bool a_tile_each = line.outputs * output.tiles <= line.workers;
  const std::int32_t parts = is_whole ? 1 : a_tile_each ? output.tiles : line.split;
  if (!is_whole && !a_tile_each) {
    if (output.cost > line.most_cost || output.cost < parts * head.max_tile_cost) return {};  // there cuts might fall together
  }
  const std::int32_t worker = spread_worker(place, line.outputs * parts, line.workers);
  EvenShare share{.even = true, .output = quotient(worker, parts), .parts = parts};
  share.part = worker - share.first_worker();
  if (share.output >= line.outputs) return share;
  if (is_whole || a_tile_each) {
    share.tile_begin = share.part;
    share.tile_end = is_whole ? output.tiles : share.part + 1;
    return share;
  }
  const BasicShares<std::int32_t> shares(output.cost, parts);
  const BasicPlan<std::int32_t> plan{.snap_units = snap_of(model, shares.least())};
  const auto range = shares.range(share.part);
  share.tile_begin = share.part == 0 ? 0 : cut_tile(output, range.begin, model, plan);
  share.tile_end = share.part + 1 == parts ? output.tiles : cut_tile(output, range.end, model, plan);
  return share;
}

}  // namespace lean::schedule
