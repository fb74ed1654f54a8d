// The CUDA backend's host code on a fake runtime: what it asks of a device, in which order, and what becomes of a call when one of these
// fails. No GPU, and none is missed: kernels are chosen and launched, and do nothing.
#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <initializer_list>
#include <iterator>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "backends/cuda/kernel_config.hpp"
#include "cuda_host/fake_runtime.hpp"
#include "lean/lean.hpp"
#include "support/random.hpp"

namespace lean::cuda_host {
namespace {

/// Where nothing lies: host code looks at pointers, never behind them.
void* address(std::uintptr_t place) { return reinterpret_cast<void*>(place << 36); }

struct Shape {
  std::int64_t batch = 1;
  std::int32_t q_heads = 8;
  std::int32_t kv_heads = 2;
  std::int32_t head_dim = 128;
  std::int32_t capacity = 4096;
  DType dtype = DType::kBFloat16;
  DType kv_dtype = DType::kBFloat16;
  bool token_major = false;  // [token][head][dim], else [head][token][dim]
  std::int32_t page_tokens = 0;
};

Problem problem_of(const Shape& s) {
  Problem p{.batch = s.batch, .q_heads = s.q_heads, .kv_heads = s.kv_heads, .head_dim = s.head_dim, .kv_capacity = s.capacity};
  const std::int64_t d = s.head_dim;
  const std::int64_t tokens = s.page_tokens > 0 ? s.page_tokens : s.capacity;
  p.q = {.data = address(1), .dtype = s.dtype, .strides = {.sequence = s.q_heads * d, .head = d, .token = s.q_heads * d}};
  p.k = {.data = address(2), .dtype = s.kv_dtype};
  p.k.strides = s.token_major ? Strides{.sequence = s.kv_heads * tokens * d, .head = d, .token = s.kv_heads * d}
                              : Strides{.sequence = s.kv_heads * tokens * d, .head = tokens * d, .token = d};
  p.v = p.k;
  p.v.data = address(3);
  p.o = {.data = address(4), .dtype = s.dtype, .strides = p.q.strides};
  p.kv_lengths = static_cast<const std::int32_t*>(address(5));
  if (s.page_tokens > 0) {
    const std::int64_t pages = (s.capacity + s.page_tokens - 1) / s.page_tokens;
    p.pages = {.page_tokens = s.page_tokens,
               .page_count = s.batch * pages,
               .block_table = static_cast<const std::int32_t*>(address(6)),
               .block_table_stride = pages};
  }
  return p;
}

struct Asked {
  const char* name;
  Problem problem;
  Options options;
};

Options cuda_options() { return {.backend = Backend::kCuda}; }

/// Calls that between them take every launch the backend makes.
std::vector<Asked> asked_calls() {
  std::vector<Asked> calls;
  const auto add = [&](const char* name, const Shape& shape, const std::function<void(Problem&, Options&)>& change) {
    calls.push_back({name, problem_of(shape), cuda_options()});
    if (change) change(calls.back().problem, calls.back().options);
  };
  add("a decode step", {}, nullptr);
  add("rows with gaps", {.token_major = true}, nullptr);
  add("fp8, short pages", {.kv_dtype = DType::kFloat8E4M3, .page_tokens = 16}, nullptr);
  add("a head dimension between variants", {.head_dim = 80}, nullptr);
  add("many sequences", {.batch = 300}, nullptr);
  add("two kernels", {}, [](Problem&, Options& o) { o.fixup = Fixup::kTwoKernels; });
  add("the host block", {}, [](Problem&, Options& o) { o.fixup = Fixup::kHostBlock; });
  add("chunks", {}, [](Problem&, Options& o) { o.determinism = Determinism::kBatchInvariant, o.policy = Policy::fixed_chunk(); });
  add("a dependent launch", {}, [](Problem&, Options& o) { o.dependent_launch = true; });
  add("a checked call", {}, [](Problem&, Options& o) { o.check_workspace = true; });
  add("prefill and decode", {.batch = 3}, [](Problem& p, Options&) {
    p.q_tokens = 100, p.total_q_tokens = 150, p.scores.causal = true;
    p.cu_q_tokens = static_cast<const std::int32_t*>(address(7));
  });
  add("new tokens, turned", {}, [](Problem& p, Options&) {
    p.append.k = {.data = address(8), .dtype = p.q.dtype, .strides = {.sequence = 256, .head = 128, .token = 256}};
    p.append.v = p.append.k;
    p.append.v.data = address(9);
    p.append.rotary_cos = static_cast<const float*>(address(10));
    p.append.rotary_sin = static_cast<const float*>(address(11));
    p.append.rotary_dim = 64;
  });
  return calls;
}

Workspace workspace_for(const Asked& asked) {
  const WorkspaceSize size = workspace_size(asked.problem, asked.options);
  EXPECT_TRUE(size.status.ok()) << asked.name << ": " << size.status.message;
  return {.state = address(12), .state_bytes = size.state_bytes, .scratch = address(13), .scratch_bytes = size.scratch_bytes};
}

constexpr FakeDevice kDevices[] = {
    {.major = 9, .minor = 0, .multiprocessors = 132, .shared_bytes = 227 * 1024},
    {.major = 8, .minor = 0, .multiprocessors = 108, .shared_bytes = 163 * 1024},
    {.major = 8, .minor = 9, .multiprocessors = 142, .shared_bytes = 99 * 1024},
    {.major = 10, .minor = 0, .multiprocessors = 148, .shared_bytes = 227 * 1024},
    {.major = 12, .minor = 0, .multiprocessors = 170, .shared_bytes = 99 * 1024},
};

/// A device that the backend has not seen: it keeps what it learns of one.
void to_a_new_device(const FakeDevice& device = {}) {
  runtime().begin();
  runtime().ordinal = static_cast<int>(runtime().devices.size());
  runtime().devices.push_back(device);
}

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

/// R32: whichever call of the runtime fails, the caller is told which, nothing is launched after it, and the next call is as if nothing had
/// been. A tensor map that cannot be made is no failure: threads copy then.
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
    EXPECT_NE(decoding.kernel.find("decode_kernel"), std::string_view::npos) << name << ": " << decoding.kernel;
    EXPECT_EQ(decoding.grid, 132U) << name;
    EXPECT_EQ(decoding.cooperative, name == "the host block") << name;
    EXPECT_EQ(decoding.dependent, appends || name == "a dependent launch") << name;
  }
  runtime().begin();
  Problem empty = problem_of({});
  empty.batch = 0;
  EXPECT_TRUE(decode(empty, cuda_options(), {}).ok());
  EXPECT_TRUE(runtime().launches().empty());
}

