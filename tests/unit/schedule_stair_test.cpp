// The stair line, which a GPU walks in 32 bits for calls of many rows (schedule/stair_line.hpp), against the general line: the same
// tiles, sums, plans and segments to the last number, by every cost model that it may be asked for; and which calls are no stair.
#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "backends/cuda/kernel_rows.hpp"
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
  const StairRules rules(lengths, StairShape<kRows, kTileTokens>(c.shape, stair_width_of(c.shape)), c.model, Measure::kCost);
  const BasicLineSums<std::int32_t> sums = rules.sum_sequences(0, c.shape.batch);
  ASSERT_NO_FATAL_FAILURE(expect_same_sums(line.sums(), sums));
  const Plan plan = make_plan(line.sums(), Policy::lean(), c.model, kTileTokens, grid);
  const BasicPlan<std::int32_t> stair_plan = make_plan(sums, Policy::lean(), c.model, kTileTokens, grid);
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

/// Walks every worker of a level line: each output's tiles once, in as many parts as its line has, whose tiles differ by one at most;
/// a worker has one part, and knows whose others are.
template <std::int32_t kRows, std::int32_t kTileTokens>
bool expect_level_walks(Case c, std::int32_t grid, Stream& random) {
  c.shape.batch = static_cast<std::int64_t>(c.works.size());
  c.shape.q_rows = kRows;
  c.shape.tile_tokens = kTileTokens;
  const ListedLengths lengths{c.works.data()};
  using StairRules = Rules<kRows, kTileTokens>;
  const StairRules rules(lengths, StairShape<kRows, kTileTokens>(c.shape, stair_width_of(c.shape)), c.model, Measure::kCost);
  const BasicLineSums<std::int32_t> sums = rules.sum_sequences(0, c.shape.batch);
  BasicPlan<std::int32_t> plan = make_plan(sums, Policy::lean(), c.model, kTileTokens, grid);
  level(plan, sums, c.model, grid);
  if (plan.level_parts == 0) return false;
  EXPECT_EQ(plan.workers, sums.outputs * plan.level_parts);
  EXPECT_LE(plan.workers, grid);
  std::int32_t worker = 0;
  for (std::int64_t b = 0, outputs_before = 0; b < c.shape.batch; ++b) {
    const SequenceWork work = c.works[static_cast<std::size_t>(b)];
    for (std::int32_t output = 0; output < c.shape.kv_heads * rules.shape().row_blocks(work); ++output) {
      const std::int32_t block = output % rules.shape().row_blocks(work);
      const std::int32_t tiles = rules.shape().tiles_of(work, block).count;
      std::int32_t next_tile = 0;
      for (std::int32_t part = 0; part < plan.level_parts; ++part, ++worker) {
        const bool early = random.chance(50);  // from any sequence that begins at or before the share
        const SequencePlace<std::int32_t> start{early ? 0 : b,
                                                early ? 0 : static_cast<std::int32_t>(outputs_before) * plan.level_parts};
        auto walk = StairCursor<StairRules>::begin(plan, worker, plan.shares.range(worker), start, lengths(start.sequence));
        StairCursor<StairRules> cursor(rules, plan, walk);
        EXPECT_TRUE(cursor.next());
        const BasicSegment<std::int32_t>& segment = walk.segment;
        EXPECT_EQ(segment.output.sequence, b);
        EXPECT_EQ(segment.output.kv_head, output / rules.shape().row_blocks(work));
        EXPECT_EQ(segment.output.row_block, block);
        EXPECT_EQ(segment.output.tiles, tiles);
        EXPECT_EQ(segment.tile_begin, next_tile);
        EXPECT_NEAR(segment.tile_end - segment.tile_begin, tiles / plan.level_parts, 1);
        EXPECT_EQ(segment.contributor, part);
        EXPECT_EQ(segment.contributors, plan.level_parts);
        EXPECT_EQ(segment.slots.slot(part), part == 0 ? 2 * worker + 1 : 2 * worker);
        next_tile = segment.tile_end;
        EXPECT_FALSE(cursor.next());
      }
      EXPECT_EQ(next_tile, tiles);
    }
    outputs_before += c.shape.kv_heads * rules.shape().row_blocks(work);
  }
  EXPECT_EQ(worker, plan.workers);
  return true;
}

TEST(ScheduleStair, ALevelLineGivesEveryOutputAsManyEqualParts) {
  Stream random(79);
  std::int32_t level_lines = 0;
  for (std::int32_t round = 0; round < full_or_reduced(4000, 400) && !testing::Test::HasFailure(); ++round) {
    Case c;
    c.works.resize(static_cast<std::size_t>(random.between(1, 5)));
    c.model = cuda::cost_model(cuda::config_of(cuda::Architecture::kSm90, {DType::kBFloat16, 128}, 128, cuda::Scope::kWideTile));
    const auto longest = static_cast<std::int32_t>(random.between(20, 300));
    for (SequenceWork& work : c.works) {
      work.kv_tokens = longest - static_cast<std::int32_t>(random.between(0, longest / 8));
      work.q_tokens = static_cast<std::int32_t>(random.chance(10) ? 0 : random.between(1, 60));
    }
    c.shape.kv_heads = static_cast<std::int32_t>(random.between(1, 5));
    c.shape.group = static_cast<std::int32_t>(random.one_of({2, 4, 8}));
    c.shape.reach = any_stair_reach(random);
    if (expect_level_walks<16, 8>(c, static_cast<std::int32_t>(random.between(1, 200)), random)) ++level_lines;
  }
  EXPECT_GT(level_lines, full_or_reduced(400, 40));
}

