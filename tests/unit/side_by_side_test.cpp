// SideBySide: how the workers are shared out between chunks and few rows.
#include "schedule/side_by_side.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <iterator>
#include <vector>

#include "backends/cuda/device.hpp"
#include "backends/cuda/kernel_rows.hpp"
#include "backends/cuda/side_times.hpp"

namespace lean::schedule {
namespace {

constexpr std::int32_t kGroup = 4;
constexpr std::int32_t kHeads = 8;
constexpr Reach kCausal{.right = 0};

/// What calls of bf16 and 128 dims are told, on so many workers and an H100's memory.
SideBySide sides_of(std::int32_t workers) {
  constexpr cuda::KernelFamily kFamily{DType::kBFloat16, 128};
  constexpr cuda::KernelConfig kChunks = config_of(cuda::Architecture::kSm90, kFamily, 128, cuda::Scope::kWideTile);
  constexpr cuda::KernelConfig kSteps = config_of(cuda::Architecture::kSm90, kFamily, 16, cuda::Scope::kBesideStep);
  static_assert(kChunks.may_run_beside() && kSteps.may_run_beside());
  const cuda::Device h100{.multiprocessors = 132, .memory_share = 25'396};  // 2 x 2,619 MHz x 5,120 bits, for each multiprocessor
  return cuda::side_by_side(kChunks, kSteps, 4, workers, h100.memory_rate());
}

SideSums sums_of(const SideBySide& sides, const std::vector<SequenceWork>& batch, Reach reach = kCausal) {
  SideSums sums;
  for (const SequenceWork& work : batch) sums = sums.plus(sides.sums_of(work, kGroup, reach));
  return sums.times(kHeads);
}

SideWorkers shares(const SideBySide& sides, const std::vector<SequenceWork>& batch, Reach reach = kCausal) {
  return sides.shares(sums_of(sides, batch, reach));
}

/// A chunk of `rows` query tokens and so many steps.
std::vector<SequenceWork> mix(SequenceWork chunk, int steps, SequenceWork step) {
  std::vector<SequenceWork> batch(static_cast<std::size_t>(steps), step);
  batch.push_back(chunk);
  return batch;
}

TEST(SideBySide, ALaunchWithNothingToDoHasNoWorkers) {
  const SideBySide sides = sides_of(132);
  for (const auto& steps : std::vector<std::vector<SequenceWork>>{{}, {{0, 4096}, {0, 0}}, {{1, 4096}, {4, 1}}}) {
    EXPECT_EQ(shares(sides, steps).chunks, 0);
    EXPECT_EQ(shares(sides, steps).steps, 132);
  }
  for (const auto& chunks : std::vector<std::vector<SequenceWork>>{{{512, 4096}, {5, 5}}, {{512, 4096}, {0, 4096}}}) {
    EXPECT_EQ(shares(sides, chunks).chunks, 132);
    EXPECT_EQ(shares(sides, chunks).steps, 0);
  }
}

TEST(SideBySide, WhoeverHasAnythingToDoHasAWorker) {
  for (const std::int32_t workers : {2, 3, 33, 132, 1024}) {
    const SideBySide sides = sides_of(workers);
    for (const auto& batch : {mix({5, 5}, 2, {1, 1 << 20}), mix({1 << 14, 1 << 20}, 1, {1, 1}), mix({5, 0}, 1, {1, 0}),
                              mix({512, 4096}, 60, {1, 8192}), mix({256, 1 << 16}, 16, {1, 1 << 14})}) {
      const SideWorkers found = shares(sides, batch);
      EXPECT_GE(found.chunks, 1);
      EXPECT_GE(found.steps, 1);
      EXPECT_LE(found.chunks, workers);
      EXPECT_TRUE(found.chunks + found.steps == workers || (found.chunks == workers && found.steps == workers)) << workers;
    }
  }
}

/// The first looks lie evenly from 1 to all; the next are at the 32 neighbours of one, and none at a number that there is not. Of up to
/// 32 workers that is every number. Of more, those between two of the first are looked at near the best alone.
TEST(SideBySide, LooksLieEvenlyThenNearTheBest) {
  for (const std::int32_t workers : {2, 3, 31, 32, 33, 132, 148, 1024}) {
    const SideBySide sides = sides_of(workers);
    EXPECT_EQ(sides.even_look(0), 1);
    EXPECT_EQ(sides.even_look(SideBySide::kLooks - 1), workers);
    for (std::int32_t look = 1; look < SideBySide::kLooks; ++look) {
      EXPECT_LE(sides.even_look(look) - sides.even_look(look - 1), max_of(1, (workers + 30) / 31));
      for (const std::int32_t best : {1, workers / 2 + 1, workers}) {
        EXPECT_EQ(sides.near_look(look, best), clamp_to(best - 16 + look, 1, workers)) << look;
      }
    }
  }
}

/// The more there is of the one, the more workers it has; and for these batches no other number is better.
TEST(SideBySide, SharesFollowTheWork) {
  const SideBySide sides = sides_of(132);
  std::int32_t most = 132;
  for (int steps = 1; steps <= 256; steps *= 2) {
    const SideSums sums = sums_of(sides, mix({512, 4096}, steps, {1, 8192}));
    const SideWorkers found = sides.shares(sums);
    EXPECT_LE(found.chunks, most) << steps;
    most = found.chunks;
    for (std::int32_t other = 1; other <= 132; ++other) {
      EXPECT_LE(sides.choice_of(sums, found.chunks).time, sides.choice_of(sums, other).time) << steps << ", " << other;
    }
  }
  EXPECT_LE(most, 20);
  EXPECT_GE(shares(sides, mix({4096, 16384}, 30, {1, 4096})).chunks, 110);
}

/// As measured on an H100 (docs/notebook/chunks-prefill-append.md): 64 row blocks of 64k have 96 or 99 workers, three parts each and two
/// of these a worker, so that K and V are read once: 632 us in one call, 627 with 99 by two calls on two streams. Cut anywhere by 102
/// they took 1,140: those are level now, and no more than some 105 are.
TEST(SideBySide, LongKeysAreNotCutAnywhere) {
  const SideBySide sides = sides_of(132);
  const SideSums sums = sums_of(sides, mix({256, 1 << 16}, 16, {1, 1 << 14}));
  EXPECT_GT(sides.cubed_time(sums, 110), 2 * sides.cubed_time(sums, 99));
  const SideWorkers found = sides.shares(sums);
  EXPECT_GE(found.chunks, 96);
  EXPECT_LE(found.chunks, 99);
}

/// Times of one call measured on an H100 (us), its launches one after the other and beside each other: by the best of the numbers of
/// workers that were tried, in the last row, where those were none of the good ones, by the chosen (h100-side-by-side.jsonl). Furthest
/// off are 1 x 2048 beside 32, 12 % too short.
TEST(SideBySide, TimesAreThoseMeasured) {
  const SideBySide sides = sides_of(132);
  struct Measured {
    std::vector<SequenceWork> batch;
    float in_turn;
    float beside;
  };
  const auto many = [](int count, SequenceWork chunk, int steps, SequenceWork step) {
    std::vector<SequenceWork> batch = mix(chunk, steps, step);
    batch.insert(batch.end(), static_cast<std::size_t>(count - 1), chunk);
    return batch;
  };
  for (const Measured& call : {Measured{many(1, {512, 4096}, 63, {1, 8192}), 781.1F, 755.8F},
                               {many(4, {512, 4096}, 60, {1, 8192}), 907.4F, 762.1F},
                               {many(8, {256, 2048}, 56, {1, 2048}), 318.9F, 261.1F},
                               {many(1, {2048, 2048}, 32, {1, 4096}), 283.8F, 237.8F},
                               {many(2, {2048, 16384}, 30, {1, 4096}), 1666.1F, 1525.0F},
                               {many(1, {256, 65536}, 16, {1, 16384}), 781.8F, 632.4F}}) {
    const SideSums sums = sums_of(sides, call.batch);
    EXPECT_NEAR(sides.time_in_turn(sums), call.in_turn, call.in_turn / 8);
    const float best = std::cbrt(sides.cubed_time(sums, sides.shares(sums).chunks));
    EXPECT_NEAR(best, call.beside, call.beside / 8);
  }
}

TEST(SideBySide, AWindowBoundsWhatEitherSees) {
  const SideBySide sides = sides_of(132);
  const Reach windowed{.left = 1023, .right = 0};
  EXPECT_EQ(sums_of(sides, {{1, 1 << 20}}, windowed).step_tokens, kHeads * 1024.0F);
  EXPECT_EQ(sums_of(sides, {{512, 1 << 20}}, windowed).block_tokens, kHeads * 16 * 1024.0F);
  EXPECT_EQ(sums_of(sides, {{512, 1 << 20}}, windowed).chunk_keys, kHeads * (1023.0F + 512.0F));
  EXPECT_EQ(sums_of(sides, {{512, 4096}}, Reach{}).block_tokens, kHeads * 16 * 4096.0F);
  EXPECT_EQ(sums_of(sides, {{512, 4096}}).block_tokens, kHeads * 16 * 3841.0F);
}

/// Of every variant that runs beside another a tile of 64 KB, or of 128 x 128 x 128 products, takes the same.
TEST(SideBySide, VariantsKnowWhatABlockTakes) {
  std::size_t wide = 0;
  std::size_t steps = 0;
  const auto look_at = [&](const cuda::ArchitectureRows& table) {
    for (const cuda::KernelRow& row : table) {
      const cuda::KernelConfig config =
          config_of(table.architecture, row, row.kv_bytes == 1 ? DType::kFloat8E4M3 : DType::kFloat16);
      if (!config.may_run_beside()) continue;
      ++(config.wide() ? wide : steps);
      const float kilobytes = static_cast<float>(2 * row.head_dim * row.kv_bytes) / 1024;
      const float expected = config.wide() ? 1.52F * static_cast<float>(row.head_dim) / (128 * 128) : 0.99F * kilobytes / 64;
      EXPECT_NEAR(cuda::block_time(config).token, expected, expected / 50) << row.head_dim;
    }
  };
  for (const cuda::ArchitectureRows& table : cuda::kKernelRows) look_at(table);
  look_at(cuda::kWideRows);
  EXPECT_GT(wide, 2U);
  EXPECT_EQ(steps, std::size(cuda::kHeadDims));  // of the 16 rows that few are packed to
}

}  // namespace
}  // namespace lean::schedule
