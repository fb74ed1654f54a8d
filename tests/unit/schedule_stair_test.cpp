// The stair line, which a GPU walks in 32 bits for calls of many rows (schedule/stair_line.hpp), against the general line: the same
// tiles, sums, plans and segments to the last number, by every cost model that it may be asked for; and which calls are no stair.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <set>
#include <tuple>
#include <vector>

#include "backends/cuda/kernel_rows.hpp"
#include "schedule/even_stair.hpp"
#include "schedule/stair_line.hpp"
#include "support/random.hpp"
#include "support/reduced.hpp"
#include "unit/schedule_checks.hpp"

namespace lean::schedule {
namespace {

using checks::Case;
using checks::ListedLengths;
using support::full_or_reduced;
using support::Stream;

template <std::int32_t kRows, std::int32_t kTileTokens>
using Rules = LineRules<ListedLengths, std::int32_t, StairShape<kRows, kTileTokens>>;

std::vector<CostModel> stair_models() {
  std::vector<CostModel> models;
  for (const CostModel& model : checks::every_model()) {
    if (model.row_units == 0) models.push_back(model);
  }
  return models;
}

void expect_same_sums(const LineSums& general, const BasicLineSums<std::int32_t>& stair) {
  ASSERT_EQ(general.cost, stair.cost);
  ASSERT_EQ(general.tiles, stair.tiles);
  ASSERT_EQ(general.outputs, stair.outputs);
  ASSERT_EQ(general.max_output_tiles, stair.max_output_tiles);
  ASSERT_EQ(general.max_tile_cost, stair.max_tile_cost);
  ASSERT_EQ(general.max_output_cost, stair.max_output_cost);
  if (general.outputs == 0) return;
  ASSERT_EQ(general.min_output_cost, stair.min_output_cost);
}

void expect_same_segment(const Segment& general, const BasicSegment<std::int32_t>& stair) {
  ASSERT_NO_FATAL_FAILURE(checks::expect_same_segment(general, stair));
  ASSERT_EQ(general.output.first_tile, stair.output.first_tile);
  ASSERT_EQ(general.output.tiles, stair.output.tiles);
  ASSERT_EQ(general.output.begin, stair.output.begin);
  ASSERT_EQ(general.output.cost, stair.output.cost);
}

struct Counted {
  std::int64_t segments = 0;
  std::int64_t shared = 0;
};

/// Walks every worker both ways; the stair from any sequence before its share, as strips of sequences have it begin.
template <std::int32_t kRows, std::int32_t kTileTokens>
void expect_same_walks(Case c, std::int32_t grid, Stream& random, Counted& counted) {
  c.shape.batch = static_cast<std::int64_t>(c.works.size());
  c.shape.q_rows = kRows;
  c.shape.tile_tokens = kTileTokens;
  const ListedLengths lengths{c.works.data()};
  checks::ListedLine line(lengths, c.shape, c.model, Measure::kCost);
  line.build();
  using StairRules = Rules<kRows, kTileTokens>;
  const StairRules rules(lengths, StairShape<kRows, kTileTokens>(c.shape, short_stair_step_of(c.shape)), c.model, Measure::kCost);
  const BasicStairSums<std::int32_t> sums = rules.sum_sequences(0, c.shape.batch);
  ASSERT_NO_FATAL_FAILURE(expect_same_sums(line.sums(), sums));
  const Plan plan = make_plan(line.sums(), Policy::lean(), c.model, kTileTokens, grid);
  const BasicStairPlan<std::int32_t> stair_plan{make_plan(sums, Policy::lean(), c.model, kTileTokens, grid)};
  ASSERT_EQ(plan.workers, stair_plan.workers);
  ASSERT_EQ(plan.whole_outputs, stair_plan.whole_outputs);
  ASSERT_EQ(plan.snap_units, stair_plan.snap_units);
  if (sums.outputs == 0) return;
  for (std::int32_t worker = 0; worker <= plan.workers; ++worker) {
    SequencePlace<std::int32_t> start;
    for (std::int64_t b = 0, end = random.between(0, c.shape.batch - 1); b < end; ++b) {
      const std::int32_t next = start.begin + rules.sum_sequences(b, b + 1).cost;
      if (next > stair_plan.shares.begin(worker)) break;
      start = {b + 1, next};
    }
    auto walk = StairCursor<StairRules>::begin(stair_plan, worker, stair_plan.shares.range(worker), start, lengths(start.sequence));
    StairCursor<StairRules> stair(rules, stair_plan, walk);
    SegmentCursor general(line, plan, worker);
    while (general.next()) {
      ASSERT_TRUE(stair.next());
      ASSERT_NO_FATAL_FAILURE(expect_same_segment(general.segment(), walk.segment));
      ASSERT_EQ(walk.lengths.kv_end, c.works[static_cast<std::size_t>(general.segment().output.sequence)].kv_tokens);
      ++counted.segments;
      counted.shared += general.segment().sole() ? 0 : 1;
    }
    ASSERT_FALSE(stair.next());
  }
}

Reach any_stair_reach(Stream& random) {
  if (random.chance(20)) return {};
  return {.right = random.chance(70) ? 0 : static_cast<std::int32_t>(random.between(1, 40))};
}

/// Heads, groups and reach of a level line of small row blocks.
LineShape any_level_shape(Stream& random) {
  LineShape shape;
  shape.kv_heads = static_cast<std::int32_t>(random.between(1, 8));
  shape.group = static_cast<std::int32_t>(random.one_of({2, 4, 8}));
  shape.reach = any_stair_reach(random);
  return shape;
}

/// What a worker of a level line has of an output.
struct LevelPart {
  std::int32_t tile_begin = 0;
  std::int32_t tile_end = 0;
  std::int32_t contributor = 0;
  std::int32_t contributors = 0;
  std::int64_t slot = 0;
  std::int64_t first_slot = 0;