/// R33, R30: on any kind of device, what supports() takes is launched with no more shared memory and threads than there are, and what it does
/// not take is refused by name.
TEST(CudaHost, R33_WhatIsSupportedFitsEveryKindOfDevice) {
  std::set<std::string_view> kernels;
  for (const FakeDevice& device : kDevices) {
    std::int64_t served = 0;
    for (const std::int32_t head_dim : {8, 64, 72, 80, 96, 128, 192, 256}) {
      for (const DType kv_dtype : {DType::kBFloat16, DType::kFloat8E4M3}) {
        for (const std::int32_t group : {1, 4, 8, 16, 64, 128}) {
          for (const std::int32_t page_tokens : {0, 16, 128}) {
            for (const bool token_major : {false, true}) {
              for (const bool chunks : {false, true}) {
                Asked asked{"",
                            problem_of({.batch = 2,
                                        .q_heads = 2 * group,
                                        .head_dim = head_dim,
                                        .kv_dtype = kv_dtype,
                                        .token_major = token_major,
                                        .page_tokens = page_tokens}),
                            cuda_options()};
                if (chunks) asked.options.policy = Policy::fixed_chunk();
                to_a_new_device(device);
                const Status supported = supports(asked.problem, asked.options);
                if (device.shared_bytes < 100 * 1024 && head_dim == 256 &&
                    kv_dtype == DType::kBFloat16) {  // two tiles of no variant
                  ASSERT_EQ(supported.code, StatusCode::kUnsupported);
                  ASSERT_NE(std::strstr(supported.message, "shared memory"), nullptr) << supported.message;
                  continue;
                }
                ASSERT_TRUE(supported.ok()) << "sm_" << device.major << device.minor << " d " << head_dim << ": "
                                            << supported.message;
                const Workspace workspace = workspace_for(asked);
                ASSERT_TRUE(decode(asked.problem, asked.options, workspace).ok());
                for (const Call& launch : runtime().launches()) {
                  ASSERT_LE(launch.shared_bytes, static_cast<std::size_t>(device.shared_bytes)) << launch.kernel;
                  ASSERT_LE(launch.threads, 1024U) << launch.kernel;
                  ASSERT_EQ(launch.grid, static_cast<unsigned>(device.multiprocessors)) << launch.kernel;
                  kernels.insert(launch.kernel);
                }
                ++served;
              }
            }
          }
        }
      }
    }
    const int refused = device.shared_bytes < 100 * 1024 ? 1 : 0;  // head dimensions of one type
    EXPECT_EQ(served, (8 * 2 - refused) * 6 * 3 * 2 * 2);
  }
  EXPECT_GT(kernels.size(), 40U) << "the sweep takes few variants";
}