TEST(ScheduleStair, OutputsAreLevelWhereThatTakesNoLongerThanWhatCutsCost) {
  const CostModel model =
      cuda::cost_model(cuda::config_of(cuda::Architecture::kSm90, {DType::kBFloat16, 128}, 128, cuda::Scope::kWideTile));
  const auto parts = [&](std::int32_t q_tokens, std::int32_t kv_tokens) {
    LineShape shape{.batch = 1, .kv_heads = 8, .group = 4, .q_rows = 128, .tile_tokens = 128, .reach = {.right = 0}};
    const std::vector<SequenceWork> works{{q_tokens, kv_tokens}};
    const ListedLengths lengths{works.data()};
    const Rules<128, 128> rules(lengths, StairShape<128, 128>(shape, stair_width_of(shape)), model, Measure::kCost);
    const BasicLineSums<std::int32_t> sums = rules.sum_sequences(0, 1);
    BasicPlan<std::int32_t> plan = make_plan(sums, Policy::lean(), model, 128, 132);
    level(plan, sums, model, 132);
    return plan.level_parts;
  };
  EXPECT_EQ(parts(64, 2048), 8);
  EXPECT_EQ(parts(256, 2048), 2);
  EXPECT_EQ(parts(512, 2048), 1);
  EXPECT_EQ(parts(512, 8192), 1);
  EXPECT_EQ(parts(512, 32768), 0);  // 256 tiles, where an equal share is 251 and two ends
  EXPECT_EQ(parts(1024, 2048), 0);  // more outputs than workers
  EXPECT_EQ(parts(400, 400), 1);    // 1 to 4 tiles: two ends of a segment are more than the difference
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
    if (round % 3 == 0) {
      ASSERT_NO_FATAL_FAILURE((expect_same_walks<8, 8>(c, grid, random, counted))) << "round " << round;
    } else if (round % 3 == 1) {
      ASSERT_NO_FATAL_FAILURE((expect_same_walks<4, 16>(c, grid, random, counted))) << "round " << round;
    } else {
      if (c.shape.group % 2 != 0) c.shape.group *= 2;
      ASSERT_NO_FATAL_FAILURE((expect_same_walks<16, 8>(c, grid, random, counted))) << "round " << round;
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
          ASSERT_NO_FATAL_FAILURE((expect_same_walks<4, 4>(c, grid, random, counted)))
              << q_tokens << " queries of " << kv_tokens << " tokens, group " << group << ", right " << right;
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
    c.shape.group = static_cast<std::int32_t>(random.one_of({1, 4, 7, 16, 128}));
    c.shape.reach = any_stair_reach(random);
    if (scope == cuda::Scope::kLatentTile) {
      ASSERT_NO_FATAL_FAILURE((expect_same_walks<64, 64>(c, 132, random, counted))) << "round " << round;
    } else {
      ASSERT_NO_FATAL_FAILURE((expect_same_walks<128, 128>(c, 132, random, counted))) << "round " << round;
    }
  }
  EXPECT_GT(counted.shared, full_or_reduced(20'000, 2'000));
}

LineShape wide_shape(std::int32_t kv_heads, std::int32_t group) {
  return {.batch = 1, .kv_heads = kv_heads, .group = group, .q_rows = 128, .tile_tokens = 128, .reach = {.right = 0}};
}

/// At the capacities at which 32 bits end, and one tile beyond, both walks still agree where the line is taken as a stair.
TEST(ScheduleStair, R20_IsTakenUpToWhat32BitsHoldAndNoFurther) {
  Stream random(83);
  const CostModel model =
      cuda::cost_model(cuda::config_of(cuda::Architecture::kSm90, {DType::kBFloat16, 128}, 128, cuda::Scope::kWideTile));
  std::int64_t edges = 0;
  for (const std::int32_t kv_heads : {1, 8, 32}) {
    for (const std::int32_t group : {1, 4, 7, 128}) {
      const LineShape shape = wide_shape(kv_heads, group);
      for (const std::int32_t q_tokens : {128, 16'384}) {
        const std::int64_t outputs = std::int64_t{kv_heads} * ceil_div(std::int64_t{q_tokens} * group, 128);
        const auto taken = [&](std::int64_t kv_tokens) { return is_stair(shape, model, outputs, q_tokens, kv_tokens, 132); };
        ASSERT_FALSE(taken(INT32_MAX));
        std::int64_t low = 0;
        for (std::int64_t high = INT32_MAX; high - low > 1;) {
          const std::int64_t middle = low + (high - low) / 2;
          (taken(middle) ? low : high) = middle;
        }
        if (low < q_tokens) continue;
        ++edges;
        Counted counted;
        const auto kv_tokens = static_cast<std::int32_t>(low);
        Case c{.works = {{q_tokens, kv_tokens}}, .shape = shape, .model = model};
        ASSERT_NO_FATAL_FAILURE((expect_same_walks<128, 128>(c, 132, random, counted)))
            << q_tokens << " queries of " << kv_tokens << " tokens, " << kv_heads << " heads of " << group;
        EXPECT_GT(counted.segments, 0);
      }
    }
  }
  EXPECT_GE(edges, 12);
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
  shape.group = 3;
  shape.tile_tokens = 16;  // 128 rows see 42 2/3 tokens more, no whole number of tiles to a whole number of blocks
  EXPECT_FALSE(is_stair(shape, model, 1024, 4096, 131'072, 132));
}

}  // namespace
}  // namespace lean::schedule