  [[nodiscard]] bool operator<(const LevelPart& other) const { return tile_begin < other.tile_begin; }
};

struct LevelWalks {
  BasicStairPlan<std::int32_t> plan;
  BasicStairSums<std::int32_t> sums;
  std::vector<std::vector<BasicSegment<std::int32_t>>> segments;  // of each worker
  bool far = false;                                               // several row blocks read long K and V
};

/// Plans a line and, if it is level, walks it: every worker from any sequence that begins at or before its first output.
template <std::int32_t kRows, std::int32_t kTileTokens>
LevelWalks level_walks(Case c, std::int32_t grid, Stream& random) {
  c.shape.batch = static_cast<std::int64_t>(c.works.size());
  c.shape.q_rows = kRows;
  c.shape.tile_tokens = kTileTokens;
  const ListedLengths lengths{c.works.data()};
  using StairRules = Rules<kRows, kTileTokens>;
  const StairRules rules(lengths, StairShape<kRows, kTileTokens>(c.shape, short_stair_step_of(c.shape)), c.model, Measure::kCost);
  LevelWalks walks;
  walks.sums = rules.sum_sequences(0, c.shape.batch);
  walks.plan = make_stair_plan(walks.sums, c.model, kTileTokens, grid);
  walks.far = walks.sums.key_tiles > c.model.far_tiles && walks.sums.tiles >= 2 * walks.sums.key_tiles;
  if (walks.plan.level_parts == 0) return walks;
  for (std::int32_t worker = 0; worker < grid; ++worker) {
    const auto share = walks.plan.share_of(std::min(worker, walks.plan.workers));
    SequencePlace<std::int32_t> start{.begin = walks.plan.line_begin()};
    for (std::int64_t b = 0, end = random.between(0, c.shape.batch - 1); b < end; ++b) {
      const std::int32_t next = start.begin + rules.sum_sequences(b, b + 1).outputs * walks.plan.level_parts;
      if (next > walks.plan.begin_of(worker, share)) break;
      start = {b + 1, next};
    }
    auto walk =
        StairCursor<StairRules>::begin(walks.plan, std::min(worker, walks.plan.workers), share, start, lengths(start.sequence));
    StairCursor<StairRules> cursor(rules, walks.plan, walk);
    walks.segments.emplace_back();
    while (cursor.next()) walks.segments.back().push_back(walk.segment);
  }
  return walks;
}

/// Every tile of every output once, by contributors in the order of their tiles; slots of their own, two a worker; nothing for workers
/// beyond the plan's; whole outputs first; and nobody has more than an equal share and what a level line may give up.
template <std::int32_t kRows, std::int32_t kTileTokens>
void expect_level(const Case& c, std::int32_t grid, const LevelWalks& walks) {
  const BasicStairPlan<std::int32_t>& plan = walks.plan;
  ASSERT_GE(plan.workers, 1);
  ASSERT_LE(plan.workers, grid);
  LineShape shape = c.shape;
  shape.q_rows = kRows;
  shape.tile_tokens = kTileTokens;
  std::map<std::tuple<std::int64_t, std::int32_t, std::int32_t>, std::vector<LevelPart>> outputs;
  std::set<std::int64_t> slots;
  std::int64_t longest = 0;
  for (std::size_t worker = 0; worker < walks.segments.size(); ++worker) {
    const auto& segments = walks.segments[worker];
    ASSERT_TRUE(static_cast<std::int32_t>(worker) < plan.workers || segments.empty());
    std::int64_t cost = 0;
    std::int32_t shared = 0;
    for (std::size_t i = 0; i < segments.size(); ++i) {
      const BasicSegment<std::int32_t>& segment = segments[i];
      ASSERT_TRUE(segment.sole() || i >= static_cast<std::size_t>(plan.whole_turns));
      cost += std::int64_t{segment.tile_end - segment.tile_begin} * c.model.tile_units + c.model.segment_units;
      const std::int64_t slot = segment.slots.slot(segment.contributor);
      if (!segment.sole()) {
        ++shared;
        ASSERT_TRUE(slots.insert(slot).second) << "a slot of two";
        ASSERT_EQ(slot / 2, static_cast<std::int64_t>(worker)) << "a slot of another worker's";
      }
      outputs[{segment.output.sequence, segment.output.kv_head, segment.output.row_block}].push_back(
          {segment.tile_begin, segment.tile_end, segment.contributor, segment.contributors, slot, segment.slots.slot(0)});
    }
    ASSERT_LE(shared, 2);
    longest = std::max(longest, cost);
  }
  std::size_t expected = 0;
  for (std::int64_t b = 0; b < static_cast<std::int64_t>(c.works.size()); ++b) {
    const SequenceWork& work = c.works[static_cast<std::size_t>(b)];
    for (std::int32_t head = 0; head < shape.kv_heads; ++head) {
      for (std::int32_t block = 0; block < shape.row_blocks(work); ++block, ++expected) {
        auto& parts = outputs[{b, head, block}];
        std::sort(parts.begin(), parts.end());
        std::int32_t tile = 0;
        for (std::size_t i = 0; i < parts.size(); ++i) {
          ASSERT_EQ(parts[i].tile_begin, tile);
          ASSERT_LT(tile, parts[i].tile_end);
          ASSERT_EQ(parts[i].contributor, static_cast<std::int32_t>(i));
          ASSERT_EQ(parts[i].contributors, static_cast<std::int32_t>(parts.size()));
          ASSERT_EQ(parts[i].first_slot, parts[0].slot);
          tile = parts[i].tile_end;
        }
        ASSERT_EQ(tile, shape.tiles_of(work, block).count);
      }
    }
  }
  ASSERT_EQ(expected, outputs.size());
  const std::int64_t equal = walks.sums.cost / grid;
  const bool one_each = plan.level_parts == 1 && walks.sums.outputs <= grid;
  const std::int64_t may = equal + c.model.cut_units + (walks.far ? equal / 16 : 0) + (one_each ? c.model.whole_units : 0);
  // Tiles are whole: of two neighbours a tile more, of parts one at either end.
  const std::int64_t rounding = (plan.whole_turns / 2 + 3) * c.model.tile_units + 2 * c.model.segment_units;
  ASSERT_LE(longest, may + rounding);
}

CostModel wide_model() {
  return cuda::cost_model(cuda::config_of(cuda::Architecture::kSm90, {DType::kBFloat16, 128}, 128, cuda::Scope::kWideTile));
}

TEST(ScheduleStair, R04_EveryTileOfALevelLineIsOwnedExactlyOnce) {
  Stream random(79);
  std::int32_t level_lines = 0;
  std::int32_t of_whole_outputs = 0;
  std::int32_t of_pairs = 0;
  std::int32_t of_cut_rests = 0;
  for (std::int32_t round = 0; round < full_or_reduced(6000, 600); ++round) {
    Case c;
    c.works.resize(static_cast<std::size_t>(random.between(1, 5)));
    c.model = wide_model();
    c.model.far_tiles = random.chance(50) ? 0 : 10'000;
    const auto longest = static_cast<std::int32_t>(random.between(20, 1200));
    const std::int32_t differ = random.chance(50) ? 0 : longest / 8;
    for (SequenceWork& work : c.works) {
      work.kv_tokens = longest - static_cast<std::int32_t>(random.between(0, differ));
      work.q_tokens = static_cast<std::int32_t>(random.chance(10) ? 0 : random.between(1, random.chance(50) ? 60 : 300));
    }
    c.shape = any_level_shape(random);
    const auto grid = static_cast<std::int32_t>(random.between(1, 200));
    const LevelWalks walks = level_walks<16, 8>(c, grid, random);
    if (walks.plan.level_parts == 0) continue;
    ASSERT_NO_FATAL_FAILURE((expect_level<16, 8>(c, grid, walks))) << "round " << round;
    ++level_lines;
    of_whole_outputs += walks.plan.whole_turns > 0 ? 1 : 0;
    of_pairs += walks.plan.whole_turns > 0 && walks.plan.neighbours_log2 > 0 ? 1 : 0;
    of_cut_rests += walks.plan.whole_turns > 0 && walks.plan.level_parts > 1 ? 1 : 0;
  }
  EXPECT_GT(level_lines, full_or_reduced(1500, 150));
  EXPECT_GT(of_whole_outputs, full_or_reduced(500, 50));
  EXPECT_GT(of_pairs, full_or_reduced(100, 10));
  EXPECT_GT(of_cut_rests, full_or_reduced(100, 10));
}

/// What is known without a walk is what the walk finds, of every worker; and it is known of most chunks that have no more row blocks than
/// there are workers.
TEST(ScheduleStair, AnEvenStairHasTheSegmentsOfTheWalk) {
  Stream random(97);
  std::int32_t even = 0;
  std::int32_t shared = 0;
  std::int32_t idle = 0;
  std::int32_t walked = 0;
  for (std::int32_t round = 0; round < full_or_reduced(30000, 6000); ++round) {
    Case c;
    c.model = wide_model();
    if (random.chance(50)) c.model.far_tiles = random.chance(50) ? 0 : 10'000;
    if (random.chance(50)) c.model.part_tiles = static_cast<std::int32_t>(random.between(2, 6));
    if (random.chance(60)) c.model.cut_units = static_cast<std::int32_t>(random.between(1, 6)) * c.model.tile_units;
    if (random.chance(50)) c.model.whole_units = 0;
    const auto q_tokens = static_cast<std::int32_t>(random.between(1, random.chance(50) ? 60 : random.chance(70) ? 300 : 1500));
    const auto any_tokens = static_cast<std::int32_t>(random.chance(5) ? random.between(0, 9) : random.between(10, 1200));
    const std::int32_t kv_tokens = random.chance(20) ? q_tokens : any_tokens;
    c.works.assign(static_cast<std::size_t>(random.between(1, 4)), {q_tokens, kv_tokens});
    c.shape = any_level_shape(random);
    if (q_tokens > 300) c.shape.kv_heads = 1;  // else there are more outputs than workers
    c.shape.batch = static_cast<std::int64_t>(c.works.size());
    c.shape.q_rows = 16;
    c.shape.tile_tokens = 8;
    const auto grid = static_cast<std::int32_t>(random.between(1, 200));
    // Fewer keys than there is room for may be anything.
    const SequenceWork room{q_tokens, kv_tokens + static_cast<std::int32_t>(random.chance(50) ? 0 : random.between(1, 3000))};
    const EvenStair line = even_stair_of(c.shape, room, grid, c.model);
    ASSERT_TRUE(line.outputs == 0 || line.outputs == c.shape.batch * c.shape.kv_heads * c.shape.row_blocks(c.works[0]));
    if (line.outputs == 0) continue;
    const LevelWalks walks = level_walks<16, 8>(c, grid, random);
    const ListedLengths lengths{c.works.data()};
    const Rules<16, 8> rules(lengths, StairShape<16, 8>(c.shape, short_stair_step_of(c.shape)), c.model, Measure::kCost);
    std::int32_t known = 0;
    for (std::int32_t worker = 0; worker < grid; ++worker) {
      BasicSegment<std::int32_t> segment;
      if (!find_even_segment(line, rules, c.works[0], worker, segment)) continue;
      ++known;
      ASSERT_GT(walks.plan.level_parts, 0) << "round " << round;
      const auto& expected = walks.segments[static_cast<std::size_t>(worker)];
      ASSERT_EQ(expected.size(), segment.tile_begin < segment.tile_end ? 1U : 0U) << "round " << round << ", worker " << worker;
      idle += expected.empty() ? 1 : 0;
      if (expected.empty()) continue;
      ASSERT_NO_FATAL_FAILURE(checks::expect_same_segment(expected[0], segment));
      ASSERT_EQ(expected[0].contributors, segment.contributors);
      ASSERT_EQ(expected[0].slots.slot(0), segment.slots.slot(0));
      ASSERT_EQ(expected[0].output.first_tile, segment.output.first_tile);
      ASSERT_EQ(expected[0].output.tiles, segment.output.tiles);
      shared += segment.sole() ? 0 : 1;
    }
    ASSERT_TRUE(known == 0 || known == grid) << "workers differ in what they take the line for";
    even += known > 0 ? 1 : 0;
    walked += known == 0 ? 1 : 0;
  }
  EXPECT_GT(even, full_or_reduced(3000, 600));
  EXPECT_GT(shared, full_or_reduced(1000, 200));
  EXPECT_GT(idle, full_or_reduced(500, 100));
  EXPECT_GT(walked, full_or_reduced(30, 5));
}

/// Chunks of one sequence, by the wide kernels' own sizes on 132 workers.
TEST(ScheduleStair, OutputsAreLevelWhereThatTakesNoLongerThanWhatCutsCost) {
  Stream random(83);
  struct Level {
    std::int32_t parts = 0;
    std::int32_t whole_turns = 0;
    std::int32_t neighbours = 1;
    std::int32_t workers = 0;

    bool operator==(const Level&) const = default;
  };
  const auto level_of = [&](std::int32_t q_tokens, std::int32_t kv_tokens) -> Level {
    const Case c{
        .works = {{q_tokens, kv_tokens}}, .shape = {.kv_heads = 8, .group = 4, .reach = {.right = 0}}, .model = wide_model()};
    const LevelWalks walks = level_walks<128, 128>(c, 132, random);
    if (walks.plan.level_parts == 0) return {};
    expect_level<128, 128>(c, 132, walks);
    const std::int32_t neighbours = walks.plan.whole_turns > 0 ? 1 << walks.plan.neighbours_log2 : 1;
    return {walks.plan.level_parts, walks.plan.whole_turns, neighbours, walks.plan.workers};
  };
  // No more outputs than workers: as many parts each, or whole ones where that takes no more than 4 tiles longer, or parts cannot be. Us
  // on an H200, before and since whole ones may: 256 of 256 34.9 and 14.8, 256 of 1k 24.7 and 23.6, 400 of 4k 79.0 and 56.9, 400 of 8k
  // 118 and 103 (docs/notebook/chunks-prefill-append.md).
  EXPECT_EQ(level_of(128, 128), (Level{.parts = 1, .workers = 32}));
  EXPECT_EQ(level_of(256, 256), (Level{.parts = 1, .workers = 64}));
  EXPECT_EQ(level_of(256, 1024), (Level{.parts = 1, .workers = 64}));
  EXPECT_EQ(level_of(128, 1024), (Level{.parts = 4, .workers = 128}));
  EXPECT_EQ(level_of(64, 2048), (Level{.parts = 8, .workers = 128}));
  EXPECT_EQ(level_of(256, 2048), (Level{.parts = 2, .workers = 128}));
  EXPECT_EQ(level_of(512, 2048), (Level{.parts = 1, .workers = 128}));
  EXPECT_EQ(level_of(512, 8192), (Level{.parts = 1, .workers = 128}));
  EXPECT_EQ(level_of(400, 400), (Level{.parts = 1, .workers = 104}));  // 1 to 4 tiles: two ends of a segment are more
  EXPECT_EQ(level_of(400, 4096), (Level{.parts = 1, .workers = 104}));
  EXPECT_EQ(level_of(400, 8192), (Level{.parts = 1, .workers = 104}));
  EXPECT_EQ(level_of(400, 16384), (Level{.parts = 5, .workers = 130}));  // four fifths of an output each
  // More: two neighbours a worker, whole, as often as that goes, and the rest in one more round.
  EXPECT_EQ(level_of(1024, 2048), (Level{.parts = 1, .workers = 128}));
  EXPECT_EQ(level_of(2048, 2048), (Level{.parts = 1, .whole_turns = 2, .neighbours = 2, .workers = 132}));
  EXPECT_EQ(level_of(8192, 8192), (Level{.parts = 1, .whole_turns = 14, .neighbours = 2, .workers = 132}));
  EXPECT_EQ(level_of(2048, 32768), (Level{.parts = 1, .whole_turns = 2, .neighbours = 2, .workers = 132}));
  EXPECT_EQ(level_of(8192, 32768), (Level{.parts = 7, .whole_turns = 14, .neighbours = 2, .workers = 132}));
  // One whole output a worker and the rest cut, where that is as level.
  EXPECT_EQ(level_of(640, 2048), Level{});
  EXPECT_EQ(level_of(640, 32768), (Level{.parts = 4, .whole_turns = 1, .workers = 132}));
  EXPECT_EQ(level_of(768, 32768), (Level{.parts = 2, .whole_turns = 1, .workers = 132}));
}

/// Where a second level of the merge would cost more than tiles, parts are no more than merge on one.
TEST(ScheduleStair, PartsOfALatentCallOfManyRowsMergeOnOneLevel) {
  Stream random(89);
  const auto parts_of = [&](std::int32_t heads, std::int32_t kv_tokens) {
    Case c;
    c.works = {{1, kv_tokens}};
    c.shape = {.kv_heads = 1, .group = heads, .reach = {.right = 0}};
    c.model = cuda::cost_model(cuda::config_of(cuda::Architecture::kSm90, {DType::kBFloat16, 576}, 64, cuda::Scope::kLatentTile));
    c.model.part_tiles = cuda::latent_part_tiles(heads);
    const LevelWalks walks = level_walks<64, 64>(c, 132, random);
    if (walks.plan.level_parts > 0) expect_level<64, 64>(c, 132, walks);
    return walks.plan.level_parts;
  };
  EXPECT_EQ(parts_of(16, 8192), 0);  // a worker for each of 128 tiles: as shares cut anywhere
  EXPECT_EQ(parts_of(64, 8192), 32);
  EXPECT_EQ(parts_of(128, 8192), 32);  // two outputs
  EXPECT_EQ(parts_of(64, 2048), 32);
  EXPECT_EQ(parts_of(64, 16'384), 64);
  EXPECT_EQ(parts_of(64, 32'768), 128);
  EXPECT_EQ(parts_of(128, 32'768), 66);
}

TEST(ScheduleStair, GivesTheSegmentsOfTheGeneralWalk) {
  Stream random(71);
  Counted counted;
  const std::vector<CostModel> models = stair_models();
  for (std::int32_t round = 0; round < full_or_reduced(6000, 600); ++round) {
    Case c;
    c.works.resize(static_cast<std::size_t>(random.between(1, 7)));
    c.model = models[static_cast<std::size_t>(round) % models.size()];
    for (SequenceWork& work : c.works) {
      work.q_tokens = static_cast<std::int32_t>(random.chance(20) ? random.between(0, 2) : random.between(1, 90));
      work.kv_tokens = static_cast<std::int32_t>(random.chance(20) ? random.between(0, 8) : random.between(0, 300));
    }
    c.shape.kv_heads = static_cast<std::int32_t>(random.between(1, 5));
    c.shape.group = static_cast<std::int32_t>(random.one_of({1, 2, 3, 4, 7, 8, 16}));
    c.shape.reach = any_stair_reach(random);
    const auto grid = static_cast<std::int32_t>(random.between(1, 200));
    SCOPED_TRACE(testing::Message() << "round " << round);
    switch (round % 5) {
      case 0: ASSERT_NO_FATAL_FAILURE((expect_same_walks<8, 8>(c, grid, random, counted))); break;
      case 1: ASSERT_NO_FATAL_FAILURE((expect_same_walks<4, 16>(c, grid, random, counted))); break;
      case 2: ASSERT_NO_FATAL_FAILURE((expect_same_walks<16, 8>(c, grid, random, counted))); break;
      case 3: ASSERT_NO_FATAL_FAILURE((expect_same_walks<16, 12>(c, grid, random, counted))); break;
      default: ASSERT_NO_FATAL_FAILURE((expect_same_walks<32, 6>(c, grid, random, counted)));
    }
  }
  EXPECT_GT(counted.segments, full_or_reduced(300'000, 30'000));
  EXPECT_GT(counted.shared, counted.segments / 10) << "too few outputs are shared for the test to mean much";
}

/// Of one sequence all lengths there are, beyond those where anything new can happen: more queries than keys too.
TEST(ScheduleStair, GivesTheSegmentsOfEverySmallCall) {
  Stream random(73);
  Counted counted;
  CostModel model =
      cuda::cost_model(cuda::config_of(cuda::Architecture::kSm90, {DType::kBFloat16, 128}, 128, cuda::Scope::kWideTile));
  for (const std::int32_t group : {1, 2, 3}) {
    for (const std::int32_t right : {-1, 0, 3}) {
      for (std::int32_t q_tokens = 0; q_tokens <= 14; ++q_tokens) {
        for (std::int32_t kv_tokens = 0; kv_tokens <= 21; ++kv_tokens) {
          Case c{.works = {{q_tokens, kv_tokens}},
                 .shape = {.kv_heads = 2, .group = group, .reach = {.right = right}},
                 .model = model};
          const std::int32_t grid = 1 + (q_tokens * 7 + kv_tokens) % 9;
          SCOPED_TRACE(testing::Message() << q_tokens << " queries of " << kv_tokens << " tokens, group " << group << ", right "
                                          << right);
          ASSERT_NO_FATAL_FAILURE((expect_same_walks<4, 4>(c, grid, random, counted)));
          ASSERT_NO_FATAL_FAILURE((expect_same_walks<4, 3>(c, grid, random, counted)));
          ASSERT_NO_FATAL_FAILURE((expect_same_walks<8, 2>(c, grid, random, counted)));
        }
      }
    }
  }
  EXPECT_GT(counted.segments, 20'000);
}

/// Calls as a server makes them, by the wide kernels' own sizes.
TEST(ScheduleStair, GivesTheSegmentsOfChunksOfPrompts) {
  Stream random(79);
  Counted counted;
  for (std::int32_t round = 0; round < full_or_reduced(300, 40); ++round) {
    const cuda::Scope scope = round % 3 == 2 ? cuda::Scope::kLatentTile : cuda::Scope::kWideTile;
    const std::int32_t dims = scope == cuda::Scope::kLatentTile ? 576 : 128;
    const std::int32_t rows = scope == cuda::Scope::kLatentTile ? 64 : 128;
    Case c;
    c.works.resize(static_cast<std::size_t>(random.between(1, 40)));
    c.model = cuda::cost_model(cuda::config_of(cuda::Architecture::kSm90, {DType::kBFloat16, dims}, rows, scope));
    for (SequenceWork& work : c.works) {
      work.q_tokens = static_cast<std::int32_t>(random.chance(50) ? random.between(0, 4) : random.between(1, 3000));
      work.kv_tokens = work.q_tokens + static_cast<std::int32_t>(random.chance(30) ? 0 : random.between(0, 60'000));
    }
    c.shape.kv_heads = static_cast<std::int32_t>(scope == cuda::Scope::kLatentTile ? 1 : random.between(1, 8));
    c.shape.group = static_cast<std::int32_t>(random.one_of({1, 2, 4, 6, 7, 16, 128}));
    c.shape.reach = any_stair_reach(random);
    SCOPED_TRACE(testing::Message() << "round " << round);
    if (scope == cuda::Scope::kLatentTile) {
      ASSERT_NO_FATAL_FAILURE((expect_same_walks<64, 64>(c, 132, random, counted)));
    } else {
      ASSERT_NO_FATAL_FAILURE((expect_same_walks<128, 128>(c, 132, random, counted)));
      ASSERT_NO_FATAL_FAILURE((expect_same_walks<128, 96>(c, 132, random, counted)));
      ASSERT_NO_FATAL_FAILURE((expect_same_walks<128, 64>(c, 132, random, counted)));
    }
  }
  EXPECT_GT(counted.shared, full_or_reduced(20'000, 2'000));
}

LineShape wide_shape(std::int32_t kv_heads, std::int32_t group, std::int32_t tile_tokens = 128) {
  return {.batch = 1, .kv_heads = kv_heads, .group = group, .q_rows = 128, .tile_tokens = tile_tokens, .reach = {.right = 0}};
}

struct Edges {
  std::int64_t calls = 0;
  std::int64_t level_lines = 0;
};

/// The largest call that is taken as a stair, and one tile beyond.
template <std::int32_t kTileTokens>
void expect_taken_up_to_its_edge(std::int32_t kv_heads, std::int32_t group, std::int32_t q_tokens, Stream& random, Edges& edges) {
  const CostModel model =
      cuda::cost_model(cuda::config_of(cuda::Architecture::kSm90, {DType::kBFloat16, 128}, 128, cuda::Scope::kWideTile));
  const LineShape shape = wide_shape(kv_heads, group, kTileTokens);
  const std::int64_t outputs = std::int64_t{kv_heads} * ceil_div(std::int64_t{q_tokens} * group, 128);
  const auto taken = [&](std::int64_t kv_tokens) { return is_stair(shape, model, outputs, q_tokens, kv_tokens, 132); };
  ASSERT_FALSE(taken(INT32_MAX));
  std::int64_t low = 0;
  for (std::int64_t high = INT32_MAX; high - low > 1;) {
    const std::int64_t middle = low + (high - low) / 2;
    (taken(middle) ? low : high) = middle;
  }
  if (low < q_tokens) return;
  ++edges.calls;
  Counted counted;
  const auto kv_tokens = static_cast<std::int32_t>(low);
  SCOPED_TRACE(testing::Message() << q_tokens << " queries of " << kv_tokens << " tokens, " << kv_heads << " heads of " << group
                                  << ", tiles of " << kTileTokens);
  const Case c{.works = {{q_tokens, kv_tokens}}, .shape = shape, .model = model};
  ASSERT_NO_FATAL_FAILURE((expect_same_walks<128, kTileTokens>(c, 132, random, counted)));
  EXPECT_GT(counted.segments, 0);
  const LevelWalks walks = level_walks<128, kTileTokens>(c, 132, random);
  if (walks.plan.level_parts == 0) return;
  ++edges.level_lines;
  ASSERT_NO_FATAL_FAILURE((expect_level<128, kTileTokens>(c, 132, walks)));
}

/// At the capacities at which 32 bits end both walks still agree where the line is taken as a stair.
TEST(ScheduleStair, R20_IsTakenUpToWhat32BitsHoldAndNoFurther) {
  Stream random(83);
  Edges edges;
  for (const std::int32_t kv_heads : {1, 8, 32}) {
    for (const std::int32_t group : {1, 4, 7, 128}) {
      for (const std::int32_t q_tokens : {128, 16'384}) {
        ASSERT_NO_FATAL_FAILURE(expect_taken_up_to_its_edge<128>(kv_heads, group, q_tokens, random, edges));
        ASSERT_NO_FATAL_FAILURE(expect_taken_up_to_its_edge<96>(kv_heads, group, q_tokens, random, edges));
        ASSERT_NO_FATAL_FAILURE(expect_taken_up_to_its_edge<64>(kv_heads, group, q_tokens, random, edges));
      }
    }
  }
  EXPECT_GE(edges.calls, 36);
  EXPECT_GE(edges.level_lines, 18);
}

TEST(ScheduleStair, WhatIsNoStairIsNotTaken) {
  const CostModel model =
      cuda::cost_model(cuda::config_of(cuda::Architecture::kSm90, {DType::kBFloat16, 128}, 128, cuda::Scope::kWideTile));
  LineShape shape = wide_shape(8, 4);
  EXPECT_TRUE(is_stair(shape, model, 1024, 4096, 131'072, 132));
  shape.reach = {};
  EXPECT_TRUE(is_stair(shape, model, 1024, 4096, 131'072, 132));
  shape.reach = {.left = 100, .right = 0};  // a window's left end is another stair
  EXPECT_FALSE(is_stair(shape, model, 1024, 4096, 131'072, 132));
  shape.reach = {.right = INT32_MAX};  // ends beyond 31 bits
  EXPECT_FALSE(is_stair(shape, model, 1024, 4096, 131'072, 132));
  shape.reach = {.right = 0};
  CostModel of_rows = model;
  of_rows.row_units = 1;  // a last row block that is not full would cost less
  EXPECT_FALSE(is_stair(shape, of_rows, 1024, 4096, 131'072, 132));
}

/// 128 rows see 42 2/3 tokens more: 8 tiles in 3 blocks.
TEST(ScheduleStair, RisesByAnyNumberOfTilesInAnyNumberOfBlocks) {
  const LineShape shape = wide_shape(8, 3, 16);
  const SteepStair stair = shape.steep_stair_of({.q_tokens = 4096, .kv_tokens = 4096});
  EXPECT_EQ(stair.width, 3);
  EXPECT_EQ(stair.rise_log2, 3);
  std::int64_t before = 0;
  for (std::int32_t block = 0; block < 96; ++block) {
    ASSERT_EQ(stair.tiles_before(block), before) << block;
    ASSERT_EQ(stair.tiles(block), ceil_div(((block + 1) * 128 - 1) / 3 + 1, 16)) << block;
    before += stair.tiles(block);
  }
}

}  // namespace
}  // namespace lean::schedule
