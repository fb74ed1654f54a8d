// Explain: who computes what, for people and programs. build_map() walks the very cursors the backends walk, so what it
// shows is what a call does; to_text, to_json and to_svg only print it. Called by the API's explain_schedule() and the
// command. The one part of the library that allocates.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "lean/options.hpp"
#include "problem/sequence.hpp"
#include "schedule/line_shape.hpp"
#include "schedule/plan.hpp"
#include "schedule/segments.hpp"

namespace lean::explain {

struct ExplainInput {
  LengthSource lengths;  // its arrays must be readable by the host
  schedule::LineShape shape;
  schedule::CostModel cost_model;
  Policy policy;
  std::int32_t workers = 1;  // asked for; the plan may use fewer
  bool stair = false;        // tile::Tiling::stair
};

/// What one worker does, in the order in which it does it.
struct WorkerShare {
  std::int64_t tiles = 0;
  std::int64_t cost_units = 0;  // a fixed charge per segment and the cost of its tiles
  std::vector<schedule::Segment> segments;
};

/// How even the shares are: mean / max, over the workers asked for, idle ones counted as zero.
struct Balance {
  double mean = 0.0;
  std::int64_t max = 0;

  /// 1 when all do the same, and when there is nothing to do.
  [[nodiscard]] double ratio() const noexcept { return max == 0 ? 1.0 : mean / static_cast<double>(max); }
};

struct ScheduleMap {
  schedule::LineShape shape;
  Policy policy;
  schedule::Plan plan;
  std::int32_t workers_asked = 0;
  std::vector<schedule::SequenceWork> sequences;
  std::vector<WorkerShare> workers;  // those of the plan: plan.workers of them; the rest of workers_asked is idle

  Balance tiles;
  Balance cost_units;
  std::int32_t busy_workers = 0;  // with at least one tile
  std::int64_t outputs = 0;
  std::int64_t total_tiles = 0;
  std::int64_t segments = 0;
  std::int64_t shared_outputs = 0;    // outputs with more than one contributor
  std::int32_t max_contributors = 0;  // of any output; 0 when there is no output
  std::int64_t slots = 0;             // of partials, as the workspace holds them
};

[[nodiscard]] ScheduleMap build_map(const ExplainInput& input);

/// A summary, then a line a worker. ASCII.
[[nodiscard]] std::string to_text(const ScheduleMap& map);

/// One JSON object: policy, shape, summary, sequences, and every segment of every worker.
[[nodiscard]] std::string to_json(const ScheduleMap& map);

struct SvgOptions {
  std::string title;         // empty: none
  std::int32_t columns = 1;  // panels side by side
  std::int32_t width_px = 1200;
};

/// The paper's first figure, for these maps of one batch: a panel a map, workers as rows, the tiles of each as a bar. Panels
/// asked for the same number of workers share an axis, so that a bar twice as long takes twice the time. Self-contained.
[[nodiscard]] std::string to_svg(const std::vector<ScheduleMap>& maps, const SvgOptions& options);

}  // namespace lean::explain
