// Which calls the plain kernel serves, and how it is launched: by its dims or by how its rows lie, each alone.
#include <gtest/gtest.h>

#include <cstddef>
#include <functional>
#include <utility>
#include <vector>

#include "api/backends.hpp"
#include "backends/cuda/plain.hpp"
#include "cuda_host/calls.hpp"
#include "cuda_host/fake_runtime.hpp"
#include "lean/lean.hpp"

namespace lean::cuda_host {
namespace {

using Change = std::function<void(Problem&)>;

const void* moved(const void* data, std::ptrdiff_t bytes) { return static_cast<const std::byte*>(data) + bytes; }

/// Of a call that has variants of its own: what takes them from it.
std::vector<std::pair<const char*, Change>> plain_calls() {
  return {{"d 59", [](Problem& p) { p.head_dim = 59; }},
          {"d 111", [](Problem& p) { p.head_dim = 111; }},
          {"d 512", [](Problem& p) { p.head_dim = 512; }},
          {"d 576, dv 512", [](Problem& p) { p.head_dim = 576, p.value_dim = 512; }},
          {"d 192, dv 124", [](Problem& p) { p.head_dim = 192, p.value_dim = 124; }},
          {"dv 264", [](Problem& p) { p.value_dim = 264; }},
          {"dims of q apart", [](Problem& p) { p.q.strides.dim = 2; }},
          {"dims of k apart", [](Problem& p) { p.k.strides.dim = 2; }},
          {"dims of v backwards", [](Problem& p) { p.v.strides.dim = -1; }},
          {"dims of o apart", [](Problem& p) { p.o.strides.dim = 2; }},
          {"q at 2 bytes", [](Problem& p) { p.q.data = moved(p.q.data, 2); }},
          {"k at 8 bytes", [](Problem& p) { p.k.data = moved(p.k.data, 8); }},
          {"rows of v at 8 bytes", [](Problem& p) { p.v.strides.token += 4; }},
          {"heads of k at 2 bytes", [](Problem& p) { p.k.strides.head += 1; }}};
}

/// The launches of a call that is served.
std::vector<Call> launches_of(const Asked& asked) {
  const Workspace workspace = workspace_for(asked);
  runtime().begin();
  const Status status = decode(asked.problem, asked.options, workspace);
  EXPECT_TRUE(status.ok()) << asked.name << ": " << status.message;
  return runtime().launches();
}

TEST(CudaHost, R06_ThePlainKernelServesWhatNoVariantDoes) {
  for (const FakeDevice& device : kDevices) {
    to_a_new_device(device);
    for (const auto& [name, change] : plain_calls()) {
      Asked asked{name, problem_of({.batch = 3}), cuda_options()};
      change(asked.problem);
      lay_out_outputs(asked.problem);
      const std::vector<Call> launches = launches_of(asked);
      ASSERT_EQ(launches.size(), 1U) << name;
      EXPECT_TRUE(launches[0].plain()) << name << ": " << launches[0].kernel;
      EXPECT_EQ(launches[0].grid, 3U * 2U) << name;
      EXPECT_EQ(launches[0].shared_bytes, 0U) << name;
    }
  }
}

/// Whatever the options ask of the schedule, it is one launch a call, or one each for long and for short queries.
TEST(CudaHost, R01_ThePlainKernelIsOneLaunchHoweverWorkIsSharedOut) {
  to_a_new_device();
  for (const Policy& policy : {Policy::lean(), Policy::fixed_split(7), Policy::data_parallel(), Policy::fixed_chunk()}) {
    for (const Fixup fixup : {Fixup::kLastArriver, Fixup::kTwoKernels, Fixup::kHostBlock}) {
      if (fixup == Fixup::kHostBlock && policy.kind == Policy::Kind::kFixedSplit) continue;
      Asked asked{"d 59", problem_of({.head_dim = 59}), cuda_options()};
      asked.options.policy = policy;
      asked.options.fixup = fixup;
      const std::vector<Call> launches = launches_of(asked);
      ASSERT_EQ(launches.size(), 1U);
      EXPECT_TRUE(launches[0].plain());
      EXPECT_FALSE(launches[0].cooperative);
      EXPECT_EQ(launches[0].dependent, fixup != Fixup::kHostBlock);
    }
  }
  Asked ordered{"stream order", problem_of({.head_dim = 59}), cuda_options()};
  ordered.options.dependent_launch = false;
  EXPECT_FALSE(launches_of(ordered)[0].dependent);
}

/// New tokens of any dims come first, and the plain kernel follows the kernel that writes them.
TEST(CudaHost, R28_ThePlainKernelFollowsTheKernelThatAppends) {
  to_a_new_device();
  Asked asked{"new tokens", problem_of({.head_dim = 59}), cuda_options()};
  Problem& p = asked.problem;
  p.append.k = {.data = address(8), .dtype = p.q.dtype, .strides = {.sequence = 118, .head = 59, .token = 118}};
  p.append.v = p.append.k;
  p.append.v.data = address(9);
  const std::vector<Call> launches = launches_of(asked);
  ASSERT_EQ(launches.size(), 2U);
  EXPECT_NE(launches[0].kernel.find("append_kernel"), std::string_view::npos);
  EXPECT_TRUE(launches[1].plain());
  EXPECT_TRUE(launches[1].dependent);
  p.append.cached_lengths = static_cast<const std::int32_t*>(address(14));
  const std::vector<Call> counted = launches_of(asked);
  ASSERT_EQ(counted.size(), 2U);
  EXPECT_TRUE(counted[1].dependent);  // both count from cached_lengths, and nobody reads the lengths that the kernel ahead writes
  p.append.rotary_cos = static_cast<const float*>(address(10));
  p.append.rotary_sin = static_cast<const float*>(address(11));
  p.append.rotary_dim = 32;
  EXPECT_TRUE(supports(p, asked.options).ok());
  p.value_dim = 40;  // turned queries do not fit into rows of o
  EXPECT_NE(std::string_view(supports(p, asked.options).message).find("append.rotary_dim"), std::string_view::npos);
}

/// R17: a workspace that was asked for while rows lay otherwise is enough, both ways.
TEST(CudaHost, R17_WhereRowsLieDoesNotChangeTheWorkspace) {
  to_a_new_device();
  for (const bool packed : {false, true}) {
    const auto size_of = [&](const Change& change) {
      Problem p = problem_of({.batch = 3});
      p.q_tokens = packed ? 100 : 1;
      if (packed) p.total_q_tokens = 150, p.cu_q_tokens = static_cast<const std::int32_t*>(address(7));
      if (change) change(p);
      const WorkspaceSize size = workspace_size(p, cuda_options());
      EXPECT_TRUE(size.status.ok()) << size.status.message;
      return std::pair{size.state_bytes, size.scratch_bytes};
    };
    EXPECT_EQ(size_of(nullptr), size_of([](Problem& p) { p.k.data = moved(p.k.data, 2); }));
    EXPECT_EQ(size_of(nullptr), size_of([](Problem& p) { p.q.strides.dim = 2; }));
    EXPECT_LT(size_of([](Problem& p) { p.head_dim = 59; }).second, size_of(nullptr).second);
  }
}

/// What explains a schedule sees whole outputs, and whoever checks a result that products are fp32.
TEST(CudaHost, R06_ThePlainKernelsTilesAreWholeOutputs) {
  to_a_new_device();
  const tile::TileConfig config =
      backend_of(Backend::kCuda)->tiling_of(problem_of({.head_dim = 59, .capacity = 5000}), cuda_options()).config;
  EXPECT_TRUE(cuda::is_plain(config));
  EXPECT_EQ(config.tile_tokens, 5000);
  EXPECT_FALSE(cuda::is_plain(backend_of(Backend::kCuda)->tiling_of(problem_of({}), cuda_options()).config));
}

}  // namespace
}  // namespace lean::cuda_host
