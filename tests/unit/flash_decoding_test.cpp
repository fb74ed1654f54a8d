// FlashDecoding's number of splits against FlashAttention-2's own num_splits_heuristic, written out in floating point.
#include "schedule/flash_decoding.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "support/reduced.hpp"

namespace lean::schedule {
namespace {

int divide_up(int a, int b) { return (a + b - 1) / b; }

bool shorter_than_with_one_less(int blocks, int splits) {
  return splits == 1 || divide_up(blocks, splits) != divide_up(blocks, splits - 1);
}

/// num_splits_heuristic (FlashAttention-2, csrc/flash_attn/flash_api.cpp) in double. A split count that reaches exactly 85 %
/// counts as reaching it, whichever way the quotient was rounded.
int heuristic(int outputs, int workers, int blocks) {
  if (outputs >= 0.8 * workers) return 1;
  const int most_splits = std::min({128, workers, blocks});
  std::vector<double> efficiency;
  double best = 0.0;
  for (int splits = 1; splits <= most_splits; ++splits) {
    const double waves = static_cast<double>(outputs) * splits / workers;
    efficiency.push_back(shorter_than_with_one_less(blocks, splits) ? waves / std::ceil(waves) : 0.0);
    best = std::max(best, efficiency.back());
  }
  for (int splits = 1; splits <= most_splits; ++splits) {
    if (!shorter_than_with_one_less(blocks, splits)) continue;
    if (efficiency[static_cast<std::size_t>(splits - 1)] >= 0.85 * best * (1.0 - 1e-12)) return splits;
  }
  return 1;
}

TEST(FlashDecoding, SplitsAreThoseOfFlashAttention2) {
  std::int64_t split = 0;
  for (int workers = 1; workers <= 300; workers += support::full_or_reduced(1, 7)) {
    for (int outputs = 1; outputs <= workers + 3; ++outputs) {
      for (const int tiles : {1, 2, 3, 5, 7, 8, 13, 16, 31, 32, 64, 65, 100, 127, 128, 129, 255, 256, 1000, 8191}) {
        const std::int32_t splits = flash_decoding_splits(outputs, tiles, workers);
        ASSERT_EQ(splits, heuristic(outputs, workers, tiles))
            << outputs << " outputs of " << tiles << " tiles, " << workers << " workers";
        split += splits > 1 ? 1 : 0;
      }
    }
  }
  EXPECT_GT(split, 10'000);
}

TEST(FlashDecoding, NoSplitOnce80PercentOfTheWorkersHaveAnOutput) {
  EXPECT_EQ(flash_decoding_splits(212, 1000, 264), 1);
  EXPECT_GT(flash_decoding_splits(211, 1000, 264), 1);
  EXPECT_EQ(flash_decoding_splits(4, 1000, 5), 1);
  EXPECT_GT(flash_decoding_splits(3, 1000, 5), 1);
  EXPECT_EQ(flash_decoding_splits(0, 1000, 132), 1);
}

TEST(FlashDecoding, ASplitCountAtExactly85PercentOfTheBestIsTaken) {
  EXPECT_EQ(flash_decoding_splits(1, 100, 20), 17);   // 17 of 20 workers, against 20 of 20
  EXPECT_EQ(flash_decoding_splits(17, 1000, 30), 3);  // 51 items in 2 waves of 30
}

TEST(FlashDecoding, R20_NoProductWrapsForTheLargestWorkerCount) {
  constexpr std::int32_t kWorkers = 2'147'483'647;
  EXPECT_EQ(flash_decoding_splits(INT64_C(2'147'483'647) * 1000, 1 << 30, kWorkers), 1);
  EXPECT_EQ(flash_decoding_splits(1, 1 << 30, kWorkers), 109);  // 109 >= 85 % of 128
  const std::int64_t third = kWorkers / 3;                      // 3 splits fill one wave
  EXPECT_EQ(flash_decoding_splits(third, 1 << 30, kWorkers), 3);
}

}  // namespace
}  // namespace lean::schedule
