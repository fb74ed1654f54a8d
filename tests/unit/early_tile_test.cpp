// The tiles that a worker of the CUDA backend reads before there is a plan: they exist, wherever rounding puts the place.
#include <gtest/gtest.h>

#include <random>
#include <set>
#include <tuple>

#include "backends/cuda/kernel/plan/early_tile.hpp"

namespace lean::cuda {
namespace {

constexpr std::int32_t kTile = 128;

TEST(EarlyTile, ItsTokensAreSeenAndTilesBeginWhereTheyDo) {
  std::mt19937 random(1);
  const auto up_to = [&](int most) { return static_cast<std::int32_t>(random() % static_cast<unsigned>(most)) + 1; };
  for (int round = 0; round < 2000; ++round) {
    const std::int32_t batch = round % 4 == 0 ? up_to(65536) : up_to(40);
    const std::int32_t kv_heads = up_to(48);
    const std::int32_t workers = up_to(1024);
    const AlikeShares shares = alike_shares(std::int64_t{batch} * kv_heads, kv_heads, workers);
    for (std::int32_t worker = 0; worker < workers; ++worker) {
      const EarlyPlace place = early_place(shares, worker, batch, kv_heads);
      ASSERT_TRUE(place.sequence >= 0 && place.sequence < batch) << place.sequence << " of " << batch;
      ASSERT_TRUE(place.kv_head >= 0 && place.kv_head < kv_heads) << place.kv_head << " of " << kv_heads;
      ASSERT_TRUE(place.part >= 0.0F && place.part < 1.0F) << place.part;
      const std::int32_t first_token = up_to(1000) - 1;
      const std::int32_t begin = first_token + up_to(5000) - 1;
      const KeySpan seen{begin, begin + up_to(round % 2 == 0 ? 300 : 1 << 24)};
      const KeySpan tokens = early_tokens(shares, place, seen, first_token, kTile);
      ASSERT_TRUE(seen.begin <= tokens.begin && tokens.begin < tokens.end && tokens.end <= seen.end)
          << seen.begin << " " << tokens.begin << " " << tokens.end << " " << seen.end;
      ASSERT_LE(tokens.end - tokens.begin, 2 * kTile);
      ASSERT_TRUE(tokens.begin == seen.begin || (tokens.begin - first_token) % kTile == 0) << tokens.begin << " " << first_token;
    }
  }
}

TEST(EarlyTile, WorkersOfLongEqualSequencesReadDifferentTiles) {
  constexpr std::int32_t kTokens = 16384;
  for (const auto& [batch, kv_heads, workers] : {std::tuple{1, 8, 132}, {8, 8, 132}, {4, 32, 132}, {27, 10, 114}, {64, 8, 132}}) {
    const AlikeShares shares = alike_shares(std::int64_t{batch} * kv_heads, kv_heads, workers);
    std::set<std::tuple<int, int, int>> tiles;
    for (std::int32_t worker = 0; worker < workers; ++worker) {
      const EarlyPlace place = early_place(shares, worker, batch, kv_heads);
      tiles.emplace(place.sequence, place.kv_head, early_tokens(shares, place, {0, kTokens}, 0, kTile).begin);
    }
    EXPECT_EQ(tiles.size(), static_cast<std::size_t>(workers)) << batch << " " << kv_heads;
  }
}

TEST(EarlyTile, LongSharesFetchTwo) {
  const auto tokens_of = [](std::int64_t outputs, std::int32_t tokens) {
    const KeySpan early = early_tokens(alike_shares(outputs, 8, 132), {}, {0, tokens}, 0, kTile);
    return early.end - early.begin;
  };
  EXPECT_EQ(tokens_of(8, 8192), kTile);       // 1 x 8k: shares of four tiles
  EXPECT_EQ(tokens_of(8, 16384), 2 * kTile);  // of eight
  EXPECT_EQ(tokens_of(8, 100), 100);
  EXPECT_EQ(tokens_of(1024, 200), 200);
}

}  // namespace
}  // namespace lean::cuda
