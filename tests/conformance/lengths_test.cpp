// Lengths: none, one, around a LeanTile, a quarter of a million, wrong ones. And the suite's proof that its bound would
// notice a result of zeros, a dropped and a doubled tile at each of these lengths.
#include <gtest/gtest.h>

#include <climits>
#include <cmath>

#include "api/backends.hpp"
#include "support/reduced.hpp"
#include "support/run_and_check.hpp"
#include "support/tables.hpp"

namespace lean::support {
namespace {

std::int32_t tile_tokens_of(const Case& c) {
  return backend_of(target())->tiling_of(TestProblem(c, Contents::kFill).problem(), {}).config.tile_tokens;
}

/// Every row of the sequence is written as empty: zeros (not minus zero), and minus infinity.
void expect_empty(const TestProblem& built, std::int64_t sequence, std::int64_t token_begin, std::int64_t token_end) {
  const Case& c = built.description();
  for (std::int32_t head = 0; head < c.q_heads; ++head) {
    for (std::int64_t token = token_begin; token < token_end; ++token) {
      EXPECT_EQ(built.lse({sequence, head, token}), -INFINITY);
      for (std::int32_t i = 0; i < c.head_dim; ++i) {
        const double o = built.o({sequence, head, token, i});
        EXPECT_TRUE(o == 0.0 && !std::signbit(o)) << o;
      }
    }
  }
}

TEST(Conformance, R01_EmptyBatchIsOkAndWritesNothing) {
  const TestExecutor executor(ExecutorKind::kPool, 2);
  for (const Policy& policy : all_policies()) {
    TestProblem built(Case{});
    built.problem().batch = 0;
    Options options = options_of(Case{}, executor);
    options.policy = policy;
    EXPECT_TRUE(supports(built.problem(), options).ok());
    const TestWorkspace workspace(built.problem(), options);
    ASSERT_TRUE(workspace.status().ok()) << workspace.status().message;
    EXPECT_TRUE(decode(built.problem(), options, workspace.get()).ok());
    EXPECT_TRUE(built.outputs_untouched());
    EXPECT_TRUE(workspace.intact());
  }
}

TEST(Conformance, R02_EmptySequenceGivesZeroAndMinusInf) {
  EveryNth some(5);
  for (const DType dtype : dtypes()) {
    for (const auto& lens : {std::vector<std::int32_t>{0}, {0, 0, 0}, {0, 613, 0, 1, 0}, {97, 0}}) {
      for (const Policy& policy : all_policies()) {
        for (const Fixup fixup : kFixups) {
          if (!pairs(policy, fixup) || some.skips()) continue;
          Case c{.dtype = dtype, .lens = lens, .n_q = {2}, .policy = policy, .fixup = fixup, .workers = 5};
          const TestExecutor executor(c.executor);
          TestProblem built(c);
          if (!served(built, options_of(c, executor))) continue;
          ASSERT_TRUE(run_and_check(built, reference::decode(built.problem()), options_of(c, executor)));
          for (std::size_t b = 0; b < lens.size(); ++b) {
            if (lens[b] == 0) expect_empty(built, static_cast<std::int64_t>(b), 0, 2);
          }
        }
      }
    }
  }
}

TEST(Conformance, R02_SequenceWithoutCapacityGivesZeroAndMinusInf) {
  Case c{.lens = {0, 0}};
  const TestExecutor executor(c.executor);
  TestProblem built(c);
  EXPECT_EQ(built.problem().kv_capacity, 0);
  EXPECT_EQ(built.problem().k.data, nullptr);
  ASSERT_TRUE(run(built, options_of(c, executor)));
  expect_empty(built, 0, 0, 1);
  expect_empty(built, 1, 0, 1);
}

TEST(Conformance, R02_LeftPaddingMayCoverTheWholeSequence) {
  Case c{.lens = {31, 97, 5}, .pad = {31, 13, 5}};
  const TestExecutor executor(c.executor);
  TestProblem built(c);
  ASSERT_TRUE(run_and_check(built, reference::decode(built.problem()), options_of(c, executor)));
  expect_empty(built, 0, 0, 1);
  expect_empty(built, 2, 0, 1);
}

TEST(Conformance, R03_LengthsAroundATile) {
  for (const DType dtype : dtypes()) {
    for (const std::int32_t d : head_dims_and({33})) {
      if (!target_serves({.dtype = dtype, .head_dim = d})) continue;
      const std::int32_t tile = tile_tokens_of({.dtype = dtype, .head_dim = d});
      for (const std::int32_t length : {1, 2, tile - 1, tile, tile + 1, 2 * tile - 1, 2 * tile, 2 * tile + 1, 3 * tile + 7, 1009}) {
        Case c{.dtype = dtype, .head_dim = d, .lens = {length}, .workers = 2};
        const TestExecutor executor(c.executor);
        TestProblem built(c);
        const reference::Answer answer = reference::decode(built.problem());
        for (const CpuIsa isa : available_isas()) {
          c.isa = isa;
          EXPECT_TRUE(run_and_check(built, answer, options_of(c, executor)));
        }
        EXPECT_TRUE(bound_refuses_wrong_results(built, answer, options_of(c, executor)));
      }
    }
  }
}

TEST(Conformance, R04_FewerTilesThanWorkersAndTheReverse) {
  for (std::int32_t tiles = 1; tiles <= full_or_reduced(17, 5); ++tiles) {
    Case c{.dtype = dtypes().front(), .q_heads = 2, .kv_heads = 1, .head_dim = 128, .executor = ExecutorKind::kPermuted};
    c.lens = {tiles * tile_tokens_of(c) - 3};
    const TestExecutor executor(c.executor);
    TestProblem built(c);
    const reference::Answer answer = reference::decode(built.problem());
    for (const Policy& policy : all_policies()) {
      for (const std::int32_t workers : {1, 2, 3, 4, 5, 8, 13, 40, 80, 132, 264}) {
        Options options = options_of(c, executor);
        options.policy = policy;
        options.workers = workers;
        EXPECT_TRUE(run_and_check(built, answer, options)) << "workers " << workers;
      }
    }
  }
}

/// q = 0 makes every p exactly 1: l counts the tokens, so a lost or doubled tile names itself.
TEST(Conformance, R05_RaggedFromOneToAQuarterMillionCountsEveryTokenOnce) {
  Case c{.q_heads = 2, .kv_heads = 1, .head_dim = 8, .k_layout = "shd", .input = Input::kUniform};
  c.lens = {1, full_or_reduced(262144, 20011), 17, 4099, 1, 977, 0, 65537 / full_or_reduced(1, 16)};
  const TestExecutor executor(c.executor);
  TestProblem built(c);
  for (std::int64_t b = 0; b < c.batch(); ++b) {
    for (std::int64_t t = 0; t < c.lens[static_cast<std::size_t>(b)]; ++t) {
      for (std::int32_t i = 0; i < c.head_dim; ++i) built.set_v({b, 0, t, i}, 1.0);
    }
  }
  built.remember();
  for (const Policy& policy : all_policies()) {
    for (const std::int32_t workers : {1, 7, 64, 132, 264}) {
      Options options = options_of(c, executor);
      options.policy = policy;
      options.workers = workers;
      ASSERT_TRUE(run(built, options));
      for (std::int64_t b = 0; b < c.batch(); ++b) {
        const std::int32_t tokens = c.lens[static_cast<std::size_t>(b)];
        const double lse = std::log(static_cast<double>(tokens));
        if (tokens == 0) continue;
        // One token more or less at 2^18 moves the LSE by 4e-6; rounding of log, product and sum by less than 2e-6.
        EXPECT_NEAR(static_cast<double>(built.lse({b, 1, 0})), lse, 0x1p-23 * (1.0 + lse)) << tokens << " tokens";
        EXPECT_EQ(built.o({b, 1, 0, 3}), 1.0) << tokens << " tokens";
      }
    }
  }
}

TEST(Conformance, R07_RowsThatSeeNothingAreEmpty) {
  for (const DType dtype : dtypes()) {
    for (const CpuIsa isa : available_isas()) {
      // Bottom-right causal with n_q = 9 > n_kv = 4: tokens 0 to 4 see no key.
      Case c{.dtype = dtype, .lens = {4, 211}, .n_q = {9}, .causal = true, .isa = isa};
      const TestExecutor executor(c.executor);
      TestProblem built(c);
      ASSERT_TRUE(run_and_check(built, reference::decode(built.problem()), options_of(c, executor)));
      expect_empty(built, 0, 0, 5);
      EXPECT_NE(built.lse({0, 0, 5}), -INFINITY);
    }
  }
}

TEST(Conformance, TheBoundRefusesWrongResultsAtEveryLength) {
  const std::vector<std::int32_t> lens =
      full_or_reduced<std::vector<std::int32_t>>({1, 2, 15, 33, 101, 257, 613, 1511, 4099, 9973, 16411}, {1, 33, 257, 1511});
  for (const DType dtype : dtypes()) {
    for (const Input input : {Input::kSignature, Input::kNormal}) {
      const Case c{.dtype = dtype, .q_heads = 2, .kv_heads = 1, .lens = lens, .input = input, .workers = 64};
      const TestExecutor executor(c.executor);
      TestProblem built(c);
      EXPECT_TRUE(bound_refuses_wrong_results(built, reference::decode(built.problem(), 2), options_of(c, executor)));
    }
  }
}

// ---- wrong lengths ----------------------------------------------------------------------------------------------------

/// Breaks a length array in memory that ends at an inaccessible page; decode() must clamp, say so, and compute the rest.
template <typename TBreak>
void expect_clamped(Case c, TBreak break_lengths) {
  c.guard = Guard::kPage;
  c.fill = Fill::kZero;
  const TestExecutor executor(ExecutorKind::kDescending);  // wrong cumulative query lengths may name a row twice
  TestProblem built(c);
  EXPECT_EQ(check_lengths(built.problem()).code, StatusCode::kOk);
  break_lengths(built);
  built.remember();
  const Status checked = check_lengths(built.problem());
  EXPECT_EQ(checked.code, StatusCode::kBadLengths);
  EXPECT_NE(checked.message[0], '\0');
  for (const Policy& policy : all_policies()) {
    Options options = options_of(c, executor);
    options.policy = policy;
    EXPECT_TRUE(run_and_check(built, reference::decode(built.problem()), options)) << checked.message;
  }
}

TEST(Conformance, R24_CumulativeKeyLengthsAreClampedAndReported) {
  const Case c{.lens = {37, 101, 53}, .k_layout = "shd"};
  for (const auto& [index, value] : {std::pair{0, 5},
                                     {0, -1},
                                     {0, INT_MIN},
                                     {1, -7},
                                     {1, 190},
                                     {1, INT_MAX},
                                     {2, 36},
                                     {2, INT_MIN},
                                     {2, INT_MAX},
                                     {3, 192},
                                     {3, INT_MAX},
                                     {3, 0},
                                     {3, -3}}) {
    SCOPED_TRACE(testing::Message() << "cu_kv_tokens[" << index << "] = " << value);
    if (index == 0 && value > 0) {  // a late start loses tokens but reads nothing wrong: reported by check_lengths() alone
      TestProblem built(c);
      built.cu_kv_tokens()[0] = value;
      EXPECT_EQ(check_lengths(built.problem()).code, StatusCode::kBadLengths);
      continue;
    }
    expect_clamped(c, [place = index, value = value](TestProblem& built) { built.cu_kv_tokens()[place] = value; });
  }
}

TEST(Conformance, R24_CumulativeQueryLengthsAreClampedAndReported) {
  const Case c{.lens = {37, 101, 53}, .n_q = {3, 2, 4}, .q_layout = "shd"};
  for (const auto& [index, value] : {std::pair{0, -1}, {0, INT_MIN}, {1, -7}, {3, 10}, {3, INT_MAX}, {3, -3}}) {
    SCOPED_TRACE(testing::Message() << "cu_q_tokens[" << index << "] = " << value);
    expect_clamped(c, [place = index, value = value](TestProblem& built) { built.cu_q_tokens()[place] = value; });
  }
}

TEST(Conformance, R24_CumulativeLengthsThatFallWriteNothingOutside) {
  const Case c{.lens = {37, 101, 53}, .n_q = {3, 2, 4}, .q_layout = "shd", .guard = Guard::kPage};
  const TestExecutor executor(ExecutorKind::kDescending);
  for (const auto& [index, value] : {std::pair{1, 6}, {1, INT_MAX}, {2, 1}, {2, 0}, {2, INT_MIN}}) {
    TestProblem built(c);
    built.cu_q_tokens()[index] = value;
    built.remember();
    EXPECT_EQ(check_lengths(built.problem()).code, StatusCode::kBadLengths);
    EXPECT_TRUE(run(built, options_of(c, executor)));
  }
}

TEST(Conformance, R25_LengthsOutsideTheCapacityAreClampedAndReported) {
  const Case c{.lens = {37, 101, 53}, .capacity = 101};
  for (const std::int64_t sequence : {0, 1, 2}) {
    for (const std::int32_t value : {-1, 102, 1000000, INT_MIN, INT_MAX}) {
      SCOPED_TRACE(testing::Message() << "kv_lengths[" << sequence << "] = " << value);
      expect_clamped(c, [&](TestProblem& built) { built.kv_lengths()[sequence] = value; });
    }
  }
}

TEST(Conformance, R25_LeftPaddingOutsideTheLengthIsClampedAndReported) {
  const Case c{.lens = {37, 101, 53}, .pad = {3, 0, 53}};
  for (const std::int32_t value : {-1, 38, 102, INT_MIN, INT_MAX}) {
    SCOPED_TRACE(testing::Message() << "kv_left_pad[0] = " << value);
    expect_clamped(c, [&](TestProblem& built) { built.kv_left_pad()[0] = value; });
  }
}

void expect_the_first_fault_to_stay(const Case& c) {
  const TestExecutor executor(c.executor);
  const Options options = options_of(c, executor);
  TestProblem built(c);
  const TestWorkspace workspace(built.problem(), options);
  built.kv_lengths()[1] = 99;
  ASSERT_TRUE(decode_and_wait(built.problem(), options, workspace.get()).ok());
  built.kv_lengths()[1] = 53;
  built.kv_lengths()[0] = -3;  // later than the other
  ASSERT_TRUE(decode_and_wait(built.problem(), options, workspace.get()).ok());
  built.kv_lengths()[0] = 37;
  const Status sticky = sticky_status(workspace.get(), options);
  EXPECT_EQ(sticky.code, StatusCode::kBadLengths);
  EXPECT_STREQ(sticky.message, "kv_lengths[1] = 99: allowed 0 to 53 (the tokens there is room for); it was clamped");
  EXPECT_TRUE(reset_workspace(workspace.get(), options).ok());
  EXPECT_TRUE(sticky_status(workspace.get(), options).ok());
  ASSERT_TRUE(decode_and_wait(built.problem(), options, workspace.get()).ok());
  EXPECT_TRUE(sticky_status(workspace.get(), options).ok());
}

/// On a GPU by both kernels: any call's and a decode step's of 64 dims, the plain one of 59.
TEST(Conformance, R25_TheStickyCodeStaysUntilReset) {
  for (const std::int32_t dim : {59, 64}) {
    expect_the_first_fault_to_stay({.head_dim = dim, .lens = {37, 53}});
    expect_the_first_fault_to_stay({.head_dim = dim, .lens = {37, 53}, .n_q = {3}});
  }
}

}  // namespace
}  // namespace lean::support
