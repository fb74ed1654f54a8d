// The schedule's first promise for batches that mix decode steps, drafts and prefill chunks, whose tiles cost more the more rows
// they carry: under every cost model that a backend computes with, every policy, and up to twice as many workers as tiles.
#include <gtest/gtest.h>

#include "backends/cpu/cpu_backend.hpp"
#include "support/reduced.hpp"
#include "unit/schedule_checks.hpp"

namespace lean::schedule {
namespace {

using checks::all_policies;
using checks::Case;
using checks::Checker;
using support::full_or_reduced;
using support::Stream;

/// Every policy for `grids` numbers of workers up to twice the tiles; returns how many plans share an output.
std::int64_t expect_sound(const Case& c, Stream& random, std::int32_t grids) {
  std::int64_t shared = 0;
  for (const Measure measure : {Measure::kCost, Measure::kOutputs}) {
    Checker checker(c, measure);
    const std::int64_t most = 2 * std::max<std::int64_t>(1, checker.line().sums().tiles);
    for (const Policy& policy : all_policies()) {
      if (measure_of(policy.kind) != measure) continue;
      for (std::int32_t i = 0; i < grids; ++i) {
        const auto grid = static_cast<std::int32_t>(i == 0 ? most : random.between(1, most));
        const std::string fault = checker.fault(policy, grid);
        EXPECT_EQ(fault, "");
        if (!fault.empty()) return shared;
        for (const auto& entry : checker.entries()) shared += entry.contributors > 1 ? 1 : 0;
      }
    }
  }
  return shared;
}

void expect_mixed_batches_sound(std::uint64_t seed, bool same_costs) {
  Stream random(seed);
  std::int64_t shared = 0;
  for (const CostModel& model : checks::every_model()) {
    for (std::int32_t round = 0; round < full_or_reduced(600, 60) && !testing::Test::HasFailure(); ++round)
      shared += expect_sound(checks::mixed_case(random, model, same_costs), random, 5);
  }
  EXPECT_GT(shared, full_or_reduced(200'000, 20'000));
}

TEST(Schedule, R04_EveryTileIsOwnedExactlyOnceWhereRowsDiffer) { expect_mixed_batches_sound(47, false); }

TEST(Schedule, R04_EveryTileIsOwnedExactlyOnceWhereOutputsCostTheSameAndTheirTilesDiffer) { expect_mixed_batches_sound(53, true); }

// 8 tiles of 8 rows cost as much as 2 of 32. A worker a tile would have been the right number of workers, but not of each output's.
TEST(Schedule, R04_OutputsThatCostTheSameGetNoMoreWorkersThanTiles) {
  const CostModel model = cpu::cost_model({});
  ASSERT_EQ(8 * model.tile_cost(8), 2 * model.tile_cost(32));
  Checker checker({.works = {{1, 8}, {4, 2}}, .shape = {.kv_heads = 1, .group = 8, .q_rows = 32, .tile_tokens = 1}, .model = model},
                  Measure::kCost);
  for (std::int32_t grid = 1; grid <= 20; ++grid) ASSERT_EQ(checker.fault(Policy::lean(), grid), "");
}

}  // namespace
}  // namespace lean::schedule
