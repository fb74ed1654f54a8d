// Schedules of many rows, by the cost model of the wide tile: every tile once, as all schedules, and workers that end together though
// their segments differ in number, which is what that tile's charge of a segment is for.
#include <gtest/gtest.h>

#include <algorithm>

#include "backends/cuda/kernel_rows.hpp"
#include "support/random.hpp"
#include "support/reduced.hpp"
#include "unit/schedule_checks.hpp"

namespace lean::schedule {
namespace {

using checks::Case;
using checks::Checker;
using support::full_or_reduced;
using support::Stream;

constexpr std::int32_t kWorkers = 132;

constexpr cuda::KernelConfig kWide =
    cuda::config_of(cuda::Architecture::kSm90, {DType::kBFloat16, 128}, 128, cuda::Scope::kWideTile);

/// Chunks of prompts, as a wide kernel sees them.
Case chunks_of(std::vector<SequenceWork> works, std::int32_t kv_heads, std::int32_t group, const CostModel& model) {
  return {.works = std::move(works),
          .shape = {.kv_heads = kv_heads,
                    .group = group,
                    .q_rows = kWide.q_rows,
                    .tile_tokens = kWide.tile_tokens,
                    .reach = {.right = 0}},
          .model = model};
}

TEST(ScheduleWide, R04_EveryTileOfManyRowsIsOwnedExactlyOnce) {
  Stream random(61);
  std::int64_t shared = 0;
  for (std::int32_t round = 0; round < full_or_reduced(400, 40); ++round) {
    std::vector<SequenceWork> works(static_cast<std::size_t>(random.between(1, 9)));
    for (SequenceWork& work : works) {
      work.q_tokens = static_cast<std::int32_t>(random.chance(30) ? random.between(0, 3) : random.between(1, 1500));
      work.kv_tokens = work.q_tokens + static_cast<std::int32_t>(random.chance(50) ? 0 : random.between(0, 20'000));
    }
    Case c = chunks_of(std::move(works), static_cast<std::int32_t>(random.between(1, 8)),
                       static_cast<std::int32_t>(random.one_of({1, 4, 7})), cuda::cost_model(kWide));
    if (random.chance(50)) c.shape.reach = checks::random_reach(random);
    Checker checker(std::move(c), Measure::kCost);
    for (const std::int32_t grid : {kWorkers, static_cast<std::int32_t>(random.between(1, 300))}) {
      ASSERT_EQ(checker.fault(Policy::lean(), grid), "");
      for (const auto& entry : checker.entries()) shared += entry.contributors > 1 ? 1 : 0;
    }
  }
  EXPECT_GT(shared, full_or_reduced(5000, 500));
}

/// How even the workers' times are, mean / longest, where a segment takes as long as 4.3 tiles: what was fitted to an H100's times
/// (bench/results/experiments/h100-wide-tile.jsonl).
double evenness(Case c) {
  constexpr double kSegmentTiles = 4.3;
  Checker checker(std::move(c), Measure::kCost);
  EXPECT_EQ(checker.fault(Policy::lean(), kWorkers), "");
  double sum = 0.0;
  double longest = 0.0;
  for (std::size_t worker = 0; worker < checker.worker_tiles().size(); ++worker) {
    const double tiles = static_cast<double>(checker.worker_tiles()[worker]) +
                         kSegmentTiles * static_cast<double>(checker.worker_segments()[worker]);
    sum += tiles;
    longest = std::max(longest, tiles);
  }
  return sum / kWorkers / longest;
}

TEST(ScheduleWide, WorkersOfCausalPromptsEndTogether) {
  CostModel half_a_tile = cuda::cost_model(kWide);
  half_a_tile.segment_units = half_a_tile.tile_units / 2;
  for (const std::int32_t tokens : {4096, 8192, 16384, 32768}) {
    for (const std::int32_t kv_heads : {8, 32}) {
      const auto prompt = [&](const CostModel& model) { return chunks_of({{tokens, tokens}}, kv_heads, 32 / kv_heads, model); };
      const double even = evenness(prompt(cuda::cost_model(kWide)));
      EXPECT_GT(even, 0.92) << tokens << " tokens, " << kv_heads << " heads";
      if (tokens > 8192) continue;  // of longer ones segments are few
      EXPECT_GT(even, evenness(prompt(half_a_tile)) + 0.05) << tokens << " tokens, " << kv_heads << " heads";
    }
  }
}

/// 64 row blocks of 511 to 512 tiles: 128 workers with half of one each, who begin at two places of each head and so read K and V
/// together; with 132, at as many places as workers.
TEST(ScheduleWide, RowBlocksOfAChunkAreCutAtTheSameTokens) {
  Checker checker(chunks_of({{256, 65'536}}, 8, 4, cuda::cost_model(kWide)), Measure::kCost);
  ASSERT_EQ(checker.fault(Policy::lean(), kWorkers), "");
  ASSERT_EQ(checker.plan(Policy::lean(), kWorkers).workers, 128);
  ASSERT_EQ(checker.entries().size(), 128U);
  for (const auto& entry : checker.entries()) {
    EXPECT_EQ(entry.contributors, 2);
    if (entry.tile_begin == 0) continue;
    EXPECT_NEAR(static_cast<double>(entry.tile_begin), 256.0, 2.0);
  }
}

/// Outputs that differ by more are cut as they come: a share each of 132.
TEST(ScheduleWide, OutputsThatAreNotAlikeTakeAllWorkers) {
  for (const std::int32_t shorter : {65'536, 64'000}) {
    Checker checker(chunks_of({{128, 65'536}, {128, shorter}}, 8, 4, cuda::cost_model(kWide)), Measure::kCost);
    ASSERT_EQ(checker.fault(Policy::lean(), kWorkers), "");
    EXPECT_EQ(checker.plan(Policy::lean(), kWorkers).workers, shorter == 65'536 ? 128 : kWorkers) << shorter;
  }
}

}  // namespace
}  // namespace lean::schedule
