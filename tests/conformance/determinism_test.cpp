// Determinism and concurrency: the same bits whoever comes last, whatever else runs, however often; bits that depend on
// a sequence alone where that is promised; no growth.
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstring>
#include <thread>
#include <tuple>

#include "fixup/workspace.hpp"
#include "support/reduced.hpp"
#include "support/run_and_check.hpp"
#include "support/tables.hpp"
#include "support/target.hpp"

namespace lean::support {
namespace {

/// decode() again and again on the same guarded memory.
class Repeated {
 public:
  explicit Repeated(const Case& c, const Options& options) : built_(c), options_(options), workspace_(built_.problem(), options) {}

  [[nodiscard]] std::vector<std::uint8_t> bits() { return bits_with(*options_.executor); }
  [[nodiscard]] std::vector<std::uint8_t> bits_with(const Executor& executor) {
    Options options = options_;
    options.executor = &executor;
    built_.poison_outputs();
    const Status status = decode_and_wait(built_.problem(), options, workspace_.get());
    return status.ok() ? built_.output_bits() : std::vector<std::uint8_t>{};
  }
  [[nodiscard]] TestProblem& built() { return built_; }

 private:
  TestProblem built_;
  Options options_;
  TestWorkspace workspace_;
};

TEST(Conformance, R41_StartOrderAndDelaysChangeNoBit) {
  if (on_cuda()) GTEST_SKIP() << "executors are the CPU's";
  // Every output is shared by several of seven workers; one has more contributors than the others.
  const Case c{.q_heads = 2, .kv_heads = 1, .head_dim = 8, .lens = {1300, 300, 1}, .workers = 7};
  const TestExecutor ascending(ExecutorKind::kAscending);
  for (const Policy& policy : {Policy::lean(), Policy::fixed_split(5), Policy::fixed_chunk(256)}) {
    Options options = options_of(c, ascending);
    options.policy = policy;
    Repeated serial(c, options);
    ASSERT_TRUE(run_and_check(serial.built(), reference::decode(serial.built().problem()), options));
    const auto bits = serial.bits();
    ASSERT_FALSE(bits.empty());
    const TestExecutor permuted(ExecutorKind::kPermuted, 3, 41);
    for (int seed = 0; seed < full_or_reduced(10000, 500) / 3; ++seed)
      ASSERT_EQ(serial.bits_with(*permuted.get()), bits) << "call " << seed;
    const TestExecutor delayed(ExecutorKind::kDelayed, 7, 41);
    for (int seed = 0; seed < full_or_reduced(700, 50); ++seed)
      ASSERT_EQ(serial.bits_with(*delayed.get()), bits) << "call " << seed;
  }
}

TEST(Conformance, R43_RunToRunBitsUnderLoad) {
  const Case c{.lens = {997, 0, 211, 67}, .workers = 6};
  const TestExecutor executor(ExecutorKind::kPermuted, 4, 43);
  std::atomic<bool> stop{false};
  std::vector<std::thread> hogs;
  for (int i = 0; i < 2; ++i) {
    hogs.emplace_back([&stop] {
      std::vector<std::uint64_t> memory(1 << 18);
      for (std::size_t at = 0; !stop; at = (at + 8) % memory.size()) memory[at] += at;
    });
  }
  for (const Fixup fixup : {Fixup::kLastArriver, Fixup::kTwoKernels}) {
    Options options = options_of(c, executor);
    options.fixup = fixup;
    Repeated calls(c, options);
    const auto bits = calls.bits();
    ASSERT_FALSE(bits.empty());
    for (int call = 0; call < full_or_reduced(1000, 50); ++call) {
      const bool same = calls.bits() == bits;
      EXPECT_TRUE(same) << "call " << call;
      if (!same) break;
    }
  }
  stop = true;
  for (std::thread& hog : hogs) hog.join();
}

TEST(Conformance, R44_PoliciesAndWorkerCountsStayWithinTheBound) {
  const Case c{.dtype = dtypes().front(), .lens = {1511, 97, 613}, .input = Input::kPeaks};
  const TestExecutor executor(c.executor);
  TestProblem built(c);
  const reference::Answer answer = reference::decode(built.problem());
  for (const Policy& policy : all_policies()) {
    for (std::int32_t workers = 1; workers <= 132; workers += full_or_reduced(3, 26)) {
      Options options = options_of(c, executor);
      options.policy = policy;
      options.workers = workers;
      EXPECT_TRUE(run_and_check(built, answer, options)) << "workers " << workers;
    }
  }
}

/// The bits of a sequence's last query token.
std::vector<std::uint8_t> bits_of_last_token(const TestProblem& built, std::int64_t sequence) {
  std::vector<std::uint8_t> bits = built.output_bits(sequence);
  const auto n_q = static_cast<std::size_t>(built.problem().q_tokens);
  return {bits.end() - static_cast<std::ptrdiff_t>(bits.size() / n_q), bits.end()};
}

TEST(Conformance, R44_BatchInvariantBitsDependOnTheSequenceAlone) {
  if (!target_serves({.policy = Policy::fixed_chunk()})) GTEST_SKIP() << "the target has no fixed_chunk";
  EveryNth some(2);
  for (const DType dtype : dtypes()) {
    for (const CpuIsa isa : available_isas()) {
      for (const Policy& policy : {Policy::fixed_chunk(128), Policy::fixed_chunk(), Policy::lean()}) {
        if (some.skips()) continue;
        Case alone{.dtype = dtype,
                   .q_heads = 6,
                   .lens = {1511},
                   .input = Input::kPeaks,
                   .ids = {7},
                   .policy = policy,
                   .determinism = Determinism::kBatchInvariant};
        alone.workers = 1;
        alone.isa = isa;
        const TestExecutor executor(ExecutorKind::kPool, 4);
        TestProblem first(alone);
        ASSERT_TRUE(run_and_check(first, reference::decode(first.problem()), options_of(alone, executor)));
        const auto bits = first.output_bits(0);
        std::vector<Case> others(6, alone);
        others[0].workers = 5;
        others[1].workers = 64;
        others[2].lens = {1511, 3001, 0, 17};  // neighbours after it
        others[2].ids = {7, 1, 2, 3};
        others[3].lens = {901, 1, 1511, 313};  // and around it
        others[3].ids = {9, 8, 7, 6};
        others[4].n_q = {4};  // a token of several, with the same keys in sight
        others[4].causal = true;
        others[5].n_q = {37};
        others[5].causal = true;
        for (std::size_t i = 2; i < others.size(); ++i) others[i].workers = 3 + static_cast<std::int32_t>(i);
        for (const Case& other : others) {
          for (const Fixup fixup : kFixups) {
            TestProblem built(other);
            Options options = options_of(other, executor);
            options.fixup = fixup;
            if (!served(built, options)) continue;
            ASSERT_TRUE(run(built, options));
            std::int64_t sequence = 0;
            while (other.ids[static_cast<std::size_t>(sequence)] != 7) ++sequence;
            EXPECT_EQ(bits_of_last_token(built, sequence), bits) << reproducer(other);
          }
        }
      }
    }
  }
}

/// A backend may have several kernels for it: end to end, as rows or in pages, alone or beside others, for one token or the last
/// of many.
TEST(Conformance, R44_BatchInvariantBitsAreTheSameInEveryLayout) {
  if (!target_serves({.policy = Policy::fixed_chunk()})) GTEST_SKIP() << "the target has no fixed_chunk";
  const std::int32_t tokens = full_or_reduced(2777, 1001);  // chunks are of 256
  const TestExecutor executor(ExecutorKind::kPool, 4);
  for (const DType dtype : dtypes()) {
    for (const auto& [q_heads, head_dim, kv_type] :
         {std::tuple{2, 64, KvType::kAsQueries}, std::tuple{8, 128, KvType::kAsQueries}, std::tuple{32, 128, KvType::kAsQueries},
          std::tuple{6, 256, KvType::kAsQueries}, std::tuple{8, 128, KvType::kE4M3}, std::tuple{8, 64, KvType::kE5M2}}) {
      const Case alone{.dtype = dtype,
                       .kv_type = kv_type,
                       .q_heads = q_heads,
                       .head_dim = head_dim,
                       .lens = {tokens},
                       .k_layout = "bhsd",
                       .v_layout = "bhsd",
                       .input = Input::kPeaks,
                       .ids = {7},
                       .policy = Policy::fixed_chunk(256),
                       .determinism = Determinism::kBatchInvariant,
                       .workers = 1};
      TestProblem first(alone);
      if (!served(first, options_of(alone, executor))) continue;
      ASSERT_TRUE(run_and_check(first, reference::decode(first.problem()), options_of(alone, executor)));
      const auto bits = first.output_bits(0);
      std::vector<Case> others(7, alone);
      others[0].workers = 7;
      others[1].lens = {tokens, 5, 0, tokens + 1322};
      others[1].ids = {7, 1, 2, 3};
      others[1].workers = 40;
      others[2].k_layout = others[2].v_layout = "bshd";
      others[3].page_tokens = 16;
      others[4].page_tokens = 48;
      others[4].k_layout = others[4].v_layout = "bshd";
      others[5].n_q = {3};
      others[5].causal = true;
      others[6].n_q = {19};
      others[6].causal = true;
      for (std::size_t i = 2; i < others.size(); ++i) others[i].workers = 3 + static_cast<std::int32_t>(i);
      for (const Case& other : others) {
        TestProblem built(other);
        const Options options = options_of(other, executor);
        if (!served(built, options)) continue;
        ASSERT_TRUE(run(built, options));
        EXPECT_EQ(bits_of_last_token(built, 0), bits) << reproducer(other);
      }
    }
  }
}

TEST(Conformance, R44_BatchInvariantChunksCountFromTheFirstValidToken) {
  if (!target_serves({.policy = Policy::fixed_chunk()})) GTEST_SKIP() << "the target has no fixed_chunk";
  // The same tokens behind different left padding.
  const Case plain{.lens = {1000}, .policy = Policy::fixed_chunk(128), .determinism = Determinism::kBatchInvariant, .workers = 5};
  Case padded = plain;
  padded.lens = {1077};
  padded.pad = {77};
  const TestExecutor executor(plain.executor);
  TestProblem a(plain);
  TestProblem b(padded);
  for (std::int32_t head = 0; head < plain.kv_heads; ++head) {
    for (std::int64_t t = 0; t < 1000; ++t) {
      for (std::int32_t i = 0; i < plain.head_dim; ++i) {
        b.set_k({0, head, t + 77, i}, a.k({0, head, t, i}));
        b.set_v({0, head, t + 77, i}, a.v({0, head, t, i}));
      }
    }
  }
  b.remember();
  ASSERT_TRUE(run(a, options_of(plain, executor)));
  ASSERT_TRUE(run(b, options_of(padded, executor)));
  EXPECT_EQ(a.output_bits(), b.output_bits());
}

void expect_bits_of_last_arriver_from_two_kernels(const Case& c) {
  const TestExecutor executor(c.executor);
  TestProblem built(c);
  const reference::Answer answer = reference::decode(built.problem());
  Options options = options_of(c, executor);
  ASSERT_TRUE(run_and_check(built, answer, options));
  const auto bits = built.output_bits();
  options.fixup = Fixup::kTwoKernels;
  ASSERT_TRUE(run_and_check(built, answer, options));
  EXPECT_EQ(built.output_bits(), bits) << reproducer(c);
  options.fixup = Fixup::kHostBlock;
  if (!pairs(c.policy, options.fixup) || !served(built, options)) return;
  EXPECT_TRUE(run_and_check(built, answer, options));
  if (on_cuda()) return;
  EXPECT_EQ(built.output_bits(), bits) << "host_block, " << reproducer(c);
}

TEST(Conformance, R45_LastArriverAndTwoKernelsGiveTheSameBits) {
  EveryNth some(7);
  for (const std::int32_t head_dim : dims_of_equal_tiles()) {
    for (const DType dtype : dtypes()) {
      for (const Policy& policy : all_policies()) {
        for (const std::int32_t workers : {1, 5, 33, 80}) {
          if (some.skips()) continue;
          expect_bits_of_last_arriver_from_two_kernels(
              {.dtype = dtype, .head_dim = head_dim, .lens = {1511, 0, 613}, .n_q = {3}, .policy = policy, .workers = workers});
        }
      }
    }
  }
}

TEST(Conformance, R45_HostBlockNeedsAnExecutorThatCannotStarveIt) {
  if (on_cuda()) GTEST_SKIP() << "executors are the CPU's";
  const Case c{.lens = {613}, .fixup = Fixup::kHostBlock};
  const TestProblem built(c);
  for (const ExecutorKind kind : {ExecutorKind::kAscending, ExecutorKind::kPermuted}) {
    const TestExecutor executor(kind, 2);
    EXPECT_EQ(supports(built.problem(), options_of(c, executor)).code, StatusCode::kUnsupported);
  }
  const TestExecutor executor(ExecutorKind::kDescending);
  EXPECT_TRUE(supports(built.problem(), options_of(c, executor)).ok());
  Options split = options_of(c, executor);
  split.policy = Policy::fixed_split(3);
  EXPECT_EQ(supports(built.problem(), split).code, StatusCode::kUnsupported);
  for (const std::int32_t workers : {1, 2, 5, 80}) {
    Case serial = c;
    serial.executor = ExecutorKind::kDescending;
    serial.workers = workers;
    EXPECT_TRUE(run_and_check(serial));
  }
}

// ---- several callers --------------------------------------------------------------------------------------------------

/// `threads` callers at once, each with its own problem, workspace and executor; every result as when alone.
bool concurrent_calls_match(int threads, int calls, ExecutorKind kind) {
  std::atomic<int> differences{0};
  std::atomic<int> ready{0};
  std::vector<std::thread> callers;
  for (int i = 0; i < threads; ++i) {
    callers.emplace_back([&, i] {
      Case c{.head_dim = 40, .lens = {301 + 13 * i, 0, 97}, .seed = static_cast<std::uint64_t>(i + 1), .workers = 3 + i};
      const TestExecutor serial(ExecutorKind::kAscending);
      const TestExecutor own(kind, 2);
      const Executor& executor = own.get() != nullptr ? *own.get() : default_executor();
      Options options = options_of(c, serial);
      Repeated repeated(c, options);
      ++ready;
      while (ready < threads) std::this_thread::yield();  // first calls race
      std::vector<std::vector<std::uint8_t>> results;
      for (int call = 0; call < calls; ++call) results.push_back(repeated.bits_with(executor));
      const auto alone = repeated.bits();
      for (const auto& result : results) differences += result == alone && !alone.empty() ? 0 : 1;
    });
  }
  for (std::thread& caller : callers) caller.join();
  return differences == 0;
}

TEST(Conformance, R35_ConcurrentCallersGetTheSerialBits) {
  EXPECT_TRUE(concurrent_calls_match(4, full_or_reduced(200, 10), ExecutorKind::kPool));
  EXPECT_TRUE(concurrent_calls_match(4, full_or_reduced(200, 10), ExecutorKind::kAscending));
}

TEST(Conformance, R35_ConcurrentCallersMayShareTheDefaultExecutor) {
  EXPECT_TRUE(concurrent_calls_match(3, full_or_reduced(100, 5), ExecutorKind::kDefault));
}

/// In a fresh process, so that the race is about everything a first call sets up.
TEST(ConformanceDeathTest, R37_FirstCallsMayRace) {
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  EXPECT_EXIT(std::_Exit(concurrent_calls_match(4, 3, ExecutorKind::kDefault) ? 0 : 1), testing::ExitedWithCode(0), "");
}

TEST(Conformance, R36_AWorkspaceInUseIsRefused) {
  if (on_cuda()) GTEST_SKIP() << "a call from inside an executor";
  const Case c{.lens = {37}};
  struct Nested {
    const TestProblem& built;
    Options options;
    Workspace workspace;
    StatusCode inner = StatusCode::kOk;
  };
  TestProblem built(c);
  const TestExecutor serial(ExecutorKind::kAscending);
  Options options = options_of(c, serial);
  const TestWorkspace workspace(built.problem(), options);
  Nested nested{built, options, workspace.get()};
  // While the outer call runs, its executor makes a second call on the same workspace.
  const Executor executor{.context = &nested,
                          .run =
                              [](void* context, std::int32_t workers, void (*body)(void*, std::int32_t), void* argument) {
                                auto& call = *static_cast<Nested*>(context);
                                call.inner = decode(call.built.problem(), call.options, call.workspace).code;
                                for (std::int32_t w = 0; w < workers; ++w) body(argument, w);
                              },
                          .worker_count = 1};
  options.executor = &executor;
  EXPECT_TRUE(decode(built.problem(), options, workspace.get()).ok());
  EXPECT_EQ(nested.inner, StatusCode::kWorkspaceInUse);
  EXPECT_TRUE(decode(built.problem(), options, workspace.get()).ok());
}

/// What an aborted call may leave: counters that are not 0. Whichever it is, on the CPU the call is refused and writes nothing.
TEST(Conformance, R15_ADirtyStateIsRefusedAndAResetMendsIt) {
  if (on_cuda()) GTEST_SKIP() << "gpu_tests have it: a device notices behind the call";
  for (const Policy& policy : {Policy::lean(), Policy::fixed_split(3), Policy::fixed_chunk(64)}) {
    const Case c{.lens = {1511, 0, 97}, .policy = policy, .workers = 7};
    const TestExecutor executor(c.executor);
    const Options options = options_of(c, executor);
    TestProblem built(c);
    const TestWorkspace workspace(built.problem(), options);
    ASSERT_TRUE(decode(built.problem(), options, workspace.get()).ok());
    const auto bits = built.output_bits();
    auto* const counters = static_cast<std::byte*>(workspace.get().state) + fixup::kStateHeaderBytes;
    for (const std::size_t slot : {0U, 1U}) {
      for (const fixup::Counter dirt : {1U, 0xFFFFFFFFU}) {
        std::memcpy(counters + slot * sizeof(dirt), &dirt, sizeof(dirt));
        built.poison_outputs();
        const auto poison = built.output_bits();
        const Status status = decode(built.problem(), options, workspace.get());
        EXPECT_EQ(status.code, StatusCode::kWorkspaceDirty) << status.message;
        EXPECT_EQ(built.output_bits(), poison);
        ASSERT_TRUE(reset_workspace(workspace.get(), options).ok());
        EXPECT_TRUE(decode(built.problem(), options, workspace.get()).ok());
        EXPECT_EQ(built.output_bits(), bits);
      }
    }
  }
}

// ---- endurance --------------------------------------------------------------------------------------------------------

/// Resident memory of this process.
std::int64_t resident_bytes() {
  std::FILE* file = std::fopen("/proc/self/statm", "r");
  long long total = 0;
  long long resident = 0;
  const int read = std::fscanf(file, "%lld %lld", &total, &resident);
  std::fclose(file);
  return read == 2 ? resident * sysconf(_SC_PAGESIZE) : -1;
}

TEST(Conformance, R52_AHundredThousandCallsDoNotGrow) {
  if (on_cuda()) GTEST_SKIP() << "gpu_tests look at device memory";
  const Case c{.q_heads = 2, .kv_heads = 1, .head_dim = 8, .lens = {300, 5}, .workers = 2};
  const TestExecutor serial(ExecutorKind::kAscending);
  Options options;  // with the library's own executor
  options.workers = 2;
  TestProblem built(c);
  const TestWorkspace workspace(built.problem(), options);
  const auto failures_of = [&](const Executor* executor, int calls) {
    int failures = 0;
    options.executor = executor;
    for (int i = 0; i < calls; ++i) failures += decode(built.problem(), options, workspace.get()).ok() ? 0 : 1;
    return failures;
  };
  EXPECT_EQ(failures_of(nullptr, 1000) + failures_of(serial.get(), 1000), 0);
  const std::int64_t before = resident_bytes();
  EXPECT_EQ(failures_of(nullptr, full_or_reduced(10000, 1000)) + failures_of(serial.get(), full_or_reduced(90000, 2000)), 0);
  const std::int64_t after = resident_bytes();
  ASSERT_GT(before, 0);
  // A leak of 3 bytes a call would show; a sanitizer's own bookkeeping grows too.
  EXPECT_LE(after - before, full_or_reduced(1 << 18, 1 << 23)) << "resident memory grew";
  EXPECT_EQ(built.memory_faults(), "");
}

}  // namespace
}  // namespace lean::support
