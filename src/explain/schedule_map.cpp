// build_map() walks every worker's segments as a backend does and adds them up; to_text() prints what it found.
#include "explain/schedule_map.hpp"

#include <algorithm>

#include "explain/stair_walk.hpp"
#include "explain/words.hpp"
#include "schedule/work_line.hpp"

namespace lean::explain {
namespace {

/// `walk`: called with each worker of the plan and what takes its segments.
template <typename TWalk>
void add_shares(ScheduleMap& map, const schedule::CostModel& model, const TWalk& walk) {
  for (std::int32_t worker = 0; worker < map.plan.workers; ++worker) {
    WorkerShare share;
    walk(worker, [&](const schedule::Segment& segment) {
      const std::int64_t tiles = segment.tile_end - segment.tile_begin;
      share.tiles += tiles;
      share.cost_units += model.segment_units + tiles * segment.output.tile_cost;
      share.segments.push_back(segment);
    });
    map.workers.push_back(share);
  }
}

void walk_line(ScheduleMap& map, const schedule::WorkLine<ListedWork>& line, const ExplainInput& input) {
  map.plan = schedule::make_plan(line.sums(), input.policy, input.cost_model, input.shape.tile_tokens, input.workers);
  add_shares(map, input.cost_model, [&](std::int32_t worker, const auto& take) {
    for (schedule::SegmentCursor cursor(line, map.plan, worker); cursor.next();) take(cursor.segment());
  });
}

void walk_stair(ScheduleMap& map, const ExplainInput& input) {
  const StairWalk walk({map.sequences.data()}, input.shape, input.cost_model, input.workers);
  map.plan = walk.plan();
  add_shares(map, input.cost_model, [&](std::int32_t worker, const auto& take) { walk.for_each_segment(worker, take); });
}

void summarize(ScheduleMap& map) {
  std::int64_t cost_units = 0;
  for (const WorkerShare& share : map.workers) {
    cost_units += share.cost_units;
    map.busy_workers += share.tiles > 0 ? 1 : 0;
    map.tiles.max = std::max(map.tiles.max, share.tiles);
    map.cost_units.max = std::max(map.cost_units.max, share.cost_units);
    map.segments += static_cast<std::int64_t>(share.segments.size());
    for (const schedule::Segment& segment : share.segments) {
      map.shared_outputs += segment.contributor == 0 && !segment.sole() ? 1 : 0;
      map.max_contributors = std::max(map.max_contributors, segment.contributors);
    }
  }
  map.tiles.mean = static_cast<double>(map.total_tiles) / map.workers_asked;
  map.cost_units.mean = static_cast<double>(cost_units) / map.workers_asked;
}

/// "3.1[0,12) 1/2": sequence 3, kv head 1, tiles 0 to 11, contributor 1 of 2; the row block follows the head if there are several.
std::string segment_words(const schedule::Segment& segment, const ScheduleMap& map) {
  std::ostringstream out = words::stream();
  const schedule::SequenceWork& sequence = map.sequences[static_cast<std::size_t>(segment.output.sequence)];
  out << segment.output.sequence << '.' << segment.output.kv_head;
  if (map.shape.row_blocks(sequence) > 1) out << '.' << segment.output.row_block;
  out << '[' << segment.tile_begin << ',' << segment.tile_end << ')';
  if (!segment.sole()) out << ' ' << segment.contributor + 1 << '/' << segment.contributors;
  return out.str();
}

std::string share_words(const WorkerShare& share, const ScheduleMap& map) {
  constexpr std::size_t kShown = 3;
  std::string words;
  for (std::size_t i = 0; i < share.segments.size(); ++i) {
    if (share.segments.size() > kShown + 1 && i == kShown - 1) {
      words += "  ..";
      i = share.segments.size() - 1;
    }
    words += "  " + segment_words(share.segments[i], map);
  }
  return words;
}

std::string right(const std::string& text, std::size_t width) {
  return text.size() >= width ? text : std::string(width - text.size(), ' ') + text;
}

}  // namespace

ScheduleMap build_map(const ExplainInput& input) {
  ScheduleMap map;
  for (std::int64_t b = 0; b < input.shape.batch; ++b) map.sequences.push_back(schedule::work_of(input.lengths(b)));
  schedule::WorkLine<ListedWork> line({map.sequences.data()}, input.shape, input.cost_model,
                                      schedule::measure_of(input.policy.kind));
  line.build();
  map.shape = input.shape;
  map.policy = input.policy;
  if (input.stair && fits_stair_walk(line.sums(), input.workers)) {
    walk_stair(map, input);
  } else {
    walk_line(map, line, input);
  }
  map.workers_asked = input.workers;
  map.outputs = line.sums().outputs;
  map.total_tiles = line.sums().tiles;
  map.slots = slot_count(map.plan, map.outputs);
  summarize(map);
  return map;
}

std::string to_text(const ScheduleMap& map) {
  using words::fixed;
  using words::grouped;
  using words::percent;
  constexpr std::size_t kShownWorkers = 256;
  std::ostringstream out = words::stream();
  out << words::policy_words(map) << '\n'
      << "  batch    " << words::batch_words(map) << '\n'
      << "  line     " << words::counted(map.outputs, "output") << ", " << words::counted(map.total_tiles, "tile") << '\n'
      << "  workers  " << grouped(map.busy_workers) << " of " << grouped(map.workers_asked) << " busy" << '\n'
      << "  balance  " << percent(map.tiles.ratio()) << " in tiles (mean " << fixed(map.tiles.mean, 1) << ", longest "
      << grouped(map.tiles.max) << "), " << percent(map.cost_units.ratio()) << " in cost\n"
      << "  fix-up   " << words::sharing_words(map) << ", " << words::counted(map.slots, "slot") << "\n\n"
      << "  worker     tiles      cost  segments: sequence.head[tiles) contributor/contributors\n";
  for (std::size_t worker = 0; worker < std::min(map.workers.size(), kShownWorkers); ++worker) {
    const WorkerShare& share = map.workers[worker];
    out << right(std::to_string(worker), 8) << right(grouped(share.tiles), 10) << right(grouped(share.cost_units), 10)
        << share_words(share, map) << '\n';
  }
  if (map.workers.size() > kShownWorkers)
    out << "      .. and " << grouped(static_cast<std::int64_t>(map.workers.size() - kShownWorkers)) << " more\n";
  return out.str();
}

}  // namespace lean::explain
