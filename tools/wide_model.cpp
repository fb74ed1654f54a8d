// WideModel: what a call of many rows takes on a GPU by the schedule of its kernel (kWideRows of src/backends/cuda/kernel_rows.hpp),
// walked on a host, and a simple model of its time. tools/wide_model.py fits it to measurements; what it is for is the charge of a
// segment in the schedule (cost_model() in src/backends/cuda/kernel_config.hpp).
//
// The model: workers begin at the same time. A tile takes tile_us, and no less than until its K and V are there: those that the L2
// does not hold (the last l2_tiles that anybody asked for) come from memory one after the other, gbps together, asked for when the
// tile before begins. A segment takes segment_us beside its tiles, shared_us more where others have a part of its output. All of
// it is late by call_us.
//
// Reads lines "q_heads kv_heads causal workers charges q:kv ...", a pair for each sequence of the batch (or "NxQ:KV" for N alike), and
// prints for each {"us", "tiles", "segments", "balance", "memory_gb"}: tiles and segments of the worker that ends last, mean / max of
// the workers' ends, bytes that came from memory. charges: "now", those of the kernel, dealt out level
// where it does that (src/schedule/level_line.hpp), "uneven", the same but cut anywhere, or "segment,align,alike" in the units of
// CostModel, cut anywhere.
// Usage: wide_model TILE_US SEGMENT_US SHARED_US CALL_US GBPS L2_TILES
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <iostream>
#include <iterator>
#include <list>
#include <optional>
#include <queue>
#include <sstream>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "backends/cuda/kernel_rows.hpp"
#include "problem/sequence.hpp"
#include "schedule/plan.hpp"
#include "schedule/segments.hpp"
#include "schedule/stair_line.hpp"
#include "schedule/work_line.hpp"

namespace lean {
namespace {

using schedule::SequenceWork;

struct Coefficients {
  double tile_us = 0.0;
  double segment_us = 0.0;
  double shared_us = 0.0;
  double call_us = 0.0;
  double gbps = 0.0;
  double l2_tiles = 0.0;
};

struct Batch {
  schedule::LineShape shape;
  schedule::CostModel model;
  std::int32_t workers = 0;
  bool level = false;  // may be, as in the kernel
  std::vector<SequenceWork> works;
};

constexpr std::int32_t kRows = 128;
constexpr std::int32_t kTileTokens = 128;

struct ListedWork {
  const SequenceWork* works = nullptr;

  [[nodiscard]] SequenceWork operator()(std::int64_t sequence) const noexcept { return works[sequence]; }
};

/// "Q:KV" or "NxQ:KV"; false for anything else.
bool add_sequences(const std::string& word, std::vector<SequenceWork>& works) {
  const std::size_t times = word.find('x');
  std::istringstream text(times == std::string::npos ? word : word.substr(times + 1));
  const long count = times == std::string::npos ? 1 : std::stol(word);
  SequenceWork work;
  char colon = 0;
  if (!(text >> work.q_tokens >> colon >> work.kv_tokens) || colon != ':' || count < 1) return false;
  works.insert(works.end(), static_cast<std::size_t>(count), work);
  return true;
}

bool read_charges(const std::string& text, schedule::CostModel& model) {
  std::istringstream numbers(text);
  char comma = 0;
  return static_cast<bool>(numbers >> model.segment_units >> comma >> model.align_units >> comma >> model.alike_percent);
}

std::optional<Batch> batch_of(const std::string& line) {
  const cuda::KernelConfig config =
      cuda::config_of(cuda::Architecture::kSm90, {DType::kBFloat16, 128}, 128, cuda::Scope::kWideTile);
  std::istringstream words(line);
  std::int32_t q_heads = 0;
  std::int32_t kv_heads = 0;
  bool causal = false;
  std::string charges;
  Batch batch;
  batch.model = cuda::cost_model(config);
  if (!(words >> q_heads >> kv_heads >> causal >> batch.workers >> charges) || kv_heads < 1 || q_heads % kv_heads != 0) return {};
  batch.level = charges == "now";
  if (charges != "now" && charges != "uneven" && !read_charges(charges, batch.model)) return {};
  for (std::string word; words >> word;) {
    if (!add_sequences(word, batch.works)) return {};
  }
  batch.shape = {.batch = static_cast<std::int64_t>(batch.works.size()),
                 .kv_heads = kv_heads,
                 .group = q_heads / kv_heads,
                 .q_rows = config.q_rows,
                 .tile_tokens = config.tile_tokens};
  if (causal) batch.shape.reach.right = 0;
  return batch;
}

/// One worker on its way: its segments, and which tile is next.
struct Walk {
  std::vector<schedule::Segment> segments;
  std::size_t segment = 0;
  std::int32_t tile = 0;
  double now_us = 0.0;
  double begun_us = 0.0;  // when its last tile began: when the next one's K and V are asked for
  std::int64_t tiles = 0;
};

/// The tiles of K and V that the L2 holds, by when each came; the one that was asked for longest ago gives way.
class L2 {
 public:
  explicit L2(const Coefficients& times) : times_(times) {}

