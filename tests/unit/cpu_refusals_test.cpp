// What the CPU backend refuses: one reason a feature, and supports(), workspace_size() and decode() of one mind at every
// point of a sweep over all enumerations and features; what is refused leaves the outputs alone.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "api/backends.hpp"
#include "lean/lean.hpp"
#include "support/executors.hpp"
#include "support/guarded_buffer.hpp"
#include "support/reduced.hpp"
#include "support/tables.hpp"

namespace lean {
namespace {

using support::full_or_reduced;
using support::GuardedBuffer;

constexpr std::int32_t kDims = 8;
constexpr std::int32_t kCapacity = 20;
constexpr std::int32_t kLengths[] = {17, 3};
constexpr std::int32_t kPads[] = {2, 0};
constexpr std::int32_t kCumulativeQueries[] = {0, 1, 2};
constexpr std::int32_t kCumulativeKeys[] = {0, 17, 20};
constexpr std::int32_t kPages[] = {0, 1, 2, 3};
constexpr float kNumbers[64] = {};
constexpr std::uint32_t kBits[64] = {};

/// Small real memory, big enough for any type and any of the features below.
class Bench {
 public:
  Bench() : inputs_(64 * 1024), o_(kOutputBytes), lse_(16), state_(256 * 1024), scratch_(8 * 1024 * 1024) {
    inputs_.fill(std::byte{0});
    state_.fill(std::byte{0});
  }

  [[nodiscard]] Problem problem() const {
    Problem p{.batch = 2, .q_heads = 2, .kv_heads = 1, .head_dim = kDims};
    p.q = {.data = inputs_.data(), .strides = {2 * kDims, kDims, kDims, 1}};
    p.k = {.data = inputs_.data(), .strides = {kCapacity * kDims, kDims, kDims, 1}};
    p.v = p.k;
    p.o = {.data = o_.data(), .strides = {2 * kDims, kDims, 2 * kDims, 1}};
    p.lse = {.data = lse_.as<float>(), .sequence_stride = 2, .head_stride = 1, .token_stride = 2};
    p.kv_capacity = kCapacity;
    p.kv_lengths = kLengths;
    return p;
  }

  /// All three calls say the same; a refusal writes nothing, a yes writes every row. Returns what they say.
  StatusCode expect_agreement(const Problem& problem, const Options& options, std::int32_t output_dims = kDims) {
    o_.fill(support::kPoison);
    lse_.fill(support::kPoison);
    const Status answer = supports(problem, options);
    const WorkspaceSize size = workspace_size(problem, options);
    EXPECT_EQ(size.status.code, answer.code) << answer.message << " | " << size.status.message;
    EXPECT_STREQ(size.status.message, answer.message);
    if (size.state_bytes > state_.size_bytes() || size.scratch_bytes > scratch_.size_bytes()) {
      ADD_FAILURE() << "the bench is too small: " << size.state_bytes << ", " << size.scratch_bytes;
      return answer.code;
    }
    const Status result = decode(problem, options, {state_.data(), state_.size_bytes(), scratch_.data(), scratch_.size_bytes()});
    EXPECT_EQ(result.code, answer.code) << answer.message << " | " << result.message;
    EXPECT_STREQ(result.message, answer.message);
    EXPECT_EQ(answer.ok(), answer.message[0] == '\0');
    const auto poison = [](std::byte b) { return b == support::kPoison; };
    if (answer.ok()) {
      const auto elements = static_cast<std::size_t>(2 * 2 * output_dims * bytes_of(problem.o.dtype));
      const auto written = o_.bytes().subspan(0, elements);
      EXPECT_TRUE(std::none_of(written.begin(), written.end(), poison));
    } else {
      EXPECT_TRUE(std::all_of(o_.bytes().begin(), o_.bytes().end(), poison)) << answer.message;
      EXPECT_TRUE(std::all_of(lse_.bytes().begin(), lse_.bytes().end(), poison)) << answer.message;
    }
    return answer.code;
  }

 private:
  static constexpr std::size_t kOutputBytes = 2 * 2 * kDims * sizeof(float);

