// merge_states(): two calls over disjoint keys make one, in every output type; a sink belongs to one of them. The C interface does
// the same.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>

#include "backends/reference/load.hpp"
#include "lean/lean.h"
#include "support/run_and_check.hpp"
#include "support/tables.hpp"

namespace lean::support {
namespace {

/// Keys [0, cut) by one call, [cut, end) by another; `built` of the first holds what they were merged into.
template <typename TMerge>
void expect_split_equals_whole(Case whole, std::int32_t cut, TMerge merge) {
  whole.o_layout = whole.lse_layout = "bshd";
  Case rest = whole;
  rest.pad = {cut};
  rest.sinks = false;
  const TestExecutor executor(whole.executor);
  TestProblem a(whole);
  TestProblem b(rest);
  if (!served(a, options_of(whole, executor))) return;
  const reference::Answer answer = reference::decode(a.problem());
  a.kv_lengths()[0] = cut;
  a.remember();
  ASSERT_TRUE(run(a, options_of(whole, executor)));
  ASSERT_TRUE(run(b, options_of(rest, executor)));
  ASSERT_TRUE(merge(a.problem(), b.problem(), whole.q_heads, whole.head_dim));
  // Each part is rounded to the output type, then the merged one: 3 roundings of what adds up to A, beside fp32's own errors.
  const double u = reference::unit_roundoff(whole.dtype);
  for (std::int32_t head = 0; head < whole.q_heads; ++head) {
    const auto row = static_cast<std::size_t>(answer.row(0, 0, head));
    EXPECT_NEAR(static_cast<double>(a.lse({0, head, 0})), answer.lse[row], 1e-5 * (1.0 + std::abs(answer.lse[row])));
    for (std::int32_t i = 0; i < whole.head_dim; ++i) {
      const std::size_t e = row * static_cast<std::size_t>(whole.head_dim) + static_cast<std::size_t>(i);
      EXPECT_NEAR(a.o({0, head, 0, i}), answer.o[e], (3.0 * u + 1e-5) * answer.abs_weighted[e]) << reproducer(whole);
    }
  }
}

bool merge_in_cpp(const Problem& into, const Problem& other, std::int64_t rows, std::int32_t dims) {
  return merge_states(into.o.data, into.lse.data, other.o.data, other.lse.data, rows, dims, into.o.dtype).ok();
}

bool merge_in_c(const Problem& into, const Problem& other, std::int64_t rows, std::int32_t dims) {
  const auto dtype = static_cast<std::int32_t>(into.o.dtype);
  return lean_merge_states(into.o.data, into.lse.data, other.o.data, other.lse.data, rows, dims, dtype, nullptr).code == LEAN_OK;
}

TEST(Conformance, R49_SplitAndMergedEqualsWholeInEveryType) {
  if (on_cuda()) GTEST_SKIP() << "results of the test cases are in host memory; gpu_tests merge on a device";
  for (const DType dtype : dtypes()) {
    for (const std::int32_t cut : {0, 1, 500, 1511}) {
      const Case whole{.dtype = dtype, .lens = {1511}, .input = Input::kPeaks, .workers = 5};
      expect_split_equals_whole(whole, cut, merge_in_cpp);
      expect_split_equals_whole(whole, cut, merge_in_c);
    }
  }
}

TEST(Conformance, ASinkBelongsToOneOfTheMergedCalls) {
  if (on_cuda()) GTEST_SKIP() << "results of the test cases are in host memory; gpu_tests merge on a device";
  for (const std::int32_t cut : {0, 700, 1511}) {
    expect_split_equals_whole({.dtype = DType::kFloat32, .lens = {1511}, .sinks = true, .workers = 5}, cut, merge_in_cpp);
  }
}

struct Row {
  float o;
  float lse;
};

Row merged(Row a, Row b) {
  EXPECT_TRUE(merge_states(&a.o, &a.lse, &b.o, &b.lse, 1, 1, DType::kFloat32).ok());
  return a;
}

/// FlashAttention writes +inf where there are no keys; what an empty state's o holds is nobody's business.
TEST(Conformance, R07_AnEmptyStateChangesNothingHoweverItIsWritten) {
  for (const float nothing : {-INFINITY, INFINITY}) {
    for (const float o : {0.0F, NAN, INFINITY}) {
      for (const Row whole : {Row{5.0F, 1.5F}, Row{-3.0F, 3e38F}, Row{-3.0F, -3e38F}}) {
        EXPECT_EQ(merged(whole, {o, nothing}).o, whole.o);
        EXPECT_EQ(merged(whole, {o, nothing}).lse, whole.lse);
        EXPECT_EQ(merged({o, nothing}, whole).o, whole.o);
        EXPECT_EQ(merged({o, nothing}, whole).lse, whole.lse);
      }
      EXPECT_EQ(merged({o, nothing}, {NAN, INFINITY}).o, 0.0F);
      EXPECT_EQ(merged({o, nothing}, {NAN, INFINITY}).lse, -INFINITY);
    }
  }
  EXPECT_TRUE(std::isnan(merged({NAN, 0.0F}, {1.0F, 0.0F}).o)) << "not empty";
  EXPECT_TRUE(std::isnan(merged({1.0F, NAN}, {1.0F, 0.0F}).o));
}

/// Four arrays of three rows in one piece of memory, of which each may be moved into another.
TEST(Conformance, R29_MergedStatesMayNotOverlap) {
  constexpr std::int64_t kRows = 3;
  constexpr std::int32_t kDims = 2;
  struct Arrays {
    float o_a[kRows * kDims], lse_a[kRows], o_b[kRows * kDims], lse_b[kRows];
  };
  Arrays x{};
  const auto refusal = [](float* o_a, float* lse_a, const float* o_b, const float* lse_b) {
    const Status status = merge_states(o_a, lse_a, o_b, lse_b, kRows, kDims, DType::kFloat32);
    const std::string text = status.message;
    return text.substr(0, text.find(' ')) + text.substr(std::min(text.size(), text.find(':')));
  };
  EXPECT_EQ(refusal(x.o_a, x.lse_a, x.o_b, x.lse_b), "");  // end to end
  EXPECT_EQ(refusal(x.o_a, x.lse_a, x.o_a, x.lse_b), "o_b: must not overlap o_a, which is written");
  EXPECT_EQ(refusal(x.o_a + 1, x.lse_a, x.o_a, x.lse_b), "lse_a: must not overlap o_a, which is written");
  EXPECT_EQ(refusal(x.o_a, x.lse_a, x.o_a + 5, x.lse_b), "o_b: must not overlap o_a, which is written");
  EXPECT_EQ(refusal(x.o_b, x.lse_a, x.lse_a + 1, x.lse_b), "o_b: must not overlap o_a, which is written");
  EXPECT_EQ(refusal(x.o_a, x.lse_a, x.o_b, x.lse_a + 2), "lse_b: must not overlap lse_a, which is written");
  EXPECT_EQ(refusal(x.o_a, x.lse_a, x.lse_a, x.lse_b), "o_b: must not overlap lse_a, which is written");
  EXPECT_TRUE(merge_states(x.o_a, x.lse_a, x.o_a, x.lse_a, 0, kDims, DType::kFloat32).ok()) << "no rows";
}

TEST(Conformance, R11_HugeLogSumsMerge) {
  for (const float lse : {3e38F, -3e38F, 2e38F, -1e30F}) {
    EXPECT_EQ(merged({4.0F, lse}, {8.0F, lse}).o, 6.0F) << lse;
    EXPECT_EQ(merged({4.0F, lse}, {8.0F, lse}).lse, lse);
    EXPECT_EQ(merged({4.0F, lse}, {8.0F, 0.9F * lse}).o, lse > 0.0F ? 4.0F : 8.0F) << lse;
    EXPECT_EQ(merged({4.0F, lse}, {8.0F, 0.0F}).lse, lse > 0.0F ? lse : 0.0F);
  }
}

}  // namespace
}  // namespace lean::support