  /// When a tile that is asked for at a time is there.
  double ask(std::uint64_t tile, double at_us) {
    if (const auto found = held_.find(tile); found != held_.end()) {
      order_.splice(order_.end(), order_, found->second.place);
      return found->second.there_us;
    }
    free_us_ = std::max(free_us_, at_us) + kTileBytes / (times_.gbps * 1e3);
    ++misses_;
    if (static_cast<double>(held_.size()) >= times_.l2_tiles) {
      held_.erase(order_.front());
      order_.pop_front();
    }
    order_.push_back(tile);
    held_.emplace(tile, Held{std::prev(order_.end()), free_us_});
    return free_us_;
  }
  [[nodiscard]] double read_gb() const { return static_cast<double>(misses_) * kTileBytes / 1e9; }

 private:
  static constexpr double kTileBytes = 2 * 128 * 128 * 2;  // K and V, 128 tokens of 128 dims of 16 bits
  struct Held {
    std::list<std::uint64_t>::iterator place;
    double there_us;
  };

  const Coefficients& times_;
  std::list<std::uint64_t> order_;
  std::unordered_map<std::uint64_t, Held> held_;
  double free_us_ = 0.0;
  std::int64_t misses_ = 0;
};

std::uint64_t tile_id(const schedule::Segment& segment, const schedule::LineShape& shape, std::int32_t tile) {
  const std::int64_t head = segment.output.sequence * shape.kv_heads + segment.output.kv_head;
  return static_cast<std::uint64_t>(head) << 32 | static_cast<std::uint32_t>(segment.output.first_tile + tile);
}

/// Takes the worker's next tile, and what its segment takes beside; false when it has none.
bool take_tile(Walk& walk, const Batch& batch, const Coefficients& times, L2& l2) {
  if (walk.segment == walk.segments.size()) return false;
  const schedule::Segment& segment = walk.segments[walk.segment];
  const double there_us = l2.ask(tile_id(segment, batch.shape, walk.tile), walk.begun_us);
  walk.begun_us = walk.now_us;
  walk.now_us = std::max(walk.now_us + times.tile_us, there_us);
  ++walk.tiles;
  if (++walk.tile == segment.tile_end) {
    walk.now_us += times.segment_us + (segment.sole() ? 0.0 : times.shared_us);
    ++walk.segment;
    if (walk.segment < walk.segments.size()) walk.tile = walk.segments[walk.segment].tile_begin;
  }
  return true;
}

/// The walks of a line that is dealt out level, as the kernel walks it; none of one that is not.
std::vector<Walk> level_walks_of(const Batch& batch) {
  using Rules = schedule::LineRules<ListedWork, std::int32_t, schedule::StairShape<kRows, kTileTokens>>;
  const Rules rules({batch.works.data()}, {batch.shape, schedule::short_stair_step_of(batch.shape)}, batch.model,
                    schedule::Measure::kCost);
  const auto sums = rules.sum_sequences(0, batch.shape.batch);
  const auto plan = schedule::make_stair_plan(sums, batch.model, kTileTokens, batch.workers);
  std::vector<Walk> walks(static_cast<std::size_t>(plan.level_parts > 0 ? plan.workers : 0));
  for (std::size_t worker = 0; worker < walks.size(); ++worker) {
    const auto w = static_cast<std::int32_t>(worker);
    auto walk = schedule::StairCursor<Rules>::begin(plan, w, plan.share_of(w), {0, plan.line_begin()}, batch.works[0]);
    for (schedule::StairCursor<Rules> cursor(rules, plan, walk); cursor.next();) {
      schedule::Segment& segment = walks[worker].segments.emplace_back();
      segment.output.sequence = walk.segment.output.sequence;
      segment.output.kv_head = walk.segment.output.kv_head;
      segment.tile_begin = walk.segment.tile_begin;
      segment.tile_end = walk.segment.tile_end;
      segment.contributors = walk.segment.contributors;
    }
    if (!walks[worker].segments.empty()) walks[worker].tile = walks[worker].segments.front().tile_begin;
  }
  return walks;
}

std::vector<Walk> walks_of(const Batch& batch) {
  if (batch.level) {
    if (std::vector<Walk> walks = level_walks_of(batch); !walks.empty()) return walks;
  }
  schedule::WorkLine<ListedWork> line({batch.works.data()}, batch.shape, batch.model, schedule::Measure::kCost);
  line.build();
  const schedule::Plan plan = schedule::make_plan(line.sums(), Policy::lean(), batch.model, batch.shape.tile_tokens, batch.workers);
  std::vector<Walk> walks(static_cast<std::size_t>(plan.workers));
  for (std::size_t worker = 0; worker < walks.size(); ++worker) {
    Walk& walk = walks[worker];
    for (schedule::SegmentCursor cursor(line, plan, static_cast<std::int32_t>(worker)); cursor.next();)
      walk.segments.push_back(cursor.segment());
    if (!walk.segments.empty()) walk.tile = walk.segments.front().tile_begin;
  }
  return walks;
}

void print(const Batch& batch, const Coefficients& times) {
  std::vector<Walk> walks = walks_of(batch);
  L2 l2(times);
  using Next = std::pair<double, std::size_t>;
  std::priority_queue<Next, std::vector<Next>, std::greater<>> next;
  for (std::size_t worker = 0; worker < walks.size(); ++worker) next.emplace(0.0, worker);
  while (!next.empty()) {
    const std::size_t worker = next.top().second;
    next.pop();
    if (take_tile(walks[worker], batch, times, l2)) next.emplace(walks[worker].now_us, worker);
  }
  double sum_us = 0.0;
  const Walk* last = &walks.front();
  for (const Walk& walk : walks) {
    sum_us += walk.now_us;
    if (walk.now_us > last->now_us) last = &walk;
  }
  std::cout << "{\"us\": " << times.call_us + last->now_us << ", \"tiles\": " << last->tiles
            << ", \"segments\": " << last->segments.size() << ", \"balance\": " << sum_us / (last->now_us * batch.workers)
            << ", \"memory_gb\": " << l2.read_gb() << "}\n";
}

int run(const Coefficients& times) {
  for (std::string line; std::getline(std::cin, line);) {
    const std::optional<Batch> batch = batch_of(line);
    if (!batch || batch->works.empty()) {
      std::cerr << "wide_model: \"" << line << "\" is not q_heads kv_heads causal workers charges q:kv ...\n";
      return 1;
    }
    print(*batch, times);
  }
  return 0;
}

}  // namespace
}  // namespace lean

int main(int argc, char** argv) {
  if (argc != 7) {
    std::cerr << "usage: wide_model TILE_US SEGMENT_US SHARED_US CALL_US GBPS L2_TILES\n";
    return 2;
  }
  return lean::run(
      {std::atof(argv[1]), std::atof(argv[2]), std::atof(argv[3]), std::atof(argv[4]), std::atof(argv[5]), std::atof(argv[6])});
}
