// Score rules: softcap, ALiBi, sinks, windows, masks; alone, in pairs, and with every way of laying out and cutting up a call. What
// they hide holds NaN in every case here.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cmath>
#include <cstring>

#include "backends/reference/load.hpp"
#include "problem/address.hpp"
#include "support/reduced.hpp"
#include "support/run_and_check.hpp"
#include "support/sweeps.hpp"
#include "support/tables.hpp"

namespace lean::support {
namespace {

/// Shapes that a feature must go with.
std::vector<Case> shapes() {
  return {
      {.lens = {1, 613, 0, 97}},
      {.q_heads = 6, .lens = {37, 300}, .n_q = {5}, .causal = true},
      {.q_heads = 8, .kv_heads = 1, .head_dim = 40, .lens = {211, 5}, .n_q = {3}, .pad = {17, 5}},
      {.head_dim = 24, .lens = {101, 53, 7, 0, 411}, .n_q = {1, 53, 7, 2, 0}, .causal = true, .q_layout = "shd", .k_layout = "hsd"},
      {.head_dim = 33, .value_dim = 17, .lens = {131}, .n_q = {20}, .capacity = 200, .k_layout = "bhds", .v_layout = "bhsd~inner2"},
      {.q_heads = 16, .kv_heads = 1, .lens = {530}, .n_q = {37}, .causal = true},  // several row blocks
  };
}

TEST(Conformance, EveryFeatureWithEveryShapeAndType) {
  EveryNth some(11);
  for (const DType dtype : dtypes()) {
    for (Case c : shapes()) {
      c.dtype = dtype;
      for (const Feature& feature : features()) {
        if (some.skips()) continue;
        Case asked = c;
        feature.ask(asked);
        expect_right_on_every_isa(asked);
      }
    }
  }
}

TEST(Conformance, EveryPairOfFeatures) {
  const std::vector<Policy> policies = all_policies();
  EveryNth some(17);
  std::size_t pair = 0;
  for (const Feature& first : features()) {
    for (const Feature& second : features()) {
      for (Case c : shapes()) {
        ++pair;
        if (some.skips()) continue;
        first.ask(c);
        second.ask(c);
        c.dtype = dtypes()[pair % dtypes().size()];
        c.policy = policies[pair % policies.size()];
        c.fixup = kFixups[pair / 2 % 3];
        if (!pairs(c.policy, c.fixup)) c.fixup = Fixup::kLastArriver;
        c.workers = static_cast<std::int32_t>(1 + pair % 11);
        c.isa = available_isas()[pair % available_isas().size()];
        c.seed = pair;
        EXPECT_TRUE(run_and_check(c));
      }
    }
  }
}

TEST(Conformance, EveryFeatureWithEveryPolicyFixupAndWorkerCount) {
  for (const Feature& feature : features()) {
    Case c{.q_heads = 6,
           .head_dim = 48,
           .lens = {full_or_reduced(1511, 613), 1, 0, full_or_reduced(613, 97)},
           .n_q = {2},
           .causal = true};
    feature.ask(c);
    expect_right_however_shared_out(c, full_or_reduced<std::vector<std::int32_t>>({1, 3, 40}, {3, 40}));
  }
}

TEST(Conformance, R10_WhatARuleHidesChangesNoBit) {
  EveryNth some(17);
  for (const DType dtype : dtypes()) {
    for (const CpuIsa isa : available_isas()) {
      for (const Feature& feature : features()) {
        for (Case c : shapes()) {
          if (some.skips()) continue;
          c.dtype = dtype;
          c.isa = isa;
          feature.ask(c);
          c.fill = Fill::kZero;
          const TestExecutor executor(c.executor);
          TestProblem zeros(c);
          if (!served(zeros, options_of(c, executor))) continue;
          ASSERT_TRUE(run(zeros, options_of(c, executor)));
          for (const Fill fill : {Fill::kNan, Fill::kInfinity}) {
            c.fill = fill;
            TestProblem built(c);
            ASSERT_TRUE(run(built, options_of(c, executor)));
            EXPECT_EQ(built.output_bits(), zeros.output_bits()) << reproducer(c);
          }
        }
      }
    }
  }
}

// ---- scale --------------------------------------------------------------------------------------------------------------

TEST(Conformance, AScaleOfMinusZeroWeighsAllKeysAlike) {
  EveryNth some(3);
  for (const DType dtype : dtypes()) {
    for (const Feature& feature : features()) {
      if (some.skips()) continue;
      Case c{.dtype = dtype, .lens = {613, 5, 0}, .n_q = {2}, .scale = -0.0F, .input = Input::kPeaks};
      feature.ask(c);
      expect_right_on_every_isa(c);
    }
    Case plain{.dtype = dtype, .lens = {256}, .scale = -0.0F, .input = Input::kPeaks};
    const TestExecutor executor(plain.executor);
    TestProblem built(plain);
    ASSERT_TRUE(run(built, options_of(plain, executor)));
    EXPECT_NEAR(static_cast<double>(built.lse({0, 1, 0})), std::log(256.0), 1e-6);
  }
}

// ---- windows ----------------------------------------------------------------------------------------------------------

/// Pages that may not be touched, with the last `open_bytes` readable.
class ClosedMemory {
 public:
  ClosedMemory(std::size_t bytes, std::size_t open_bytes) : bytes_(bytes) {
    memory_ = static_cast<std::byte*>(mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    std::memset(memory_ + bytes - open_bytes, 0, open_bytes);
    mprotect(memory_, bytes - open_bytes, PROT_NONE);
  }
  ~ClosedMemory() { munmap(memory_, bytes_); }
  ClosedMemory(const ClosedMemory&) = delete;
  ClosedMemory& operator=(const ClosedMemory&) = delete;

  [[nodiscard]] std::byte* data() const { return memory_; }

 private:
  std::byte* memory_ = nullptr;
  std::size_t bytes_;
};

TEST(Conformance, TokensOutsideAWindowAreNotRead) {
  if (on_cuda()) GTEST_SKIP() << "the pages are the host's";
  constexpr std::int32_t kTokens = 1 << 14;
  constexpr std::int32_t kDims = 64;
  constexpr std::size_t kBytes = std::size_t{kTokens} * kDims * sizeof(float);
  constexpr std::int32_t kOpenTokens = 64;  // 16 KB: whole pages
  const ClosedMemory k(kBytes, std::size_t{kOpenTokens} * kDims * sizeof(float));
  const ClosedMemory v(kBytes, std::size_t{kOpenTokens} * kDims * sizeof(float));
  for (const Policy& policy : all_policies()) {
    Case c{.dtype = DType::kFloat32, .q_heads = 2, .kv_heads = 1, .lens = {1}, .n_q = {4}, .causal = true, .policy = policy};
    const TestExecutor executor(c.executor);
    TestProblem built(c);
    Problem& p = built.problem();
    p.kv_capacity = kTokens;
    p.kv_lengths = nullptr;
    p.k = {.data = k.data(), .strides = {.head = 0, .token = kDims}};
    p.v = {.data = v.data(), .strides = {.head = 0, .token = kDims}};
    p.scores.window_left = kOpenTokens - 4;  // the first of four queries sees the first open token
    const TestWorkspace workspace(p, options_of(c, executor));
    ASSERT_TRUE(decode(p, options_of(c, executor), workspace.get()).ok());
    EXPECT_NEAR(static_cast<double>(built.lse({0, 0, 0})), std::log(61.0), 1e-6);
    EXPECT_NEAR(static_cast<double>(built.lse({0, 1, 3})), std::log(61.0), 1e-6);
  }
}

/// Windows whose first tile or chunk differs from row to row: the bits of the last query stay those of a call of its own.
TEST(Conformance, R44_BatchInvariantBitsWithAWindowDependOnTheSequenceAlone) {
  EveryNth some(7);
  for (const DType dtype : dtypes()) {
    for (const std::int32_t first_key : {1500, 323, 387, 193, 458, 1}) {  // of the last query
      for (const std::int32_t chunk_tokens : {64, 128}) {
        if (some.skips()) continue;
        Case alone{.dtype = dtype,
                   .q_heads = 2,
                   .kv_heads = 1,
                   .head_dim = 256,  // LeanTiles of 32 or 64 tokens
                   .lens = {1511},
                   .causal = true,
                   .window_left = 1510 - first_key,
                   .policy = Policy::fixed_chunk(chunk_tokens),
                   .determinism = Determinism::kBatchInvariant,
                   .workers = 1};
        const TestExecutor executor(alone.executor);
        if (!target_serves(alone)) continue;
        TestProblem one(alone);
        ASSERT_TRUE(run(one, options_of(alone, executor)));
        for (const std::int32_t n_q : {1, 5, 40, 150}) {
          for (const std::int32_t workers : {1, 17}) {
            Case c = alone;
            c.lens = {1511, 200};
            c.n_q = {n_q};
            c.workers = workers;
            TestProblem built(c);
            ASSERT_TRUE(run(built, options_of(c, executor)));
            for (std::int32_t head = 0; head < c.q_heads; ++head) {
              EXPECT_EQ(built.lse({0, head, n_q - 1}), one.lse({0, head, 0})) << reproducer(c);
              for (std::int32_t i = 0; i < c.head_dim; ++i) {
                ASSERT_EQ(built.o({0, head, n_q - 1, i}), one.o({0, head, 0, i})) << reproducer(c);
              }
            }
          }
        }
      }
    }
  }
}

// ---- sinks, empty rows --------------------------------------------------------------------------------------------------

TEST(Conformance, R07_AnEmptyRowWithASinkIsZeroAndItsLseIsTheSink) {
  for (const DType dtype : dtypes()) {
    for (const CpuIsa isa : available_isas()) {
      Case c{.dtype = dtype, .lens = {0, 211, 4}, .n_q = {6}, .causal = true, .sinks = true, .isa = isa};
      const TestExecutor executor(c.executor);
      TestProblem built(c);
      if (!served(built, options_of(c, executor))) return;
      ASSERT_TRUE(run_and_check(built, reference::decode(built.problem()), options_of(c, executor)));
      for (std::int32_t head = 0; head < c.q_heads; ++head) {
        const float sink = built.problem().scores.sinks[head];
        for (const auto& [sequence, token] : {std::pair{0, 0}, {0, 5}, {2, 1}}) {  // the last: before the first of 4 keys
          EXPECT_EQ(built.lse({sequence, head, token}), sink);
          EXPECT_EQ(built.o({sequence, head, token, 7}), 0.0);
        }
      }
    }
  }
}

/// Equal scores of 0 and a sink of ln n: half of the weight is the sink's, however many workers share the output.
TEST(Conformance, ASinkEntersOnceHoweverManyShareTheOutput) {
  const std::int32_t tokens = full_or_reduced(4096, 2048);
  for (const Policy& policy : all_policies()) {
    for (const Fixup fixup : kFixups) {
      for (const std::int32_t workers : {1, 2, 7, 40, 132}) {
        if (!pairs(policy, fixup)) continue;
        Case c{
            .dtype = dtypes().front(), .lens = {tokens}, .sinks = true, .input = Input::kUniform, .policy = policy, .fixup = fixup};
        c.workers = workers;
        const TestExecutor executor(c.executor);
        TestProblem built(c);
        if (!served(built, options_of(c, executor))) continue;
        for (std::int32_t head = 0; head < c.q_heads; ++head) {
          const_cast<float*>(built.problem().scores.sinks)[head] = std::log(static_cast<float>(tokens));
          for (std::int64_t t = 0; t < tokens; ++t) built.set_v({0, head / 2, t, 5}, 1.0);
        }
        built.remember();
        ASSERT_TRUE(run(built, options_of(c, executor)));
        EXPECT_NEAR(built.o({0, 1, 0, 5}), 0.5, 1e-6) << reproducer(c);
        EXPECT_NEAR(static_cast<double>(built.lse({0, 1, 0})), std::log(2.0 * tokens), 2e-6) << reproducer(c);
      }
    }
  }
}

TEST(Conformance, R07_RowsThatAMaskHidesWhollyAreEmpty) {
  if (!target_serves({.mask = Mask::kBoolean})) GTEST_SKIP() << "the target has no masks";
  for (const Mask mask : {Mask::kBoolean, Mask::kFloat32}) {
    Case c{.q_heads = 8, .lens = {211, 613}, .n_q = {9}, .mask = mask};
    const TestExecutor executor(c.executor);
    TestProblem built(c);
    if (!served(built, options_of(c, executor))) return;
    const reference::Answer answer = reference::decode(built.problem());
    ASSERT_TRUE(run_and_check(built, answer, options_of(c, executor)));
    int empty = 0;
    for (std::int64_t b = 0; b < 2; ++b) {
      for (std::int32_t token = 0; token < 9; ++token) {
        for (std::int32_t head = 0; head < c.q_heads; ++head) {
          if (answer.facts[static_cast<std::size_t>(answer.row(b, token, head))].visible_tokens > 0) continue;
          ++empty;
          EXPECT_EQ(built.lse({b, head, token}), -INFINITY);
          EXPECT_EQ(built.o({b, head, token, 3}), 0.0);
        }
      }
    }
    EXPECT_GT(empty, 5);
  }
}

// ---- huge scores --------------------------------------------------------------------------------------------------------

TEST(Conformance, R11_HugeScoresUnderASoftcap) {
  for (const DType dtype : dtypes()) {
    for (const CpuIsa isa : available_isas()) {
      for (const float softcap : {0.01F, 1.0F, 50.0F, 1e6F}) {
        for (const float q_std : {1e-3F, 1.0F, 1e3F}) {
          Case c{.dtype = dtype, .lens = {613, 37}, .softcap = softcap, .input = Input::kPeaks, .q_std = q_std, .isa = isa};
          EXPECT_TRUE(run_and_check(c));
        }
      }
    }
  }
}

/// The fp16 and bf16 forms of a mask of powers of two are exact: the same bits.
TEST(Conformance, AMaskMayHaveAnyFloatType) {
  if (!target_serves({.mask = Mask::kBoolean})) GTEST_SKIP() << "the target has no masks";
  std::vector<std::uint8_t> bits;
  for (const Mask mask : {Mask::kFloat32, Mask::kFloat16, Mask::kBFloat16}) {
    Case c{.lens = {613}, .mask = mask};
    const TestExecutor executor(c.executor);
    TestProblem built(c);
    if (!served(built, options_of(c, executor))) return;
    const Problem& p = built.problem();
    for (std::int32_t head = 0; head < c.q_heads; ++head) {
      for (std::int64_t key = 0; key < 613; ++key) {
        reference::store_element(const_cast<void*>(p.scores.mask), p.scores.mask_dtype,
                                 mask_offset(p.scores.mask_strides, {0, head}, 0, key), key % 3 == 0 ? -0.5 : 2.0);
      }
    }
    built.remember();
    for (std::int32_t head = 0; head < c.kv_heads; ++head) {
      for (std::int64_t key = 0; key < 613; ++key) {
        for (std::int32_t i = 0; i < c.head_dim; ++i) {
          built.set_k({0, head, key, i}, std::sin(static_cast<double>(key * 7 + i)));
          built.set_v({0, head, key, i}, std::cos(static_cast<double>(key * 5 + i)));
        }
      }
    }
    built.remember();
    ASSERT_TRUE(run_and_check(built, reference::decode(built.problem()), options_of(c, executor)));
    if (bits.empty()) bits = built.output_bits();
    EXPECT_EQ(built.output_bits(), bits);
  }
}

}  // namespace
}  // namespace lean::support
