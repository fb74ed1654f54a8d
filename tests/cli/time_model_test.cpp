// The time model: what follows from its coefficients alone, whatever they are fitted to.
#include <gtest/gtest.h>

#include <algorithm>

#include "cli/bad_argument.hpp"
#include "cli/time_coefficients.hpp"
#include "cli/time_model.hpp"

namespace lean::cli {
namespace {

constexpr GpuModel made_up() {
  GpuModel gpu;
  gpu.kernels = cuda::Architecture::kSm90;
  gpu.multiprocessors = 8;
  gpu.read_gbps = 1000.0;
  gpu.clock_mhz = 1980;
  return gpu;
}

constexpr GpuModel kGpu = made_up();

/// 100 GB/s a worker, 800 GB/s together, and nothing else takes time unless it is asked for.
constexpr TimeModel streaming(WalkTimes walk = {}) {
  constexpr StreamTimes worker{.worker_gbps = 100.0};
  return {.step = worker, .any_call = worker, .sm80 = worker, .flat = walk, .general = walk, .memory_share = 0.8};
}

/// One kv head of 128 dims in 16 bits: 512 bytes a token.
ProblemSpec one_head(std::vector<std::int32_t> kv_lens) {
  ProblemSpec spec{.kv_lens = std::move(kv_lens), .q_heads = 1, .kv_heads = 1};
  spec.layout = natural_layout(spec.kv_lens);
  return spec;
}

TEST(TimeModel, ALoneWorkerReadsAtItsOwnRate) {
  const Prediction alone = predict(kGpu, one_head({100'000}), Policy::data_parallel(), streaming());
  EXPECT_NEAR(alone.us, 512.0 * 100'000 / 100e3, 1e-6);
  EXPECT_NEAR(alone.occupancy, 1.0 / 8, 1e-12);
}

TEST(TimeModel, AllWorkersTogetherReadAtTheMemorysRate) {
  TimeModel fast = streaming();
  fast.step.worker_gbps = 1e6;
  const Prediction shared = predict(kGpu, one_head({128 * 800}), Policy::lean(), fast);
  EXPECT_NEAR(shared.us, 512.0 * 128 * 800 / 800e3, 1e-6);
  EXPECT_NEAR(shared.us, shared.read_us, 1e-6);
  EXPECT_NEAR(shared.occupancy, 1.0, 1e-9);
}

TEST(TimeModel, WhoIsLeftReadsFasterWhereTheMemoryWasTheLimit) {
  TimeModel model = streaming();
  model.any_call.worker_gbps = 400.0;  // two of them are what the memory gives
  const Prediction three = predict(kGpu, one_head({1'000, 1'000, 2'000}), Policy::data_parallel(), model);
  const double thousand = 512.0 * 1'000;
  EXPECT_NEAR(three.us, 3 * thousand / 800e3 + thousand / 400e3, 1e-6);  // a third of the memory each, then its own rate
  EXPECT_EQ(three.ends_us.size(), 3U);
}

TEST(TimeModel, TheLastContributorMergesAndNobodyElse) {
  const ProblemSpec spec = one_head({128 * 800});
  const double plain = predict(kGpu, spec, Policy::lean(), streaming()).us;
  const Prediction merged = predict(kGpu, spec, Policy::lean(), streaming({.merge_us = 5.0, .contributor_us = 0.5}));
  EXPECT_EQ(merged.map.max_contributors, 8);
  EXPECT_NEAR(merged.us, plain + 5.0 + 8 * 0.5, 1e-6);
  EXPECT_EQ(std::count_if(merged.ends_us.begin(), merged.ends_us.end(), [&](double end) { return end > plain + 1.0; }), 1);
}

TEST(TimeModel, SegmentsCostAllButTheFirst) {
  const ProblemSpec spec = one_head(std::vector<std::int32_t>(24, 1'000));
  const WalkTimes walk{.call_us = 7.0, .segment_us = 2.0};
  const double plain = predict(kGpu, spec, Policy::data_parallel(), streaming()).us;
  EXPECT_NEAR(predict(kGpu, spec, Policy::data_parallel(), streaming(walk)).us, plain + 7.0 + 2 * 2.0, 1e-6);
}

TEST(TimeModel, ASlowerClockStretchesWhatTheMemoryDoesNotBound) {
  GpuModel slow = kGpu;
  slow.clock_mhz = 990;
  const ProblemSpec spec = one_head({100'000});
  const TimeModel model = streaming({.call_us = 3.0});
  const double us = predict(kGpu, spec, Policy::data_parallel(), model).us;
  EXPECT_NEAR(predict(slow, spec, Policy::data_parallel(), model).us, 2 * us, 1e-6);
}

TEST(TimeModel, NothingIsFasterThanTheReadLimit) {
  for (const GpuModel& gpu : kGpuModels) {
    for (const Policy& policy : {Policy::lean(), Policy::fixed_split(0), Policy::data_parallel()}) {
      for (const auto& lens : {std::vector<std::int32_t>{1}, {131'072, 700, 0, 37}, std::vector<std::int32_t>(200, 301)}) {
        ProblemSpec spec{.kv_lens = lens};
        spec.layout = natural_layout(spec.kv_lens);
        const Prediction prediction = predict(gpu, spec, policy, kTimeModel);
        EXPECT_GE(prediction.us, prediction.read_us) << gpu.name;
        EXPECT_GT(prediction.occupancy, 0.0) << gpu.name;
        EXPECT_LE(prediction.occupancy, 1.0 + 1e-12) << gpu.name;
        EXPECT_TRUE(std::is_sorted(prediction.ends_us.begin(), prediction.ends_us.end()));
        EXPECT_EQ(static_cast<std::int32_t>(prediction.ends_us.size()), prediction.map.busy_workers) << gpu.name;
      }
    }
  }
}

TEST(TimeModel, TilesAreThoseOfTheGpusKernels) {
  const auto tokens = [](const GpuModel& gpu, std::int32_t group, std::int32_t head_dim, Policy::Kind policy) {
    ProblemSpec spec{.kv_lens = {1'000}, .q_heads = group, .kv_heads = 1, .head_dim = head_dim};
    return gpu_kernel(gpu, spec, policy).tile_tokens;
  };
  GpuModel ampere = kGpu;
  ampere.kernels = cuda::Architecture::kSm80;
  EXPECT_EQ(tokens(kGpu, 4, 64, Policy::Kind::kLean), 256);
  EXPECT_EQ(tokens(kGpu, 4, 64, Policy::Kind::kFixedSplit), 128);
  EXPECT_EQ(tokens(ampere, 4, 64, Policy::Kind::kLean), 128);
  EXPECT_EQ(tokens(kGpu, 32, 96, Policy::Kind::kLean), 128);
  EXPECT_EQ(tokens(kGpu, 128, 128, Policy::Kind::kLean), 64);
}

TEST(TimeModel, WhatItWasNotFittedOnIsRefused) {
  ProblemSpec spec = one_head({100});
  EXPECT_NO_THROW(require_simulated(spec));
  for (const auto& change : std::vector<void (*)(ProblemSpec&)>{
           [](ProblemSpec& s) { s.dtype = DType::kFloat32; }, [](ProblemSpec& s) { s.kv_dtype = DType::kFloat8E4M3; },
           [](ProblemSpec& s) { s.q_tokens = 2; }, [](ProblemSpec& s) { s.page_tokens = 16; },
           [](ProblemSpec& s) { s.window_left = 9; }, [](ProblemSpec& s) { s.softcap = 1.0F; },
           [](ProblemSpec& s) { s.head_dim = 100; }, [](ProblemSpec& s) { s.head_dim = 264; }}) {
    ProblemSpec changed = spec;
    change(changed);
    EXPECT_THROW(require_simulated(changed), BadArgument);
  }
}

}  // namespace
}  // namespace lean::cli