  GuardedBuffer inputs_, o_, lse_, state_, scratch_;
};

// ---- one reason a feature ---------------------------------------------------------------------------------------------

struct Refusal {
  StatusCode code;
  const char* words;
  std::function<void(Problem&, Options&)> ask;
};

void never_run(void*, std::int32_t, void (*)(void*, std::int32_t), void*) {}

void run_ascending(void*, std::int32_t workers, void (*body)(void*, std::int32_t), void* argument) {
  for (std::int32_t worker = 0; worker < workers; ++worker) body(argument, worker);
}

const std::vector<Refusal>& refusals() {
  static const Executor kNoRun{.worker_count = 2, .descending_or_concurrent = true};
  static const Executor kNoThreads{.run = never_run, .worker_count = 0, .descending_or_concurrent = true};
  static const Executor kAnyOrder{.run = run_ascending, .worker_count = 2};
  constexpr auto kUnsupported = StatusCode::kUnsupported;
  constexpr auto kInvalid = StatusCode::kInvalidArgument;
  static const std::vector<Refusal> kRefusals = {
      {kUnsupported, "options.backend = 1: not in this build", [](Problem&, Options& o) { o.backend = Backend::kCuda; }},
      {kInvalid, "options.executor.worker_count = 2: run must be given", [](Problem&, Options& o) { o.executor = &kNoRun; }},
      {kInvalid, "options.executor.worker_count = 0: ", [](Problem&, Options& o) { o.executor = &kNoThreads; }},
      {kUnsupported, "options.fixup = 2: host_block needs a policy",
       [](Problem&, Options& o) {
         o.fixup = Fixup::kHostBlock;
         o.policy = Policy::fixed_split(3);
       }},
      {kUnsupported, "options.fixup = 2: host_block waits for higher-numbered workers",
       [](Problem&, Options& o) {
         o.fixup = Fixup::kHostBlock;
         o.executor = &kAnyOrder;
       }},
      {StatusCode::kTooLarge, "options.policy.splits = 128: ",
       [](Problem& p, Options& o) {
         p.batch = 1 << 30;
         p.q_heads = p.kv_heads = 1 << 14;
         p.k.strides = p.v.strides = {0, 0, 0, 1};
         p.o.strides.sequence = std::int64_t{kDims} << 14;
         p.lse.sequence_stride = 1 << 14;
         o.policy = Policy::fixed_split(128);
       }},
  };
  return kRefusals;
}

TEST(CpuRefusals, R30_EveryRefusalNamesItsReason) {
  Bench bench;
  for (const Refusal& refusal : refusals()) {
    Problem problem = bench.problem();
    Options options{.workers = 2};
    ASSERT_EQ(bench.expect_agreement(problem, options), StatusCode::kOk);
    refusal.ask(problem, options);
    if (options.backend == Backend::kCuda && backend_of(Backend::kCuda) != nullptr) continue;  // another build's refusal
    EXPECT_EQ(bench.expect_agreement(problem, options), refusal.code) << refusal.words;
    const Status status = supports(problem, options);
    EXPECT_EQ(std::string(status.message).rfind(refusal.words, 0), 0U)
        << "\"" << status.message << "\" does not begin with \"" << refusal.words << '"';
  }
}

TEST(CpuRefusals, R30_InstructionSetsThisMachineLacksAreRefusedAndOthersServed) {
  Bench bench;
  for (std::int32_t i = 0; i <= 5; ++i) {
    const auto isa = static_cast<CpuIsa>(i);
    const StatusCode code = bench.expect_agreement(bench.problem(), {.workers = 2, .cpu_isa = isa});
    EXPECT_EQ(code, cpu_isa_available(isa) ? StatusCode::kOk : StatusCode::kUnsupported) << name_of(isa);
  }
}

// ---- sweeps -----------------------------------------------------------------------------------------------------------

TEST(CpuRefusals, R30_SupportsAgreesWithDecodeForEveryCombinationOfTypes) {
  Bench bench;
  int served = 0;
  for (int q = -1; q <= 5; ++q) {
    for (int k = -1; k <= 5; ++k) {
      for (int v = -1; v <= 5; ++v) {
        for (int o = -1; o <= 5; ++o) {
          Problem problem = bench.problem();
          problem.q.dtype = static_cast<DType>(q);
          problem.k.dtype = static_cast<DType>(k);
          problem.v.dtype = static_cast<DType>(v);
          problem.o.dtype = static_cast<DType>(o);
          served += bench.expect_agreement(problem, {.workers = 2}) == StatusCode::kOk ? 1 : 0;
          if (testing::Test::HasFailure()) return;
        }
      }
    }
  }
  EXPECT_EQ(served, 9);  // all fp32, all fp16, all bf16, and each with K and V in either fp8
}

TEST(CpuRefusals, R30_SupportsAgreesWithDecodeForEveryCombinationOfOptions) {
  Bench bench;
  const support::TestExecutor pool(support::ExecutorKind::kDescending, 3);
  const support::TestExecutor any_order(support::ExecutorKind::kAscending, 3);
  std::int64_t served = 0;
  std::int64_t refused = 0;
  for (int backend = -1; backend <= 2; ++backend) {
    for (int kind = -1; kind <= 4; ++kind) {
      for (const int splits : {-1, 0, 3, 128, 129}) {
        for (const int chunk : {-1, 0, 5}) {
          for (int fixup = -1; fixup <= 3; ++fixup) {
            for (int determinism = -1; determinism <= 3; ++determinism) {
              for (const int isa : full_or_reduced<std::vector<int>>({-1, 0, 1, 2, 3, 4, 5, 6}, {-1, 1, 6})) {
                for (const int workers : {-1, 2, 40, 4097}) {
                  for (const auto* executor : {&pool, &any_order}) {
                    const Options options{.backend = static_cast<Backend>(backend),
                                          .policy = {static_cast<Policy::Kind>(kind), splits, chunk},
                                          .fixup = static_cast<Fixup>(fixup),
                                          .determinism = static_cast<Determinism>(determinism),
                                          .workers = workers,
                                          .cpu_isa = static_cast<CpuIsa>(isa),
                                          .executor = executor->get()};
                    ++(bench.expect_agreement(bench.problem(), options) == StatusCode::kOk ? served : refused);
                    if (testing::Test::HasFailure()) return;
                  }
                }
              }
            }
          }
        }
      }
    }
  }
  EXPECT_GT(served, 100);
  EXPECT_GT(refused, served);
}

TEST(CpuRefusals, R30_SupportsAgreesWithDecodeForEveryPairOfFeatures) {
  using Change = std::function<void(Problem&, Options&)>;
  std::vector<Change> features = {
      [](Problem&, Options&) {},
      [](Problem& p, Options&) { p.scores.causal = true; },
      [](Problem& p, Options&) { p.scores.window_left = 0; },
      [](Problem& p, Options&) { p.scores.window_right = 3; },
      [](Problem& p, Options&) { p.scores.softcap = 0.5F; },
      [](Problem& p, Options&) { p.k.dtype = p.v.dtype = DType::kFloat8E4M3; },
      [](Problem& p, Options&) { p.scores.alibi_slopes = kNumbers; },
      [](Problem& p, Options&) { p.scores.sinks = kNumbers; },
      [](Problem& p, Options&) { p.scores.mask = kNumbers; },
      [](Problem& p, Options&) { p.scores.mask = kNumbers, p.scores.mask_is_boolean = true; },
      [](Problem& p, Options&) { p.scores.tree_mask = kBits; },
      [](Problem& p, Options&) { p.lse.data = nullptr; },
      [](Problem& p, Options&) { p.kv_lengths = nullptr; },
      [](Problem& p, Options&) { p.kv_left_pad = kPads; },
      [](Problem& p, Options&) { p.cu_q_tokens = kCumulativeQueries, p.total_q_tokens = 2; },
      [](Problem& p, Options&) { p.cu_kv_tokens = kCumulativeKeys, p.total_kv_tokens = 20; },
      [](Problem& p, Options&) { p.value_dim = 5; },
      [](Problem& p, Options&) { p.head_dim = p.value_dim = 3; },
      [](Problem& p, Options&) { p.scores.scale = 0.25F; },
      [](Problem& p, Options&) { p.k.strides.dim = 2, p.k.strides.token = 16, p.k.strides.sequence = 0; },
      [](Problem& p, Options&) { p.v.strides = {0, 0, 0, 1}; },
      [](Problem& p, Options&) {
        p.append.rotary_interleaved = true, p.append.rotary_dim = 2, p.append.rotary_cos = p.append.rotary_sin = kNumbers;
      },
      [](Problem& p, Options&) { p.scales_per_head = true, p.k_scales = kNumbers; },
      [](Problem& p, Options&) { p.pages = {.page_tokens = 5, .page_count = 4, .block_table = kPages, .block_table_stride = 0}; },
      [](Problem& p, Options&) { p.pages = {.page_tokens = 5, .page_count = 4, .page_indptr = kPages, .page_indices = kPages}; },
      [](Problem& p, Options&) { p.pages.block_table = kPages; },  // not paged: no page has tokens
      [](Problem&, Options& o) { o.policy = Policy::data_parallel(); },
      [](Problem&, Options& o) { o.policy = Policy::fixed_split(2); },
      [](Problem&, Options& o) { o.determinism = Determinism::kBatchInvariant; },
      [](Problem&, Options& o) { o.fixup = Fixup::kTwoKernels; },
      [](Problem&, Options& o) { o.fixup = Fixup::kHostBlock; },
      [](Problem&, Options& o) { o.cpu_isa = CpuIsa::kScalar; },
      [](Problem&, Options& o) { o.check_workspace = true; },
  };
  for (const Refusal& refusal : refusals()) {
    if (refusal.code != StatusCode::kTooLarge) features.push_back(refusal.ask);  // another policy would serve it, and run
  }
  Bench bench;
  int served = 0;
  for (const Change& first : features) {
    for (const Change& second : features) {
      Problem problem = bench.problem();
      Options options{.workers = 3};
      first(problem, options);
      second(problem, options);
      const std::int32_t dims = problem.value_dim != 0 ? problem.value_dim : problem.head_dim;
      if (dims < kDims) problem.o.strides = {2 * dims, dims, 2 * dims, 1};
      if (problem.k.strides.dim == 2 && problem.cu_kv_tokens != nullptr) problem.k.strides.token = 8;
      served += bench.expect_agreement(problem, options, dims) == StatusCode::kOk ? 1 : 0;
      if (testing::Test::HasFailure()) {
        FAIL() << "features " << &first - features.data() << " and " << &second - features.data();
      }
    }
  }
  EXPECT_GT(served, 200);
}

TEST(CpuRefusals, SupportsAndWorkspaceSizeReadNoTensorAndNoLength) {
  void* nothing = mmap(nullptr, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(nothing, MAP_FAILED);
  Problem p = Bench().problem();
  p.q.data = p.k.data = p.v.data = nothing;
  p.o.data = static_cast<std::byte*>(nothing) + 64;
  p.lse.data = static_cast<float*>(nothing) + 64;
  p.kv_lengths = p.kv_left_pad = static_cast<const std::int32_t*>(nothing);
  EXPECT_TRUE(supports(p, {}).ok()) << supports(p, {}).message;
  EXPECT_TRUE(workspace_size(p, {}).status.ok());
  p.cu_q_tokens = p.cu_kv_tokens = static_cast<const std::int32_t*>(nothing);
  p.total_q_tokens = p.total_kv_tokens = 2;
  for (const Policy& policy : support::all_policies()) {
    EXPECT_TRUE(supports(p, {.policy = policy}).ok()) << supports(p, {.policy = policy}).message;
    EXPECT_TRUE(workspace_size(p, {.policy = policy}).status.ok());
  }
  munmap(nothing, 4096);
}

}  // namespace
}  // namespace lean