/// One of `values`.
template <typename T>
T one_of(std::uint64_t& key, std::initializer_list<T> values) {
  return *(values.begin() + support::pick(++key, static_cast<std::int64_t>(values.size())));
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
  o.dependent_launch = one_of(key, {false, false, false, true});
  o.check_workspace = one_of(key, {false, false, false, true});
  return asked;
}

/// R17, R30: what workspace_size() says is enough for every launch of the call, and what supports() refuses, decode() refuses alike.
TEST(CudaHost, R17_NoLaunchTakesMoreThanTheWorkspaceThatWasAskedFor) {
  std::uint64_t key = 1;
  int served = 0;
  int refused = 0;
  for (int i = 0; i < 20'000; ++i) {
    const FakeDevice device = one_of(key, {kDevices[0], kDevices[1], kDevices[2], kDevices[3], kDevices[4]});
    to_a_new_device(device);
    const Asked asked = random_call(key);
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
    for (const Call& launch : runtime().launches()) {
      ASSERT_LE(launch.state_bytes, static_cast<std::int64_t>(workspace.state_bytes)) << i << ": " << launch.kernel;
      ASSERT_LE(launch.scratch_bytes, static_cast<std::int64_t>(workspace.scratch_bytes)) << i << ": " << launch.kernel;
      ASSERT_LE(launch.shared_bytes, static_cast<std::size_t>(device.shared_bytes)) << i << ": " << launch.kernel;
    }
    ++served;
  }
  EXPECT_GT(served, 8'000);
  EXPECT_GT(refused, 2'000);
}

/// Of the variant that the call takes, as explain_schedule() tells; 0: the call is refused.
int tile_tokens_of(const Problem& problem, const Options& options) {
  const std::size_t bytes = explain_schedule(problem, options, ScheduleFormat::kJson, nullptr, 0);
  std::string text(bytes, ' ');
  static_cast<void>(explain_schedule(problem, options, ScheduleFormat::kJson, text.data(), bytes));
  const std::string key = "\"tile_tokens\":";
  const std::size_t at = text.find(key);
  return at == std::string::npos ? 0 : std::stoi(text.substr(at + key.size()));
}

/// R44: on a device, tiles fix the order of a chunk's sums, so they are the same for one query token, more and whatever rule they have.
TEST(CudaHost, R44_ChunksHaveTheSameTilesWhateverIsAsked) {
  constexpr std::int32_t kLengths[] = {4000};
  std::vector<FakeDevice> devices(std::begin(kDevices), std::end(kDevices));
  for (int kilobytes = 64; kilobytes < 227; ++kilobytes) devices.push_back({.shared_bytes = kilobytes * 1024});
  std::set<int> found;
  for (const FakeDevice& device : devices) {
    to_a_new_device(device);
    for (const std::int32_t head_dim : {64, 80, 128, 256}) {
      for (const DType kv_dtype : {DType::kBFloat16, DType::kFloat8E4M3}) {
        for (const std::int32_t group : {1, 16, 32, 64}) {
          Problem plain = problem_of({.q_heads = 2 * group, .head_dim = head_dim, .kv_dtype = kv_dtype});
          plain.kv_lengths = kLengths;
          Options options = cuda_options();
          options.policy = Policy::fixed_chunk();
          const int tokens = tile_tokens_of(plain, options);
          found.insert(tokens);
          Problem several = plain;
          several.q_tokens = 4, several.scores.causal = true;
          Problem capped = plain;
          capped.scores.softcap = 30.0F;
          for (const Problem& other : {several, capped}) {
            EXPECT_EQ(tile_tokens_of(other, options), tokens)
                << "sm_" << device.major << device.minor << " d " << head_dim << " group " << group;
          }
        }
      }
    }
  }
  EXPECT_GE(found.size(), 4U);  // none, 64, 128, 256
}

/// Dims between the variants' have their decode steps too, filled up by tensor copies; what those cannot take is any call's.
TEST(CudaHost, R06_DecodeStepsOfEveryHeadDimension) {
  to_a_new_device();
  const auto scope_of = [](const Problem& problem) {
    const Asked asked{"a decode step", problem, cuda_options()};
    const Workspace workspace = workspace_for(asked);
    runtime().begin();
    EXPECT_TRUE(decode(asked.problem, asked.options, workspace).ok());
    const std::string_view kernel = runtime().launches().back().kernel;
    for (const cuda::Scope scope : cuda::kScopes) {
      if (kernel.find("ScopeE" + std::to_string(static_cast<int>(scope)) + "E") != std::string_view::npos) return scope;
    }
    ADD_FAILURE() << kernel;
    return cuda::Scope::kAnyCall;
  };
  for (std::int32_t head_dim = 8; head_dim <= 256; head_dim += 8) {
    const bool whole = head_dim == 64 || head_dim == 128 || head_dim == 256;
    EXPECT_EQ(scope_of(problem_of({.head_dim = head_dim})), whole ? cuda::Scope::kDecodeStep : cuda::Scope::kTensorStep)
        << head_dim;
    EXPECT_EQ(scope_of(problem_of({.head_dim = head_dim, .token_major = true})), cuda::Scope::kTensorStep) << head_dim;
    const bool whole_pieces = head_dim % 16 == 0;
    EXPECT_EQ(scope_of(problem_of({.head_dim = head_dim, .kv_dtype = DType::kFloat8E4M3, .page_tokens = 16})),
              whole_pieces ? cuda::Scope::kTensorStep : cuda::Scope::kAnyCall)
        << head_dim;
    Problem capped = problem_of({.head_dim = head_dim});
    capped.scores.softcap = 30.0F;
    EXPECT_EQ(scope_of(capped), cuda::Scope::kAnyCall) << head_dim;
  }
}

/// Who builds a line: a warp up to 32 sequences, and up to 128 where outputs are no more than the workers.
TEST(CudaHost, R04_WarpsBuildShortLinesAndLongerOnesThatMayBeEven) {
  to_a_new_device({.multiprocessors = 132});
  struct Row {
    std::int64_t batch;
    std::int32_t kv_heads;
    bool short_line;
    bool may_be_even;
  };
  for (const Row& row : {Row{1, 8, true, true},
                         {16, 8, true, true},
                         {32, 8, true, false},
                         {33, 8, false, false},
                         {33, 4, true, true},
                         {34, 4, false, false},
                         {128, 1, true, true},
                         {129, 1, false, false}}) {
    const Asked asked{"", problem_of({.batch = row.batch, .q_heads = 4 * row.kv_heads, .kv_heads = row.kv_heads}), cuda_options()};
    const Workspace workspace = workspace_for(asked);
    runtime().begin();
    ASSERT_TRUE(decode(asked.problem, asked.options, workspace).ok());
    EXPECT_EQ(runtime().launches().back().short_line, row.short_line) << row.batch << " x " << row.kv_heads;
    EXPECT_EQ(runtime().launches().back().may_be_even, row.may_be_even) << row.batch << " x " << row.kv_heads;
  }
}

TEST(CudaHost, R30_AnOldDeviceIsRefusedByName) {
  to_a_new_device({.major = 7, .minor = 5});
  const Status old = supports(problem_of({}), cuda_options());
  EXPECT_EQ(old.code, StatusCode::kUnsupported);
  EXPECT_NE(std::strstr(old.message, "8.0"), nullptr) << old.message;
  to_a_new_device({.major = 8, .minor = 0, .shared_bytes = 163 * 1024});
  Options dependent = cuda_options();
  dependent.dependent_launch = true;
  EXPECT_NE(std::strstr(supports(problem_of({}), dependent).message, "options.dependent_launch"), nullptr);
  to_a_new_device({.cooperative = false});
  Options blocks = cuda_options();
  blocks.fixup = Fixup::kHostBlock;
  EXPECT_EQ(supports(problem_of({}), blocks).code, StatusCode::kUnsupported);
}

}  // namespace
}  // namespace lean::cuda_host
