// Which line a launch walks: chosen from a call's sizes, never from its lengths.
#include <gtest/gtest.h>

#include <cstdint>

#include "backends/cuda/call_plan.hpp"
#include "backends/cuda/device.hpp"
#include "backends/cuda/kernel_table.hpp"
#include "cuda_host/calls.hpp"
#include "cuda_host/fake_runtime.hpp"
#include "lean/lean.hpp"
#include "schedule/stair_line.hpp"

namespace lean::cuda_host {
namespace {

/// Calls of many rows walk a stair line in 32 bits, up to the largest capacity that they hold; what is no stair keeps the general one.
TEST(CudaHost, R20_CallsOfManyRowsWalkIn32BitsWhereTheyFit) {
  to_a_new_device();
  if (cuda::wide_kernels_for(DType::kBFloat16, 128).empty()) GTEST_SKIP() << "built without LEAN_CUDA_WIDE";
  const auto chunk = [](std::int32_t capacity) {
    Problem problem = problem_of({.q_heads = 32, .kv_heads = 8, .capacity = capacity});
    problem.q_tokens = 1024;
    problem.scores.causal = true;
    return problem;
  };
  cuda::Device device;
  ASSERT_TRUE(cuda::current_device(device).ok());
  const auto launch_of = [&](const Problem& problem, const Options& options = cuda_options()) {
    const cuda::CallPlan plan = cuda::plan_call(problem, options, device);
    EXPECT_EQ(plan.begin()->kernel->config.scope, cuda::Scope::kWideTile);
    return *plan.begin();
  };
  const cuda::LaunchPlan short_one = launch_of(chunk(8192));
  EXPECT_TRUE(short_one.flat && short_one.short_line);
  EXPECT_EQ(short_one.stair_step.width.value(), 4);
  const auto explained = [&](const Problem& problem) { return cuda::plan_call(problem, cuda_options(), device).tiling().stair; };
  EXPECT_TRUE(explained(chunk(8192)));
  Problem many = chunk(8192);
  many.batch = 33;
  EXPECT_TRUE(launch_of(many).flat && !launch_of(many).short_line);
  Problem packed = many;  // so many queries together, not in each sequence
  packed.batch = 4096, packed.total_q_tokens = 8192, packed.kv_capacity = 131'072;
  EXPECT_FALSE(launch_of(packed).flat);
  packed.cu_q_tokens = static_cast<const std::int32_t*>(address(7));
  EXPECT_TRUE(launch_of(packed).flat);
  Problem windowed = chunk(8192);
  windowed.scores.window_left = 300;
  EXPECT_FALSE(launch_of(windowed).flat);
  EXPECT_FALSE(explained(windowed));
  Options split = cuda_options();
  split.policy = Policy::fixed_split(4);
  EXPECT_FALSE(launch_of(chunk(8192), split).flat);
  std::int32_t fits = 8192;
  EXPECT_FALSE(launch_of(chunk(1 << 25)).flat);
  for (std::int32_t beyond = 1 << 25; beyond - fits > 1;) {
    const std::int32_t middle = fits + (beyond - fits) / 2;
    (launch_of(chunk(middle)).flat ? fits : beyond) = middle;
  }
  const auto is_stair = [&](std::int32_t capacity) {
    return schedule::is_stair(short_one.line, cuda::cost_model(short_one.kernel->config), 8 * 32, 1024, capacity,
                              device.multiprocessors);
  };
  EXPECT_GT(fits, 1'000'000);
  EXPECT_TRUE(is_stair(fits) && !is_stair(fits + 1));
}

}  // namespace
}  // namespace lean::cuda_host
