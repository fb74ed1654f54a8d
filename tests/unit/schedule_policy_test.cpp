// The plan: how many workers, how even their shares, where cuts may lie, and when the schedule is that of
// FlashAttention-2 or FlashDecoding.
#include <gtest/gtest.h>

#include "support/random.hpp"
#include "support/reduced.hpp"
#include "unit/schedule_checks.hpp"

namespace lean::schedule {
namespace {

using checks::Case;
using checks::charged_models;
using checks::Checker;
using checks::decode_of;
using support::full_or_reduced;
using support::Stream;

constexpr LineShape kOneHead = {.kv_heads = 1, .group = 1, .q_rows = 1, .tile_tokens = 1};

/// `outputs` sequences of one output each, all of `tiles` tiles.
Case alike(std::int32_t outputs, std::int32_t tiles, const CostModel& model) {
  return {.works = std::vector<SequenceWork>(static_cast<std::size_t>(outputs), {.q_tokens = 1, .kv_tokens = tiles}),
          .shape = kOneHead,
          .model = model};
}

std::int64_t most(const std::vector<std::int64_t>& of_workers) { return *std::max_element(of_workers.begin(), of_workers.end()); }
std::int64_t least(const std::vector<std::int64_t>& of_workers) { return *std::min_element(of_workers.begin(), of_workers.end()); }

/// A random batch, alike or ragged, with a random cost model whose rules are on or off one by one.
Case random_case(Stream& random) {
  const auto pick = [&random](std::initializer_list<std::int32_t> values) { return random.one_of(values); };
  Case c;
  c.shape = {.kv_heads = static_cast<std::int32_t>(random.between(1, 8)),
             .group = pick({1, 4}),
             .q_rows = 16,
             .tile_tokens = pick({1, 16}),
             .reach = checks::random_reach(random)};
  c.model = {.tile_units = pick({1, 4, 16}),
             .free_rows = pick({8, 128}),
             .row_units = pick({0, 2}),
             .segment_units = pick({0, 3, 8, 40}),
             .min_worker_tiles = pick({1, 2, 4, 8}),
             .sliver_tiles = pick({0, 2, 4}),
             .alike_percent = pick({0, 2}),
             .align_percent = pick({0, 5, 20}),
             .whole_percent = pick({0, 5, 25}),
             .short_tiles = pick({0, 0, 6}),
             .spare_tiles = pick({0, 0, 16}),
             .unshared_tiles = pick({0, 0, 2, 3})};
  const bool all_alike = random.chance(40);
  const bool mixed = !all_alike && random.chance(50);
  const auto length = static_cast<std::int32_t>(random.between(0, 400));
  const std::int64_t batch = random.between(1, random.chance(50) ? 4 : 60);
  for (std::int64_t b = 0; b < batch; ++b) {
    c.works.push_back({.q_tokens = mixed ? static_cast<std::int32_t>(random.between(0, 20)) : 1,
                       .kv_tokens = all_alike ? length : static_cast<std::int32_t>(random.between(0, 400))});
  }
  return c;
}

TEST(SchedulePolicy, ImbalanceIsAtMostOneTileBeforeEdgesAreSnapped) {
  Stream random(1);
  for (std::int32_t round = 0; round < full_or_reduced(4000, 400); ++round) {
    Case c = random_case(random);
    c.model = CostModel::plain();
    Checker checker(std::move(c), Measure::kCost);
    ASSERT_EQ(checker.fault(Policy::lean(), static_cast<std::int32_t>(random.between(1, 300))), "");
    ASSERT_LE(most(checker.worker_tiles()) - least(checker.worker_tiles()), 1);
  }
}

TEST(SchedulePolicy, AFixedChunkShareIsWithinOneChunkOfTheEqualShare) {
  Stream random(2);
  for (std::int32_t round = 0; round < full_or_reduced(4000, 400); ++round) {
    Case c = random_case(random);
    c.model = CostModel::plain();
    const Policy policy = Policy::fixed_chunk(static_cast<std::int32_t>(random.between(1, 40)) * c.shape.tile_tokens);
    Checker checker(std::move(c), Measure::kCost);
    const auto grid = static_cast<std::int32_t>(random.between(1, 300));
    ASSERT_EQ(checker.fault(policy, grid), "");
    const Plan plan = checker.plan(policy, grid);
    for (const std::int64_t tiles : checker.worker_tiles()) {  // |tiles - total / workers| < granularity
      ASSERT_LT(std::abs(tiles * plan.workers - checker.line().sums().tiles), plan.granularity_tiles * plan.workers);
    }
  }
}

TEST(SchedulePolicy, FixedChunkCutsOnlyAtMultiplesOfTheChunk) {
  Stream random(3);
  std::int64_t cuts = 0;
  for (std::int32_t round = 0; round < full_or_reduced(500, 50); ++round) {
    Case c = random_case(random);
    const std::int32_t chunk_tiles = static_cast<std::int32_t>(random.between(1, 9));
    const Policy policy = Policy::fixed_chunk(chunk_tiles * c.shape.tile_tokens);
    Checker checker(std::move(c), Measure::kCost);
    ASSERT_EQ(checker.fault(policy, static_cast<std::int32_t>(random.between(1, 200))), "");
    for (const auto& entry : checker.entries()) {
      if (entry.tile_begin == 0) continue;
      const std::int64_t first_tile = checker.outputs()[static_cast<std::size_t>(entry.output)].first_tile;
      ASSERT_EQ((first_tile + entry.tile_begin) % chunk_tiles, 0);
      cuts += entry.tile_begin > 0 ? 1 : 0;
    }
  }
  EXPECT_GT(cuts, 500);
}

TEST(SchedulePolicy, ChunksAreWholeTiles) {
  EXPECT_EQ(chunk_tiles_of(Policy::fixed_chunk(), 128), Policy::kDefaultChunkTokens / 128);
  EXPECT_EQ(chunk_tiles_of(Policy::fixed_chunk(256), 128), 2);
  EXPECT_EQ(chunk_tiles_of(Policy::fixed_chunk(257), 128), 3);
  EXPECT_EQ(chunk_tiles_of(Policy::fixed_chunk(1), 128), 1);
  EXPECT_EQ(chunk_tiles_of(Policy::lean(), 128), 1);
}

// A share begins up to one granule before its boundary, ends up to a snap after it or begins a snap earlier, and pays whole
// segment charges where the line spreads them over the outputs it begins and ends in.
TEST(SchedulePolicy, AShareCostsAtMostTheEqualShareAndAGranuleAndTwoSegmentChargesAndTwoSnaps) {
  Stream random(4);
  std::int64_t snapped = 0;
  for (std::int32_t round = 0; round < full_or_reduced(6000, 600); ++round) {
    Case c = random_case(random);
    const CostModel model = c.model;
    const Policy policy = random.chance(70)
                              ? Policy::lean()
                              : Policy::fixed_chunk(static_cast<std::int32_t>(random.between(1, 40)) * c.shape.tile_tokens);
    Checker checker(std::move(c), Measure::kCost);
    const auto grid = static_cast<std::int32_t>(random.between(1, 200));
    ASSERT_EQ(checker.fault(policy, grid), "");
    const Plan plan = checker.plan(policy, grid);
    const LineSums& sums = checker.line().sums();
    if (sums.outputs == 0 || plan.whole_outputs) continue;
    const std::int64_t share = ceil_div(sums.cost, plan.workers);
    std::int64_t granule = std::int64_t{plan.granularity_tiles} * sums.max_tile_cost;
    for (const Output& output : checker.outputs()) {
      const std::int64_t whole = std::int64_t{std::min(plan.granularity_tiles, output.tiles)} * output.tile_cost;
      granule = std::max(granule, whole);  // an output that is never cut
    }
    ASSERT_LE(most(checker.worker_cost()), share + granule + 2 * model.segment_units + 2 * plan.snap_units);
    ASSERT_LE(plan.snap_units, std::max(share * model.align_percent / 200, share / 8));
    if (sums.cost > (2 * plan.snap_units + granule + model.segment_units) * plan.workers) {
      ASSERT_GT(least(checker.worker_tiles()), 0) << "a worker of the plan has nothing to do";
    }
    snapped += plan.snap_units > 0 ? 1 : 0;
  }
  EXPECT_GT(snapped, full_or_reduced(1000, 100));
}

TEST(SchedulePolicy, NoCutLiesWithinASnapOfAnOutputsEdge) {
  Stream random(5);
  std::int64_t slivers_prevented = 0;
  for (std::int32_t round = 0; round < full_or_reduced(2000, 200); ++round) {
    Case c = random_case(random);
    c.model.sliver_tiles = 3;
    const CostModel model = c.model;
    Checker checker(std::move(c), Measure::kCost);
    const auto grid = static_cast<std::int32_t>(random.between(1, 60));
    ASSERT_EQ(checker.fault(Policy::lean(), grid), "");
    const Plan plan = checker.plan(Policy::lean(), grid);
    const std::int64_t share = checker.line().sums().cost / plan.workers;
    ASSERT_GE(plan.snap_units, checker.line().sums().outputs == 0 ? 0 : std::min<std::int64_t>(3 * model.tile_units, share / 8));
    for (const auto& entry : checker.entries()) {
      const Output& output = checker.outputs()[static_cast<std::size_t>(entry.output)];
      if (entry.tile_begin > 0) {
        ASSERT_GT(entry.tile_begin * output.tile_cost, plan.snap_units);
        ASSERT_GT((output.tiles - entry.tile_begin) * output.tile_cost, plan.snap_units);
        ASSERT_FALSE(plan.whole_outputs);
      }
    }
    slivers_prevented += plan.snap_units >= 2 * model.tile_units ? 1 : 0;
  }
  EXPECT_GT(slivers_prevented, 50);
}

/// The segments of two policies are the same, worker by worker.
void expect_same_work(const Case& c, const Policy& one, const Policy& other, std::int32_t grid) {
  Checker a(c, measure_of(one.kind));
  Checker b(c, measure_of(other.kind));
  ASSERT_EQ(a.fault(one, grid), "");
  ASSERT_EQ(b.fault(other, grid), "");
  ASSERT_EQ(a.plan(one, grid).workers, b.plan(other, grid).workers);
  ASSERT_EQ(a.entries().size(), b.entries().size());
  for (std::size_t i = 0; i < a.entries().size(); ++i) {
    const auto& left = a.entries()[i];
    const auto& right = b.entries()[i];
    ASSERT_EQ(left.output, right.output);
    ASSERT_EQ(left.worker, right.worker);
    ASSERT_EQ(left.tile_begin, right.tile_begin);
    ASSERT_EQ(left.tile_end, right.tile_end);
    ASSERT_EQ(left.contributor, right.contributor);
    ASSERT_EQ(left.contributors, right.contributors);
  }
}

// "generalizes to FlashAttention-2 in the case where the number of output tiles is equal to grid size, and generalizes to
// FlashDecoding when grid size is an even multiple of number of output tiles": Decomposition and Mapping.
TEST(SchedulePolicy, LeanIsFlashAttention2WhenTheGridIsTheNumberOfOutputs) {
  for (const CostModel& model : {CostModel::plain(), charged_models()[1], charged_models()[2]}) {
    for (std::int32_t outputs = 1; outputs <= 140; outputs += full_or_reduced(1, 11)) {
      for (const std::int32_t tiles : {1, 2, 7, 64, 1023}) {
        if (tiles < model.min_worker_tiles) continue;
        expect_same_work(alike(outputs, tiles, model), Policy::lean(), Policy::data_parallel(), outputs);
      }
    }
  }
}

TEST(SchedulePolicy, LeanIsFlashDecodingWhenTheGridIsOutputsTimesSplitsAndTilesDivide) {
  for (std::int32_t outputs = 1; outputs <= 40; outputs += full_or_reduced(1, 7)) {
    for (std::int32_t splits = 1; splits <= 32; ++splits) {
      for (const std::int32_t tiles_per_split : {1, 2, 7}) {
        const Case c = alike(outputs, splits * tiles_per_split, CostModel::plain());
        expect_same_work(c, Policy::lean(), Policy::fixed_split(splits), outputs * splits);
      }
    }
  }
}

TEST(SchedulePolicy, OneSplitIsDataParallel) {
  Stream random(6);
  for (std::int32_t round = 0; round < 100; ++round) {
    expect_same_work(random_case(random), Policy::fixed_split(1), Policy::data_parallel(),
                     static_cast<std::int32_t>(random.between(1, 200)));
  }
}

TEST(SchedulePolicy, FixedSplitFollowsFlashDecodingsRuleUnlessTold) {
  Stream random(7);
  for (std::int32_t round = 0; round < 200; ++round) {
    Checker checker(random_case(random), Measure::kOutputs);
    const auto grid = static_cast<std::int32_t>(random.between(1, 300));
    const LineSums& sums = checker.line().sums();
    if (sums.outputs == 0) continue;
    EXPECT_EQ(checker.plan(Policy::fixed_split(), grid).splits, flash_decoding_splits(sums.outputs, sums.max_output_tiles, grid));
    EXPECT_EQ(checker.plan(Policy::fixed_split(9), grid).splits, 9);
    EXPECT_EQ(checker.plan(Policy::data_parallel(), grid).splits, 1);
  }
}

TEST(SchedulePolicy, WorkersShrinkWithTheWork) {
  for (std::int32_t tiles = 1; tiles <= 300; ++tiles) {
    for (const std::int32_t floor_tiles : {1, 2, 4, 16}) {
      const CostModel model = {.min_worker_tiles = floor_tiles};
      Checker checker(alike(1, tiles, model), Measure::kCost);
      ASSERT_EQ(checker.fault(Policy::lean(), 132), "");
      const Plan plan = checker.plan(Policy::lean(), 132);
      ASSERT_EQ(plan.workers, std::clamp(tiles / floor_tiles, 1, 132));
      if (tiles >= floor_tiles) {
        ASSERT_GE(least(checker.worker_tiles()), floor_tiles);
      }
    }
  }
}

TEST(SchedulePolicy, EightOutputsOn132WorkersTake128WithOneSegmentEach) {
  const CostModel model = {.segment_units = 8, .min_worker_tiles = 2, .sliver_tiles = 2, .align_percent = 5, .whole_percent = 5};
  for (const std::int32_t tiles : {64, 1000, 1024, 8191}) {
    Checker checker(alike(8, tiles, model), Measure::kCost);
    ASSERT_EQ(checker.fault(Policy::lean(), 132), "");
    EXPECT_EQ(checker.plan(Policy::lean(), 132).workers, 128);
    EXPECT_EQ(most(checker.worker_segments()), 1);
    EXPECT_EQ(least(checker.worker_segments()), 1);
  }
}

/// 1000 tiles on 128 workers instead of 132: 7.8 tiles against 7.6, 3.8 units more of 16 a tile.
TEST(SchedulePolicy, LiningUpTakesNoMoreOfAWorkersTimeThanItMay) {
  for (const std::int32_t units : {0, 3, 4, 100}) {
    const CostModel model = {.segment_units = 0, .align_percent = 5, .whole_percent = 5, .align_units = units};
    Checker split(alike(8, 125, model), Measure::kCost);
    ASSERT_EQ(split.fault(Policy::lean(), 132), "");
    EXPECT_EQ(split.plan(Policy::lean(), 132).workers, units < 4 ? 132 : 128) << units;
    // 128 outputs of 8 tiles: a worker one, or 132 workers 7.8 tiles; 3.9 units more.
    Checker whole(alike(128, 8, model), Measure::kCost);
    ASSERT_EQ(whole.fault(Policy::lean(), 132), "");
    EXPECT_EQ(whole.plan(Policy::lean(), 132).workers, units < 4 ? 132 : 128) << units;
    // 260 outputs of 8 tiles: two a worker on 130, or 15.76 tiles each; 3.9 units more.
    Checker rounds(alike(260, 8, model), Measure::kCost);
    ASSERT_EQ(rounds.fault(Policy::lean(), 132), "");
    EXPECT_EQ(rounds.plan(Policy::lean(), 132).whole_outputs, units >= 4) << units;
  }
}

/// Outputs of 10 sequences with 8 kv heads stay whole on 80 of 132 workers, those of 5 sequences get 3 workers each, of 20 a worker
/// two: as long as no worker has more than 6 tiles then.
TEST(SchedulePolicy, ShortOutputsLineUpWhateverStaysIdle) {
  struct Row {
    std::int32_t outputs, tiles, workers, contributors;
  };
  const CostModel model = {.segment_units = 8, .sliver_tiles = 1, .align_percent = 5, .align_units = 48, .short_tiles = 6};
  for (const Row& row : {Row{80, 2, 80, 1}, Row{80, 6, 80, 1}, Row{40, 4, 120, 3}, Row{40, 18, 120, 3}, Row{24, 8, 120, 5},
                         Row{160, 3, 80, 1}, Row{67, 6, 67, 1}}) {
    Checker checker(alike(row.outputs, row.tiles, model), Measure::kCost);
    ASSERT_EQ(checker.fault(Policy::lean(), 132), "");
    EXPECT_EQ(checker.plan(Policy::lean(), 132).workers, row.workers) << row.outputs << " outputs of " << row.tiles;
    EXPECT_LE(most(checker.worker_tiles()), model.short_tiles) << row.outputs << " outputs of " << row.tiles;
    for (const auto& entry : checker.entries()) ASSERT_EQ(entry.contributors, row.contributors) << row.outputs << " outputs";
  }
  for (const Row& row : {Row{80, 7, 0, 0}, Row{40, 19, 0, 0}, Row{160, 4, 0, 0}}) {
    Checker checker(alike(row.outputs, row.tiles, model), Measure::kCost);
    ASSERT_EQ(checker.fault(Policy::lean(), 132), "");
    EXPECT_EQ(checker.plan(Policy::lean(), 132).workers, 132) << row.outputs << " outputs of " << row.tiles;
  }
}

/// Outputs of two tiles have a worker each, and those of three as many workers as tiles, where there are enough.
TEST(SchedulePolicy, OutputsOfFewTilesAreNotShared) {
  struct Row {
    std::int32_t outputs, tiles, workers;
  };
  const CostModel model = {
      .segment_units = 8, .sliver_tiles = 1, .align_percent = 5, .align_units = 48, .short_tiles = 12, .unshared_tiles = 2};
  for (const Row& row :
       {Row{40, 1, 40}, Row{40, 2, 40}, Row{8, 2, 8}, Row{66, 2, 66}, Row{100, 2, 100}, Row{40, 3, 120}, Row{8, 3, 24}}) {
    Checker checker(alike(row.outputs, row.tiles, model), Measure::kCost);
    ASSERT_EQ(checker.fault(Policy::lean(), 132), "");
    EXPECT_EQ(checker.plan(Policy::lean(), 132).workers, row.workers) << row.outputs << " outputs of " << row.tiles;
    for (const auto& entry : checker.entries())
      ASSERT_EQ(entry.contributors, row.workers / row.outputs) << row.outputs << " outputs";
  }
}

/// 400 outputs are 4 for each of 100 workers, and 800 are 7 for each of 115, a merge for none, as long as nobody has more than 48
/// tiles; 272 would leave 41 workers idle, and longer outputs read as fast by fewer workers no more.
TEST(SchedulePolicy, WholeOutputsMayLeaveAQuarterOfTheWorkersIdle) {
  struct Row {
    std::int32_t outputs, tiles, workers;
  };
  const CostModel model = {
      .segment_units = 8, .sliver_tiles = 1, .align_percent = 5, .align_units = 48, .short_tiles = 12, .spare_tiles = 48};
  for (const Row& row : {Row{400, 4, 100}, Row{400, 12, 100}, Row{800, 6, 115}}) {
    Checker checker(alike(row.outputs, row.tiles, model), Measure::kCost);
    ASSERT_EQ(checker.fault(Policy::lean(), 132), "");
    EXPECT_EQ(checker.plan(Policy::lean(), 132).workers, row.workers) << row.outputs << " outputs of " << row.tiles;
    EXPECT_EQ(most(checker.worker_segments()), ceil_div(row.outputs, 132)) << row.outputs << " outputs of " << row.tiles;
    EXPECT_LE(most(checker.worker_cost()) * 132 * 3, checker.line().sums().cost * 4) << row.outputs << " outputs of " << row.tiles;
    for (const auto& entry : checker.entries()) ASSERT_EQ(entry.contributors, 1) << row.outputs << " outputs of " << row.tiles;
  }
  for (const Row& row : {Row{400, 13, 0}, Row{800, 7, 0}, Row{272, 5, 0}}) {
    const Plan plan = Checker(alike(row.outputs, row.tiles, model), Measure::kCost).plan(Policy::lean(), 132);
    EXPECT_FALSE(plan.whole_outputs) << row.outputs << " outputs of " << row.tiles;
    EXPECT_EQ(plan.workers, 132) << row.outputs << " outputs of " << row.tiles;
  }
}

TEST(SchedulePolicy, OutputsThatFillTheMachineWithinFivePercentStayWhole) {
  const CostModel model = {.segment_units = 8, .min_worker_tiles = 1, .sliver_tiles = 2, .align_percent = 5, .whole_percent = 5};
  for (const std::int32_t outputs : {126, 132, 256, 264, 380, 1010, 1056}) {
    Checker checker(alike(outputs, 37, model), Measure::kCost);
    ASSERT_EQ(checker.fault(Policy::lean(), 132), "");
    for (const auto& entry : checker.entries()) ASSERT_EQ(entry.contributors, 1) << outputs << " outputs";
    EXPECT_EQ(most(checker.worker_segments()), ceil_div(outputs, 132));
  }
  for (const std::int32_t outputs : {100, 140, 200, 280}) {  // more than 5 % would be lost: cut
    Checker checker(alike(outputs, 37, model), Measure::kCost);
    ASSERT_EQ(checker.fault(Policy::lean(), 132), "");
    EXPECT_TRUE(std::any_of(checker.entries().begin(), checker.entries().end(), [](const auto& e) { return e.contributors > 1; }))
        << outputs << " outputs";
  }
}

TEST(SchedulePolicy, LiningUpCostsAtMostWhatItMay) {
  for (const std::int32_t percent : {1, 5, 20}) {
    for (std::int32_t outputs = 1; outputs <= 600; outputs += full_or_reduced(1, 13)) {
      Checker checker(alike(outputs, 200, {.segment_units = 8, .align_percent = percent / 2, .whole_percent = percent}),
                      Measure::kCost);
      ASSERT_EQ(checker.fault(Policy::lean(), 132), "");
      const Plan plan = checker.plan(Policy::lean(), 132);
      if (plan.whole_outputs) {
        ASSERT_LE(most(checker.worker_cost()) * 132 * 100, checker.line().sums().cost * (100 + percent)) << outputs << " outputs";
      } else {
        ASSERT_GE(plan.workers * 100, 132 * (100 - percent / 2)) << outputs << " outputs";
      }
    }
  }
}

// Any schedule of these outputs on `grid` workers has a worker that does at least total / grid.
TEST(SchedulePolicy, LeanIsNeverWorseThanItsSpecialCasesByMoreThanItsLimits) {
  Stream random(8);
  std::int64_t better = 0;
  for (std::int32_t round = 0; round < full_or_reduced(1500, 150); ++round) {
    Case c = random_case(random);
    c.model.min_worker_tiles = 1;
    const CostModel model = c.model;
    const auto grid = static_cast<std::int32_t>(random.between(1, 200));
    Checker line(c, Measure::kCost);
    Checker items(std::move(c), Measure::kOutputs);
    if (line.outputs().empty() || line.line().sums().cost < grid * line.line().sums().max_tile_cost) continue;
    ASSERT_EQ(line.fault(Policy::lean(), grid), "");
    const Plan plan = line.plan(Policy::lean(), grid);
    const std::int64_t lean_cost = most(line.worker_cost());
    const std::int64_t slack = line.line().sums().max_tile_cost + model.segment_units + 2 * plan.snap_units + 1;
    for (const Policy& policy : {Policy::data_parallel(), Policy::fixed_split()}) {
      ASSERT_EQ(items.fault(policy, grid), "");
      const std::int64_t other = most(items.worker_cost());
      const double given_up = plan.whole_outputs ? 1.0 + model.whole_percent / 100.0 : 100.0 / (100.0 - model.align_percent);
      const double limit = given_up * static_cast<double>(other) + static_cast<double>(slack);
      if (static_cast<double>(lean_cost) > limit) {
        ASSERT_LE(most(line.worker_tiles()), std::max(model.short_tiles, model.spare_tiles));
      }
      better += lean_cost < other ? 1 : 0;
    }
  }
  EXPECT_GT(better, full_or_reduced(800, 80));
}

TEST(SchedulePolicy, R04_OneWorkerOneTileAndMoreWorkersThanTiles) {
  for (std::int32_t grid = 1; grid <= 80; ++grid) {
    Checker one_tile(alike(1, 1, CostModel::plain()), Measure::kCost);
    ASSERT_EQ(one_tile.fault(Policy::lean(), grid), "");
    EXPECT_EQ(one_tile.plan(Policy::lean(), grid).workers, 1);
    Checker few(alike(3, 5, CostModel::plain()), Measure::kCost);
    ASSERT_EQ(few.fault(Policy::lean(), grid), "");
    EXPECT_EQ(few.plan(Policy::lean(), grid).workers, std::min(grid, 15));
  }
}

}  // namespace
}  // namespace lean::schedule
