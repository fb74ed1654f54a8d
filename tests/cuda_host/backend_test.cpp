// The CUDA backend's host code on a fake runtime: what it asks of a device, in which order, and what becomes of a call when one of
// these fails. No GPU, and none is missed: kernels are chosen and launched, and do nothing.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <initializer_list>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "backends/cuda/call_plan.hpp"
#include "backends/cuda/device.hpp"
#include "backends/cuda/kernel_table.hpp"
#include "cuda_host/calls.hpp"
#include "cuda_host/fake_runtime.hpp"
#include "fixup/workspace.hpp"
#include "lean/lean.hpp"
#include "lean/limits.hpp"
#include "schedule/line_shape.hpp"
#include "schedule/plan.hpp"
#include "schedule/work_line.hpp"
#include "support/random.hpp"

namespace lean::cuda_host {
namespace {

/// R47: the device that is current computes, with as many workers as it has multiprocessors.
TEST(CudaHost, R47_TheCurrentDeviceIsTheOneThatComputes) {
  const Asked asked{"a decode step", problem_of({}), cuda_options()};
  std::vector<std::pair<int, unsigned>> devices;
  for (const int multiprocessors : {132, 78, 114}) {
    to_a_new_device({.multiprocessors = multiprocessors});
    devices.emplace_back(runtime().ordinal, multiprocessors);
    const Workspace workspace = workspace_for(asked);
    EXPECT_TRUE(decode(asked.problem, asked.options, workspace).ok());
  }
  for (const auto& [ordinal, multiprocessors] : devices) {  // and back: what is known of one is not taken for another
    runtime().begin();
    runtime().ordinal = ordinal;
    const Workspace workspace = workspace_for(asked);
    ASSERT_TRUE(decode(asked.problem, asked.options, workspace).ok());
    EXPECT_EQ(runtime().launches().back().grid, multiprocessors);
  }
}

/// A decode step has no more CTAs than its longest outputs have tiles, and of more outputs than multiprocessors up to two on each; an
/// explicit number is what was asked for.
TEST(CudaHost, R47_ADecodeStepHasNoMoreWorkersThanTiles) {
  to_a_new_device({.multiprocessors = 132});
  struct Row {
    std::int64_t batch;
    std::int32_t kv_heads, capacity, workers;
    unsigned grid;
  };
  for (const Row& row : {Row{1, 8, 1024, 0, 64},
                         {1, 8, 1025, 0, 72},
                         {1, 1, 4000, 0, 32},
                         {5, 8, 100, 0, 40},
                         {5, 8, 200, 0, 80},
                         {5, 8, 256, 0, 80},
                         {1, 8, 257, 0, 24},
                         {5, 8, 257, 0, 120},
                         {1, 1, 1, 0, 1},
                         {1, 8, 4096, 0, 132},
                         {20, 8, 64, 0, 160},
                         {20, 8, 65, 0, 264},
                         {50, 8, 100, 0, 264},
                         {50, 8, 100, 132, 132},
                         {1, 8, 1024, 132, 132},
                         {1, 8, 1024, 200, 200}}) {
    Asked asked{"",
                problem_of({.batch = row.batch, .q_heads = 4 * row.kv_heads, .kv_heads = row.kv_heads, .capacity = row.capacity}),
                cuda_options()};
    asked.options.workers = row.workers;
    const Workspace workspace = workspace_for(asked);
    runtime().begin();
    ASSERT_TRUE(decode(asked.problem, asked.options, workspace).ok());
    EXPECT_EQ(runtime().launches().back().grid, row.grid) << row.batch << " x " << row.capacity << ", " << row.kv_heads << " heads";
  }
}

/// Whole outputs leave a quarter of the workers idle where the others read nearly as fast as all: not with an H200's memory.
TEST(CudaHost, R04_AQuarterOfTheWorkersIsSparedByTheMemoryThatTheDeviceHas) {
  // Of 16 query heads for each K/V head: with fewer there are two workers on a multiprocessor.
  const Asked asked{"50 x 500", problem_of({.batch = 50, .q_heads = 128, .kv_heads = 8, .capacity = 500}), cuda_options()};
  const auto workers_of = [&](const FakeDevice& device) {
    to_a_new_device(device);
    cuda::Device found;
    EXPECT_TRUE(cuda::current_device(found).ok());
    const tile::Tiling tiling = cuda::plan_call(asked.problem, asked.options, found).tiling();
    const std::vector<schedule::SequenceWork> works(50, {.q_tokens = 1, .kv_tokens = 500});
    const schedule::LineShape shape = schedule::line_shape_of(asked.problem, tiling.config.q_rows, tiling.config.tile_tokens);
    schedule::LineSums sums;
    for (const schedule::SequenceWork& work : works) {
      const std::int32_t tiles = shape.tiles_of(work, 0).count;
      const std::int64_t cost = tiling.cost_model.segment_units + std::int64_t{tiles} * tiling.cost_model.tile_units;
      sums = sums.plus({.cost = 8 * cost,
                        .tiles = 8 * std::int64_t{tiles},
                        .outputs = 8,
                        .max_output_tiles = tiles,
                        .max_tile_cost = tiling.cost_model.tile_units,
                        .min_output_cost = cost,
                        .max_output_cost = cost});
    }
    return schedule::make_plan(sums, Policy::lean(), tiling.cost_model, tiling.config.tile_tokens, tiling.workers).workers;
  };
  EXPECT_EQ(workers_of({}), 100);
  EXPECT_EQ(workers_of({.memory_khz = 3'201'000, .memory_bits = 6144}), 132);
  EXPECT_EQ(workers_of({.memory_khz = 0, .memory_bits = 0}), 100) << "unknown";
  EXPECT_EQ(workers_of({.memory_khz = -1, .memory_bits = -1}), 100) << "nor does a driver that does not know refuse a call";
}

/// R32: whichever call of the runtime fails, the caller is told which, nothing is launched after it, and the next call is as if
/// nothing had been. A tensor map that cannot be made is no failure: threads copy then.
TEST(CudaHost, R32_EachCallThatFailsIsToldAndTheNextOneWorks) {
  int failures = 0;
  for (const Asked& asked : asked_calls()) {
    to_a_new_device();
    const Workspace workspace = workspace_for(asked);
    std::vector<Call> launches;
    for (int at = 0;; ++at) {
      to_a_new_device();
      runtime().fails_at = at;
      const Status failed = decode(asked.problem, asked.options, workspace);
      const std::vector<Call> calls = runtime().calls;
      if (static_cast<int>(calls.size()) <= at) {  // each has failed once
        EXPECT_TRUE(failed.ok()) << asked.name << ": " << failed.message;
        EXPECT_EQ(runtime().launches(), launches) << asked.name;
        break;
      }
      const std::string_view broken = calls[static_cast<std::size_t>(at)].name;
      if (broken == "cudaGetDriverEntryPointByVersion") {
        EXPECT_TRUE(failed.ok()) << asked.name << ": " << failed.message;
      } else {
        EXPECT_FALSE(failed.ok()) << asked.name << ": " << broken;
        EXPECT_NE(std::strstr(failed.message, "made to fail"), nullptr) << asked.name << ": " << failed.message;
        // A checked call gives the workspace back whatever happened.
        const std::size_t after = calls.size() - static_cast<std::size_t>(at) - 1;
        EXPECT_LE(after, asked.options.check_workspace ? 1U : 0U) << asked.name << ": " << broken;
        ++failures;
      }
      runtime().begin();  // on the same device
      const Status next = decode(asked.problem, asked.options, workspace);
      EXPECT_TRUE(next.ok()) << asked.name << " after " << broken << ": " << next.message;
      if (at == 0) launches = runtime().launches();
      EXPECT_EQ(runtime().launches(), launches) << asked.name << " after " << broken;
    }
    EXPECT_FALSE(launches.empty()) << asked.name;
  }
  EXPECT_GT(failures, 100);
}

TEST(CudaHost, R32_AResetAndAQuestionThatFailAreTold) {
  for (const Asked& asked : asked_calls()) {
    for (int at = 0;; ++at) {
      to_a_new_device();
      runtime().fails_at = at;
      const WorkspaceSize size = workspace_size(asked.problem, asked.options);
      const bool failed = static_cast<int>(runtime().calls.size()) > at;
      EXPECT_EQ(size.status.ok(), !failed) << asked.name << ", call " << at;
      if (!failed) break;
    }
  }
  alignas(256) std::byte state[1024];
  const Workspace workspace{.state = state, .state_bytes = sizeof(state)};
  to_a_new_device();
  std::memset(state, 0xFF, sizeof(state));
  runtime().fails_at = 0;
  EXPECT_EQ(reset_workspace(workspace, cuda_options()).code, StatusCode::kBackendError);
  runtime().begin();
  EXPECT_TRUE(reset_workspace(workspace, cuda_options()).ok());
  EXPECT_EQ(state[0], std::byte{0});
  EXPECT_TRUE(sticky_status(workspace, cuda_options()).ok());
  const auto count = static_cast<int>(runtime().calls.size());
  for (int at = 1; at < count; ++at) {  // after the reset
    runtime().begin();
    runtime().fails_at = at - 1;
    EXPECT_EQ(sticky_status(workspace, cuda_options()).code, StatusCode::kBackendError) << at;
  }
  EXPECT_GE(count, 3);
}

TEST(CudaHost, R49_AMergeIsOneLaunchThatMayBeCaptured) {
  float o_a[8] = {}, lse_a[1] = {}, o_b[8] = {}, lse_b[1] = {};
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    to_a_new_device();
    EXPECT_TRUE(merge_states(o_a, lse_a, o_b, lse_b, 1, 8, dtype, cuda_options()).ok());
    EXPECT_EQ(runtime().calls.size(), 1U);
    EXPECT_EQ(runtime().launches().size(), 1U);
    to_a_new_device();
    EXPECT_TRUE(merge_states(o_a, lse_a, o_b, lse_b, 0, 8, dtype, cuda_options()).ok());
    EXPECT_TRUE(runtime().calls.empty());
    runtime().fails_at = 0;
    EXPECT_EQ(merge_states(o_a, lse_a, o_b, lse_b, 1, 8, dtype, cuda_options()).code, StatusCode::kBackendError);
  }
}

/// What a kernel left in the state's header, in words: the entry, where it is known.
TEST(CudaHost, R25_TheFirstFaultIsNamedAsTheDeviceLeftIt) {
  alignas(256) std::byte state[256] = {};
  const Workspace workspace{.state = state, .state_bytes = sizeof(state)};
  to_a_new_device();
  runtime().begin();
  const auto left = [&](StatusCode code, const LengthFault& fault) {
    *reinterpret_cast<fixup::StateHeader*>(state) = {.sticky_code = static_cast<fixup::Counter>(code), .fault = fault};
    const Status status = sticky_status(workspace, cuda_options());
    EXPECT_EQ(status.code, code);
    return std::string(status.message);
  };
  using Array = LengthFault::Array;
  const LengthFault length{.array = Array::kKvLengths, .seen = 500, .index = 1, .most = 128};
  EXPECT_EQ(left(StatusCode::kBadLengths, length),
            "kv_lengths[1] = 500: allowed 0 to 128 (the tokens there is room for); it was clamped");
  EXPECT_EQ(left(StatusCode::kBadPageIndex, {.array = Array::kBlockTable, .seen = -7, .page = 2, .index = 3, .most = 9}),
            "pages.block_table[3, 2] = -7: allowed 0 to 9; its tokens were skipped");
  EXPECT_EQ(left(StatusCode::kBadLengths, {}).find("lengths: a value lay outside"), 0U);
  EXPECT_EQ(left(StatusCode::kBadPageIndex, length).find("pages: an id lay outside"), 0U) << "of another kind than the code";
  EXPECT_EQ(left(StatusCode::kWorkspaceInUse, {}).find("workspace.state: "), 0U);
  for (const int byte : {0xFF, 0x5A}) {  // memory that nobody has zeroed
    std::memset(state, byte, sizeof(state));
    const Status status = sticky_status(workspace, cuda_options());
    EXPECT_EQ(status.code, StatusCode::kWorkspaceDirty);
    EXPECT_NE(std::string(status.message).find("zero the state"), std::string::npos) << status.message;
  }
}

/// R34: where an error of before sticks, every call says so, and launches nothing.
TEST(CudaHost, R34_AnErrorThatSticksIsToldByEveryCall) {
  for (const Asked& asked : asked_calls()) {
    to_a_new_device();
    const Workspace workspace = workspace_for(asked);
    runtime().begin();
    runtime().fails_at = 0;
    runtime().sticks = true;
    for (int again = 0; again < 3; ++again) {
      const Status status = decode(asked.problem, asked.options, workspace);
      EXPECT_FALSE(status.ok()) << asked.name;
      EXPECT_NE(std::strstr(status.message, "made to fail"), nullptr) << status.message;
    }
    EXPECT_TRUE(runtime().launches().empty()) << asked.name;
  }
}

/// The device is asked for once a question, and a call is one.
TEST(CudaHost, R47_ACallAsksForTheDeviceOnce) {
  const auto times_asked = [] {
    return std::ranges::count_if(runtime().calls, [](const Call& call) { return call.name == "cudaGetDevice"; });
  };
  for (const Asked& asked : asked_calls()) {
    to_a_new_device();
    const Workspace workspace = workspace_for(asked);
    EXPECT_EQ(times_asked(), 1) << asked.name;
    runtime().begin();
    ASSERT_TRUE(decode(asked.problem, asked.options, workspace).ok()) << asked.name;
    EXPECT_EQ(times_asked(), 1) << asked.name;
    runtime().begin();
    ASSERT_TRUE(supports(asked.problem, asked.options).ok()) << asked.name;
    EXPECT_EQ(times_asked(), 1) << asked.name;
  }
}

/// R39, R47: a call allocates nothing, waits for nothing, changes no device and looks at nobody's earlier error, so that it may be
/// captured. From the second on it asks for no attributes again.
TEST(CudaHost, R39_ACallMakesOnlyCallsThatMayBeCaptured) {
  const std::set<std::string_view> first = {"cudaGetDevice",        "cudaDeviceGetAttribute", "cudaGetDriverEntryPointByVersion",
                                            "cudaFuncSetAttribute", "cudaLaunchKernelExC",    "cudaLaunchKernel"};
  const std::set<std::string_view> later = {"cudaGetDevice", "cudaFuncSetAttribute", "cudaLaunchKernelExC", "cudaLaunchKernel"};
  to_a_new_device();
  runtime().ordinal = 0;  // of the first few, it keeps what it learns
  for (const Asked& asked : asked_calls()) {
    const Workspace workspace = workspace_for(asked);
    for (const std::set<std::string_view>& allowed : {first, later}) {
      runtime().begin();
      ASSERT_TRUE(decode(asked.problem, asked.options, workspace).ok()) << asked.name;
      for (const Call& call : runtime().calls) EXPECT_TRUE(allowed.contains(call.name)) << asked.name << ": " << call.name;
    }
  }
}

/// What each of the calls is: launches, and how.
TEST(CudaHost, R01_ACallIsOneLaunchOrTheTwoThatAreDocumented) {
  for (const Asked& asked : asked_calls()) {
    to_a_new_device();
    const Workspace workspace = workspace_for(asked);
    runtime().begin();
    ASSERT_TRUE(decode(asked.problem, asked.options, workspace).ok()) << asked.name;
    const std::vector<Call> launches = runtime().launches();
    const std::string name = asked.name;
    const bool appends = name == "new tokens, turned";
    const bool checked = name == "a checked call";
    const bool two = appends || name == "two kernels" || name == "prefill and decode";
    EXPECT_EQ(launches.size(), checked ? 3U : (two ? 2U : 1U)) << name;
    const Call& decoding = launches[checked || appends ? 1 : 0];
    const bool plain = name == "the plain kernel";
    EXPECT_TRUE(decoding.decodes()) << name << ": " << decoding.kernel;
    EXPECT_EQ(decoding.plain(), plain) << name;
    const unsigned workers = name == "many sequences" ? 264 : 132;
    EXPECT_EQ(decoding.grid, plain ? 2U : workers) << name;  // an output each, or a worker
    EXPECT_EQ(decoding.cooperative, name == "the host block") << name;
    EXPECT_EQ(decoding.dependent, !decoding.cooperative && name != "stream order") << name;
    EXPECT_EQ(launches[0].dependent, !checked && !decoding.cooperative && name != "stream order") << name;
    if (name != "prefill and decode") continue;
    EXPECT_TRUE(launches[1].dependent) << "beside the chunks, for which it does not wait";
    EXPECT_NE(launches[0].kernel, launches[1].kernel);
  }
  runtime().begin();
  Problem empty = problem_of({});
  empty.batch = 0;
  EXPECT_TRUE(decode(empty, cuda_options(), {}).ok());
  EXPECT_TRUE(runtime().launches().empty());
}

/// Launches run side by side where one leaves the memory idle and the other the tensor cores: not where a decode step's kernel serves
/// longer queries too, nor on a device without either.
TEST(CudaHost, R01_TwoLaunchesOfOneKindFollowEachOther) {
  for (const bool wide : {false, true}) {
    for (const int major : {8, 9}) {
      to_a_new_device({.major = major});
      Problem p = problem_of({.batch = 3});
      p.q_tokens = wide ? 100 : 8;
      p.total_q_tokens = 150;
      p.scores.causal = true;
      p.cu_q_tokens = static_cast<const std::int32_t*>(address(7));
      Asked asked{"", p, cuda_options()};
      asked.options.dependent_launch = false;
      const Workspace workspace = workspace_for(asked);
      runtime().begin();
      ASSERT_TRUE(decode(asked.problem, asked.options, workspace).ok());
      const std::vector<Call> launches = runtime().launches();
      ASSERT_EQ(launches.size(), 2U);
      EXPECT_FALSE(launches[0].dependent);
      EXPECT_EQ(launches[1].dependent, wide && major == 9) << launches[0].kernel;
    }
  }
}

/// Launches run side by side where a kernel of many rows and a decode step's of up to 16 serve the call, whatever its lengths; else the
/// second follows the first (docs/cuda-kernel.md, "Prefill and decode in one call").
TEST(CudaHost, R01_LaunchesRunSideBySideWhereBothKindsServe) {
  to_a_new_device();
  if (cuda::wide_kernels_for(DType::kBFloat16, 128).empty()) GTEST_SKIP() << "built without LEAN_CUDA_WIDE";
  struct Row {
    const char* name;
    bool beside;
    Shape shape{};
    std::function<void(Problem&, Options&)> change{};
    FakeDevice device{};
  };
  const auto windowed = [](Problem& p, Options&) { p.scores.window_left = 200; };
  const auto of_policy = [](Policy policy) { return [policy](Problem&, Options& o) { o.policy = policy; }; };
  const auto of_workers = [](std::int32_t workers) { return [workers](Problem&, Options& o) { o.workers = workers; }; };
  const auto of_scale = [](float scale) { return [scale](Problem& p, Options&) { p.scores.scale = scale; }; };
  const auto of_tokens = [](std::int32_t tokens) { return [tokens](Problem& p, Options&) { p.q_tokens = tokens; }; };
  const Row rows[] = {
      {"as servers ask", true},
      {"packed", true, {.token_major = true}},
      {"fp16, pages", true, {.dtype = DType::kFloat16, .kv_dtype = DType::kFloat16, .page_tokens = 16}},
      {"pages that are no whole boxes", true, {.page_tokens = 8}},
      {"d 64", true, {.head_dim = 64}},
      {"dims between variants", true, {.head_dim = 80}},
      {"d 256", true, {.head_dim = 256}},
      {"two workers", true, {}, of_workers(2)},
      {"1,024 sequences", true, {.batch = 1024}},
      {"a group of 16", true, {.q_heads = 16, .kv_heads = 1}},
      {"a window, few rows of one query token", true, {.q_heads = 12, .kv_heads = 1, .token_major = true}, windowed},
      {"a right window", true, {}, [](Problem& p, Options&) { p.scores.causal = false, p.scores.window_right = 3; }},
      {"sinks", true, {}, [](Problem& p, Options&) { p.scores.sinks = static_cast<const float*>(address(8)); }},
      {"a dependent launch", true, {}, [](Problem&, Options& o) { o.dependent_launch = true; }},
      {"a dependent launch of rows that follow",
       false,
       {.q_heads = 17, .kv_heads = 1},
       [](Problem&, Options& o) { o.dependent_launch = true; }},
      {"a window, few rows of several", false, {.token_major = true}, windowed},
      {"the same of a group of 8", false, {.q_heads = 8, .kv_heads = 1}, windowed},
      {"a group of 17", false, {.q_heads = 17, .kv_heads = 1}},
      {"chunks for a decode step's kernel", false, {.capacity = 8192}, of_tokens(16)},
      {"one worker", false, {}, of_workers(1)},
      {"1,025 sequences", false, {.batch = 1025}},
      {"fp8", false, {.kv_dtype = DType::kFloat8E4M3}},
      {"softcap", false, {}, [](Problem& p, Options&) { p.scores.softcap = 30.0F; }},
      {"ALiBi", false, {}, [](Problem& p, Options&) { p.scores.alibi_slopes = static_cast<const float*>(address(8)); }},
      {"a scale of 0", false, {}, of_scale(-0.0F)},
      {"a scale below 0", false, {}, of_scale(-0.1F)},
      {"fixed split", false, {}, of_policy(Policy::fixed_split())},
      {"data parallel", false, {}, of_policy(Policy::data_parallel())},
      {"the host block", false, {}, [](Problem&, Options& o) { o.fixup = Fixup::kHostBlock; }},
      {"two kernels", false, {}, [](Problem&, Options& o) { o.fixup = Fixup::kTwoKernels; }},
      {"sm_80", false, {}, {}, kDevices[1]},
      {"sm_100", false, {}, {}, kDevices[3]},
      {"sm_120", false, {}, {}, kDevices[4]},
  };
  for (const Row& row : rows) {
    to_a_new_device(row.device);
    Asked asked{row.name, problem_of(row.shape), cuda_options()};
    asked.options.dependent_launch = false;
    Problem& p = asked.problem;
    p.batch = std::max<std::int64_t>(p.batch, 3);
    p.q_tokens = 1024;
    p.cu_q_tokens = static_cast<const std::int32_t*>(address(7));
    p.scores.causal = true;
    if (row.change) row.change(p, asked.options);
    p.total_q_tokens = p.q_tokens + p.batch;
    const Workspace workspace = workspace_for(asked);
    runtime().begin();
    const Status status = decode(p, asked.options, workspace);
    ASSERT_TRUE(status.ok()) << row.name << ": " << status.message;
    const std::vector<Call> launches = runtime().launches();
    const bool two_passes = asked.options.fixup == Fixup::kTwoKernels;
    ASSERT_EQ(launches.size(), two_passes ? 4U : 2U) << row.name;
    cuda::Device device;
    ASSERT_TRUE(cuda::current_device(device).ok());
    const cuda::CallPlan plan = cuda::plan_call(p, asked.options, device);
    EXPECT_EQ(plan.side_by_side(), row.beside) << row.name;
    EXPECT_EQ(launches[1].dependent, row.beside || asked.options.dependent_launch)
        << row.name << ": " << launches[0].kernel << ", " << launches[1].kernel;
    EXPECT_EQ(launches[0].dependent, asked.options.dependent_launch) << row.name;
    if (!row.beside) continue;
    for (const cuda::LaunchPlan& launch : plan) {  // a multiprocessor has one CTA of either by what these take anyway
      EXPECT_GT(2 * launch.shared_bytes(), device.shared_bytes) << row.name;
    }
  }
}

/// One of `values`.
template <typename T>
T one_of(std::uint64_t& key, std::initializer_list<T> values) {
  return *(values.begin() + support::pick(++key, static_cast<std::int64_t>(values.size())));
}

/// Values with dims of their own: whether a kernel of many rows takes the call.
bool takes_own_values(const Asked& asked, const FakeDevice& device) {
  const Problem& p = asked.problem;
  const std::int32_t widest = std::max(p.head_dim, p.value_dim);
  if (device.major != 9 || p.k.dtype != p.q.dtype || cuda::wide_kernels_for(p.k.dtype, widest).empty()) return false;
  const bool dims = p.head_dim % 8 == 0 && p.value_dim % 8 == 0 && widest <= kWidestCudaHead;
  const auto in_pieces = [](const void* data, const Strides& strides) {
    return reinterpret_cast<std::uintptr_t>(data) % 16 == 0 && strides.sequence % 8 == 0 && strides.head % 8 == 0 &&
           strides.token % 8 == 0;
  };
  const bool queries = in_pieces(p.q.data, p.q.strides);
  const Options& o = asked.options;
  return dims && queries && o.fixup == Fixup::kLastArriver && o.policy.kind != Policy::Kind::kFixedChunk;
}

/// Whether a call's dims, or how its rows lie, are such that no variant of the tile serves it, or none fits the device.
bool needs_the_plain_kernel(const Asked& asked, const FakeDevice& device) {
  const Problem& p = asked.problem;
  const auto lies_well = [](const void* data, const Strides& strides, std::int64_t element, std::uintptr_t bytes) {
    const auto whole = [&](std::int64_t stride) { return stride * element % static_cast<std::int64_t>(bytes) == 0; };
    return reinterpret_cast<std::uintptr_t>(data) % bytes == 0 && whole(strides.sequence) && whole(strides.head) &&
           whole(strides.token);
  };
  const bool wide_elements = p.k.dtype == DType::kFloat16 || p.k.dtype == DType::kBFloat16;
  const bool own_values = p.value_dim != 0 && p.value_dim != p.head_dim;
  const bool dims = own_values ? takes_own_values(asked, device) : p.head_dim % 8 == 0 && p.head_dim <= 256;
  const bool side_by_side = p.q.strides.dim == 1 && p.k.strides.dim == 1 && p.v.strides.dim == 1 && p.o.strides.dim == 1;
  const bool rows = lies_well(p.q.data, p.q.strides, 2, 4) &&
                    (!wide_elements || (lies_well(p.k.data, p.k.strides, 2, 16) && lies_well(p.v.data, p.v.strides, 2, 16))) &&
                    (p.append.rotary_dim == 0 || lies_well(p.o.data, p.o.strides, 2, 4));
  const bool fits = device.shared_bytes > 100 * 1024 || p.head_dim <= 240 || !wide_elements;
  return !(dims && side_by_side && rows && fits);
}

/// Changes one thing of a call so that only the plain kernel serves it, or nothing.
void make_plain(Problem& p, std::uint64_t& key) {
  const auto moved = [](const void* data, std::ptrdiff_t bytes) {
    return static_cast<const void*>(static_cast<const std::byte*>(data) + bytes);
  };
  switch (support::pick(++key, 12)) {
    case 0: p.head_dim = one_of(key, {1, 59, 111, 257}); break;
    case 1: p.head_dim = one_of(key, {264, 512, kMaxHeadDim}); break;
    case 2: p.value_dim = one_of(key, {1, 8, 128, 200, 300, kMaxHeadDim}); break;
    case 3: p.q.strides.dim = 2; break;
    case 4: p.k.strides.dim = 2; break;
    case 5: p.v.strides.dim = -1; break;
    case 6: p.o.strides.dim = 3; break;
    case 7: p.q.data = moved(p.q.data, 2); break;
    case 8: p.k.data = moved(p.k.data, bytes_of(p.k.dtype)); break;
    case 9: p.v.strides.token += 1; break;
    case 10: p.k.strides.sequence += 4; break;
    default: break;
  }
}

/// Anything a caller may ask, much of it refused.
Asked random_call(std::uint64_t& key) {
  const bool fp8 = one_of(key, {false, true});
  const DType dtype = one_of(key, {DType::kFloat16, DType::kBFloat16});
  const auto kv_heads = static_cast<std::int32_t>(1 + support::pick(++key, 9));
  const auto group = static_cast<std::int32_t>(1 + support::pick(++key, one_of(key, {1, 16, 200})));
  Asked asked{
      "a random call",
      problem_of({.batch = 1 + support::pick(++key, one_of(key, {4, 40, 3000})),
                  .q_heads = kv_heads * group,
                  .kv_heads = kv_heads,
                  .head_dim = static_cast<std::int32_t>(8 * (1 + support::pick(++key, 32))),
                  .capacity = static_cast<std::int32_t>(1 + support::pick(++key, one_of(key, {300, 100'000, 2'000'000'000}))),
                  .dtype = dtype,
                  .kv_dtype = fp8 ? one_of(key, {DType::kFloat8E4M3, DType::kFloat8E5M2}) : dtype,
                  .token_major = one_of(key, {false, true}),
                  .page_tokens = one_of(key, {0, 0, 1, 16, 17, 256})}),
      cuda_options()};
  Problem& p = asked.problem;
  p.q_tokens = static_cast<std::int32_t>(1 + support::pick(++key, one_of(key, {1, 1, 5, 300})));
  p.scores.causal = one_of(key, {false, true});
  if (one_of(key, {false, false, false, true})) {
    p.cu_q_tokens = static_cast<const std::int32_t*>(address(7));
    p.total_q_tokens = p.q_tokens + support::pick(++key, p.batch * p.q_tokens);
  }
  p.q.strides.sequence = p.q_tokens * p.q.strides.token;
  p.o.strides = p.q.strides;
  if (one_of(key, {false, false, false, true})) p.scores.softcap = 30.0F;
  if (one_of(key, {false, false, false, true})) p.scores.window_left = static_cast<std::int32_t>(support::pick(++key, 5000));
  Options& o = asked.options;
  o.policy = one_of(key, {Policy::lean(), Policy::lean(), Policy::fixed_split(), Policy::fixed_split(7), Policy::data_parallel(),
                          Policy::fixed_chunk(), Policy::fixed_chunk(64)});
  if (o.policy.kind == Policy::Kind::kFixedChunk && one_of(key, {false, true})) o.determinism = Determinism::kBatchInvariant;
  o.fixup = one_of(key, {Fixup::kLastArriver, Fixup::kLastArriver, Fixup::kTwoKernels, Fixup::kHostBlock});
  o.workers = static_cast<std::int32_t>(one_of(key, {std::int64_t{0}, std::int64_t{0}, 1 + support::pick(++key, 1100)}));
  o.dependent_launch = one_of(key, {true, true, true, false});
  o.check_workspace = one_of(key, {false, false, false, true});
  if (one_of(key, {false, false, false, true})) {
    make_plain(p, key);
    lay_out_outputs(p);
  }
  return asked;
}

/// Decode steps of up to 2,000 outputs and up to 8 rows, as servers ask for them: random_call() meets a handful of more than there are
/// multiprocessors.
Asked random_steps(std::uint64_t& key) {
  const auto dtype = one_of(key, {DType::kFloat16, DType::kBFloat16});
  const auto kv_heads = static_cast<std::int32_t>(1 + support::pick(++key, 8));
  const auto group = static_cast<std::int32_t>(1 + support::pick(++key, 8));
  return {"random steps",
          problem_of({.batch = 1 + support::pick(++key, 250),
                      .q_heads = kv_heads * group,
                      .kv_heads = kv_heads,
                      .head_dim = static_cast<std::int32_t>(one_of(key, {64, 80, 128, 256})),
                      .capacity = static_cast<std::int32_t>(1 + support::pick(++key, one_of(key, {300, 100'000}))),
                      .dtype = dtype,
                      .kv_dtype = one_of(key, {dtype, dtype, DType::kFloat8E4M3}),
                      .token_major = one_of(key, {false, true}),
                      .page_tokens = one_of(key, {0, 16, 64, 128})}),
          cuda_options()};
}

/// R17: what suffices for several query tokens suffices for fewer, wherever rows lie, which is how servers size a workspace once: of steps
/// of one token that have two workers on a multiprocessor too.
TEST(CudaHost, R17_AWorkspaceForSeveralTokensSufficesForOne) {
  std::uint64_t key = 1;
  int paired = 0;
  for (int i = 0; i < 3'000; ++i) {
    const FakeDevice device = one_of(key, {kDevices[0], kDevices[3], kDevices[4]});
    to_a_new_device(device);
    Asked asked = random_steps(key);
    Asked several = asked;
    several.problem.q_tokens = static_cast<std::int32_t>(2 + support::pick(++key, 40));
    several.problem.k.strides =
        several.problem.v.strides = {.sequence = asked.problem.k.strides.sequence, .head = 0, .token = 0, .dim = 1};
    several.problem.q.strides.sequence = several.problem.q_tokens * several.problem.q.strides.token;
    lay_out_outputs(several.problem);
    const WorkspaceSize of_several = workspace_size(several.problem, several.options);
    if (!of_several.status.ok() || !supports(asked.problem, asked.options).ok()) continue;
    const WorkspaceSize of_one = workspace_size(asked.problem, asked.options);
    ASSERT_LE(of_one.state_bytes, of_several.state_bytes) << i;
    ASSERT_LE(of_one.scratch_bytes, of_several.scratch_bytes) << i;
    const Workspace workspace{.state = address(12),
                              .state_bytes = of_several.state_bytes,
                              .scratch = address(13),
                              .scratch_bytes = of_several.scratch_bytes};
    runtime().begin();
    ASSERT_TRUE(decode(asked.problem, asked.options, workspace).ok()) << i;
    paired += runtime().launches().back().grid > static_cast<unsigned>(device.multiprocessors) ? 1 : 0;
  }
  EXPECT_GT(paired, 500);
}

/// Chunks of prompts and decode steps as servers ask for them: most such calls of a device with wide kernels are two launches side by
/// side, of which random_call() meets a handful.
Asked random_mixed_batch(std::uint64_t& key) {
  const auto dtype = one_of(key, {DType::kFloat16, DType::kBFloat16});
  const auto kv_heads = static_cast<std::int32_t>(1 + support::pick(++key, 9));
  const auto group = static_cast<std::int32_t>(1 + support::pick(++key, 20));
  Asked asked{"a random mixed batch",
              problem_of({.batch = 2 + support::pick(++key, one_of(key, {40, 1400})),
                          .q_heads = kv_heads * group,
                          .kv_heads = kv_heads,
                          .head_dim = static_cast<std::int32_t>(one_of(key, {64, 96, 128, 192, 256})),
                          .capacity = static_cast<std::int32_t>(1 + support::pick(++key, 100'000)),
                          .dtype = dtype,
                          .kv_dtype = dtype,
                          .token_major = one_of(key, {false, true}),
                          .page_tokens = one_of(key, {0, 16, 64, 128})}),
              cuda_options()};
  asked.problem.q_tokens = static_cast<std::int32_t>(1 + support::pick(++key, 4096));
  asked.problem.cu_q_tokens = static_cast<const std::int32_t*>(address(7));
  asked.problem.total_q_tokens = asked.problem.q_tokens + asked.problem.batch - 1;
  asked.problem.scores.causal = one_of(key, {false, true});
  asked.options.workers = static_cast<std::int32_t>(one_of(key, {std::int64_t{0}, 1 + support::pick(++key, 132)}));
  return asked;
}

/// R17, R30: what workspace_size() says is enough for every launch of the call, and what supports() refuses, decode() refuses
/// alike. The plain kernel serves what no variant does, and nothing else; a workspace asked for when rows lay otherwise does too.
TEST(CudaHost, R17_NoLaunchTakesMoreThanTheWorkspaceThatWasAskedFor) {
  std::uint64_t key = 1;
  int served = 0;
  int plain = 0;
  int refused = 0;
  int beside = 0;
  int paired = 0;
  for (int i = 0; i < 20'000; ++i) {
    const FakeDevice device = one_of(key, {kDevices[0], kDevices[1], kDevices[2], kDevices[3], kDevices[4]});
    to_a_new_device(device);
    const Asked asked = i % 16 == 0 ? random_mixed_batch(key) : i % 16 == 1 ? random_steps(key) : random_call(key);
    const Status supported = supports(asked.problem, asked.options);
    if (!supported.ok()) {
      EXPECT_NE(std::strstr(supported.message, " = "), nullptr) << supported.message;
      EXPECT_STREQ(decode(asked.problem, asked.options, {}).message, supported.message);
      EXPECT_TRUE(runtime().launches().empty());
      ++refused;
      continue;
    }
    const Workspace workspace = workspace_for(asked);
    const Status status = decode(asked.problem, asked.options, workspace);
    ASSERT_TRUE(status.ok()) << i << ": " << status.message;
    const auto state = reinterpret_cast<std::uintptr_t>(workspace.state);
    const auto scratch = reinterpret_cast<std::uintptr_t>(workspace.scratch);
    cuda::Device known;
    ASSERT_TRUE(cuda::current_device(known).ok());
    const bool runs_beside = cuda::plan_call(asked.problem, asked.options, known).side_by_side();
    const Call* ahead = nullptr;
    for (const Call& launch : runtime().launches()) {
      ASSERT_LE(launch.counters_end, state + workspace.state_bytes) << i << ": " << launch.kernel;
      ASSERT_LE(launch.scratch_end, scratch + workspace.scratch_bytes) << i << ": " << launch.kernel;
      if (ahead != nullptr && launch.decodes() && runs_beside) {
        ASSERT_LE(ahead->counters_end, launch.counters) << i << ": " << launch.kernel;
        ASSERT_LE(ahead->scratch_end, launch.scratch) << i << ": " << launch.kernel;
        ++beside;
      }
      if (launch.decodes()) ahead = &launch;
      if (launch.decodes() && !launch.plain() && asked.options.workers == 0)
        paired += launch.grid > static_cast<unsigned>(device.multiprocessors);
      ASSERT_LE(launch.shared_bytes, static_cast<std::size_t>(device.shared_bytes)) << i << ": " << launch.kernel;
      ASSERT_EQ(launch.plain(), launch.decodes() && needs_the_plain_kernel(asked, device)) << i << ": " << launch.kernel;
    }
    plain += needs_the_plain_kernel(asked, device) ? 1 : 0;
    ++served;
  }
  EXPECT_GT(paired, 100);
  EXPECT_GT(served, 8'000);
  EXPECT_GT(plain, 1'000);
  EXPECT_GT(refused, 2'000);
  EXPECT_GT(beside, 100);
}

TEST(CudaHost, R30_AnOldDeviceIsRefusedByName) {
  to_a_new_device({.major = 7, .minor = 5});
  const Status old = supports(problem_of({}), cuda_options());
  EXPECT_EQ(old.code, StatusCode::kUnsupported);
  EXPECT_NE(std::strstr(old.message, "8.0"), nullptr) << old.message;
  to_a_new_device({.major = 8, .minor = 0, .shared_bytes = 163 * 1024});
  const Asked asked{"a dependent launch before sm_90", problem_of({}), cuda_options()};
  const Workspace workspace = workspace_for(asked);
  ASSERT_TRUE(asked.options.dependent_launch && decode(asked.problem, asked.options, workspace).ok());
  ASSERT_EQ(runtime().launches().size(), 1U);
  EXPECT_FALSE(runtime().launches()[0].dependent) << "asked for, and nothing of the kind is there";
  to_a_new_device({.cooperative = false});
  Options blocks = cuda_options();
  blocks.fixup = Fixup::kHostBlock;
  EXPECT_EQ(supports(problem_of({}), blocks).code, StatusCode::kUnsupported);
}

}  // namespace
}  // namespace lean::cuda_host
