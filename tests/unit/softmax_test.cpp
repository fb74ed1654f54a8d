// The laws of the softmax state, with random and extreme states, and the ends of a row. Bounds are derived, in units of
// the roundoff u = 2^-24: merging along a path of k merges, a state whose maximum lies D below the final one has its weight
// off by a factor of at most 1 + (ln 2 |D| + 3 k) u: the difference of the maxima, exp2 (2 u) and fma (1 u).
#include "softmax/state.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <vector>

#include "softmax/scale.hpp"
#include "support/random.hpp"
#include "support/reduced.hpp"

namespace lean::softmax {
namespace {

using support::full_or_reduced;
using support::Stream;

constexpr double kRoundoff = 0x1p-24;
constexpr double kLn2Exact = 0.69314718055994530942;
constexpr double kSmallest = 0x1p-149;  // what a factor loses when it is subnormal
constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kLargest = std::numeric_limits<float>::max();

std::uint32_t bits(float x) { return std::bit_cast<std::uint32_t>(x); }

/// A state with one element of its un-scaled output.
struct Partial {
  State state;
  float o = 0.0F;
};

Partial merged(const Partial& a, const Partial& b) {
  const MergeStep step = merge_step(a.state, b.state);
  return {.state = step.merged, .o = merge_element(step, a.o, b.o)};
}

float magnitude(Stream& random) {  // log-uniform in [2^-90, 2^90)
  return std::exp2(static_cast<float>(random.between(-90, 89))) *
         (1.0F + static_cast<float>(random.between(0, 1 << 22)) * 0x1p-22F);
}

/// Usual, equal, far apart, at both ends of fp32, subnormal or empty.
Partial random_partial(Stream& random) {
  if (random.chance(10)) return {};
  Partial p;
  switch (random.between(0, 4)) {
    case 0: p.state.m = static_cast<float>(random.between(-40, 40)); break;
    case 1: p.state.m = static_cast<float>(random.between(-200, 200)) * (1.0F / 7.0F); break;
    case 2: p.state.m = magnitude(random) * (random.chance(50) ? 1.0F : -1.0F); break;
    case 3: p.state.m = random.one_of({kLargest, -kLargest, 1e30F, -1e30F, -5e4F, 0.0F, -0.0F}); break;
    default: p.state.m = 0x1p-149F * static_cast<float>(random.between(-5, 5)); break;
  }
  p.state.l = random.chance(50) ? static_cast<float>(random.between(1, 4096)) : magnitude(random);
  p.o = magnitude(random) * (random.chance(50) ? 1.0F : -1.0F);
  return p;
}

struct Exact {
  double l = 0.0;
  double o = 0.0;
  double l_bound = 0.0;  // of any order of merging with at most `merges` on a path
  double o_bound = 0.0;
};

Exact exact_merge(const std::vector<Partial>& parts, int merges) {
  double top = -std::numeric_limits<double>::infinity();
  for (const Partial& p : parts) top = std::max(top, static_cast<double>(p.state.m));
  Exact sum;
  for (const Partial& p : parts) {
    if (p.state.m == kNegInf) continue;
    const double below = static_cast<double>(p.state.m) - top;
    const double weight = std::exp2(below);
    const double error = weight == 0.0 ? 0.0 : weight * 1.01 * (kLn2Exact * -below + 3.0 * merges) * kRoundoff;
    sum.l += static_cast<double>(p.state.l) * weight;
    sum.o += static_cast<double>(p.o) * weight;
    sum.l_bound += static_cast<double>(p.state.l) * (error + merges * kSmallest) + kSmallest;
    sum.o_bound += std::fabs(static_cast<double>(p.o)) * (error + merges * kSmallest) + kSmallest;
  }
  return sum;
}

void expect_within(const Partial& found, const Exact& exact) {
  ASSERT_LE(std::fabs(static_cast<double>(found.state.l) - exact.l), exact.l_bound);
  ASSERT_LE(std::fabs(static_cast<double>(found.o) - exact.o), exact.o_bound);
}

TEST(SoftmaxMerge, TheEmptyStateIsTheIdentityBitForBit) {
  Stream random(1);
  for (std::int32_t round = 0; round < full_or_reduced(200'000, 20'000); ++round) {
    const Partial p = random_partial(random);
    for (const Partial& same : {merged(p, {}), merged({}, p)}) {
      ASSERT_EQ(bits(same.state.m), bits(p.state.m));
      ASSERT_EQ(bits(same.state.l), bits(p.state.l));
      ASSERT_EQ(bits(same.o), bits(p.o));
    }
  }
}

/// Rows that see nothing of a part may have 0 x NaN in its O.
TEST(SoftmaxMerge, R07_WhatAnEmptyStatesOHoldsNeverMatters) {
  Stream random(5);
  for (std::int32_t round = 0; round < 1'000; ++round) {
    const Partial p = random_partial(random);
    if (p.state.m == kNegInf) continue;
    for (const float o : {kNan, kInf, -kInf, kLargest}) {
      const Partial empty{.state = State::empty(), .o = o};
      for (const Partial& same : {merged(p, empty), merged(empty, p)}) {
        ASSERT_EQ(bits(same.state.l), bits(p.state.l));
        ASSERT_EQ(bits(same.o), bits(p.o));
      }
    }
  }
}

TEST(SoftmaxMerge, CommutesBitForBit) {
  Stream random(2);
  for (std::int32_t round = 0; round < full_or_reduced(500'000, 50'000); ++round) {
    const Partial a = random_partial(random);
    Partial b = random_partial(random);
    if (random.chance(20)) b.state.m = a.state.m;
    if (b.state.m == kNegInf) b = {};
    const Partial ab = merged(a, b);
    const Partial ba = merged(b, a);
    ASSERT_EQ(bits(ab.state.m + 0.0F), bits(ba.state.m + 0.0F)) << a.state.m << ' ' << b.state.m;  // -0 and 0 are one maximum
    ASSERT_EQ(bits(ab.state.l), bits(ba.state.l));
    ASSERT_EQ(bits(ab.o), bits(ba.o));
    ASSERT_EQ(bits(merge_step(a.state, b.state).factor), bits(merge_step(b.state, a.state).factor));
  }
}

TEST(SoftmaxMerge, AssociatesWithinTheDerivedBound) {
  Stream random(3);
  std::int64_t differ = 0;
  for (std::int32_t round = 0; round < full_or_reduced(300'000, 30'000); ++round) {
    const std::vector<Partial> parts = {random_partial(random), random_partial(random), random_partial(random)};
    const Exact exact = exact_merge(parts, 2);
    const Partial left = merged(merged(parts[0], parts[1]), parts[2]);
    const Partial right = merged(parts[0], merged(parts[1], parts[2]));
    ASSERT_EQ(left.state.m, right.state.m);
    expect_within(left, exact);
    expect_within(right, exact);
    if (HasFatalFailure()) return;
    differ += bits(left.state.l) != bits(right.state.l) ? 1 : 0;
  }
  EXPECT_GT(differ, full_or_reduced(1000, 100)) << "the bound is not vacuous: order does change bits";
}

TEST(SoftmaxMerge, AnyTreeOverManyStatesStaysWithinTheDerivedBound) {
  Stream random(4);
  for (std::int32_t round = 0; round < full_or_reduced(2000, 200); ++round) {
    std::vector<Partial> parts(static_cast<std::size_t>(random.between(1, 132)));
    for (Partial& p : parts) p = random_partial(random);
    const Exact exact = exact_merge(parts, static_cast<int>(parts.size()));
    while (parts.size() > 1) {  // merge two neighbours at a random place
      const auto at = static_cast<std::size_t>(random.between(0, static_cast<std::int64_t>(parts.size()) - 2));
      parts[at] = merged(parts[at], parts[at + 1]);
      parts.erase(parts.begin() + static_cast<std::ptrdiff_t>(at) + 1);
    }
    expect_within(parts[0], exact);
    if (HasFatalFailure()) return;
  }
}

TEST(SoftmaxMerge, R48_ScoresOneByOneGiveTheSoftmaxForRisingFallingEqualAndPeakedScores) {
  for (std::int32_t shape = 0; shape < 4; ++shape) {
    std::vector<Partial> parts;
    for (std::int32_t i = 0; i < 500; ++i) {
      const float score = shape == 0   ? 0.37F * static_cast<float>(i)
                          : shape == 1 ? -0.37F * static_cast<float>(i)
                          : shape == 2 ? 3.5F
                          : i == 321   ? 60.0F
                                       : 0.0F;
      parts.push_back({.state = {.m = score, .l = 1.0F}, .o = static_cast<float>(i % 13 - 6)});
    }
    Partial all;
    for (const Partial& p : parts) all = merged(all, p);
    expect_within(all, exact_merge(parts, 500));
  }
}

TEST(SoftmaxMerge, R07_NoNanFromAnyNumberOfEmptyStates) {
  for (std::int32_t count = 0; count <= 300; ++count) {
    Partial all;
    for (std::int32_t i = 0; i < count; ++i) all = i % 2 == 0 ? merged(all, {}) : merged({}, all);
    ASSERT_EQ(all.state.m, kNegInf);
    ASSERT_EQ(bits(all.state.l), 0U);
    ASSERT_EQ(bits(all.o), 0U);
    const Finished row = finalize(all.state);
    ASSERT_EQ(row.scale, 0.0F);
    ASSERT_EQ(row.lse, kNegInf);
  }
}

TEST(SoftmaxMerge, R08_ANanIsKeptWhereverItStands) {
  Stream random(5);
  for (std::int32_t round = 0; round < full_or_reduced(20'000, 2000); ++round) {
    std::vector<Partial> parts(5);
    for (Partial& p : parts) p = random_partial(random);
    Partial& bad = parts[static_cast<std::size_t>(random.between(0, 4))];
    bad.state = random.chance(50) ? State{kNan, kNan} : State{bad.state.m, kNan};
    bad.o = kNan;
    Partial all;
    for (const Partial& p : parts) all = merged(all, p);
    ASSERT_TRUE(std::isnan(all.state.l));
    ASSERT_TRUE(std::isnan(all.o));
    ASSERT_TRUE(std::isnan(finalize(all.state).scale));
    ASSERT_TRUE(std::isnan(finalize(all.state).lse));
    ASSERT_TRUE(std::isnan(finalize(all.state, 1.0F).lse)) << "a sink does not hide it";
  }
}

TEST(SoftmaxMerge, R09_APlusInfinityScoreMakesItsRowNanAndOutweighsFiniteOnes) {
  const State infinite = {.m = kInf, .l = 1.0F};
  const State finite = {.m = 5.0F, .l = 3.0F};
  EXPECT_EQ(merge(infinite, finite).m, kInf);
  EXPECT_EQ(merge(infinite, finite).l, 1.0F) << "finite scores weigh nothing against it";
  EXPECT_EQ(merge(finite, infinite).l, 1.0F);
  EXPECT_TRUE(std::isnan(merge(infinite, infinite).l)) << "inf - inf";
  EXPECT_TRUE(std::isnan(finalize(infinite).scale)) << "o is NaN";
  EXPECT_EQ(finalize(infinite).lse, kInf);
}

TEST(SoftmaxMerge, TheFactorLiesBetweenZeroAndOne) {
  EXPECT_EQ(rescale_factor(kNegInf, kNegInf), 0.0F);
  EXPECT_EQ(rescale_factor(kNegInf, 5.0F), 0.0F);
  EXPECT_EQ(rescale_factor(kNegInf, kInf), 0.0F);
  EXPECT_EQ(rescale_factor(-kLargest, kLargest), 0.0F);
  EXPECT_EQ(rescale_factor(-3.0F, -3.0F), 1.0F);
  EXPECT_EQ(rescale_factor(-3.0F, -1.0F), 0.25F);
  Stream random(6);
  for (std::int32_t round = 0; round < 50'000; ++round) {
    const float factor = merge_step(random_partial(random).state, random_partial(random).state).factor;
    ASSERT_TRUE(factor >= 0.0F && factor <= 1.0F);
  }
}

/// A finished row in double, and how far the fp32 one may be from it.
struct ExactRow {
  double scale;
  double lse;
  double scale_bound;
  double lse_bound;
};

ExactRow exact_row(State state, float sink) {
  const double m = static_cast<double>(state.m);
  const double l = static_cast<double>(state.l);
  const double s = sink == kNegInf ? 0.0 : static_cast<double>(sink);
  const double sink_m = sink == kNegInf ? -std::numeric_limits<double>::infinity() : s / kLn2Exact;
  const double top = std::max(m, sink_m);
  const double whole = l * std::exp2(m - top) + std::exp2(sink_m - top);
  ExactRow row = {
      .scale = std::exp2(m - top) / whole, .lse = top * kLn2Exact + std::log(whole), .scale_bound = 0.0, .lse_bound = 0.0};
  // The sink's change to log2 costs 2 u of it, a weight's factor at most (0.54 + 3) u of the whole, log 2 u, ln 2 1 u.
  const double whole_error = (2.0 * std::fabs(s) + 4.0) * kRoundoff;
  row.lse_bound =
      1.01 * (whole_error + (2.0 * std::fabs(std::log(whole)) + std::fabs(top) * kLn2Exact + std::fabs(row.lse)) * kRoundoff);
  row.scale_bound = 1.01 * row.scale * (whole_error + (kLn2Exact * (top - m) + 2.0 * std::fabs(s) + 4.0) * kRoundoff) + kSmallest;
  return row;
}

TEST(SoftmaxFinalize, RowsWithAndWithoutASinkAreExactWithinTheDerivedBound) {
  Stream random(7);
  for (std::int32_t round = 0; round < full_or_reduced(200'000, 20'000); ++round) {
    const State state = {.m = static_cast<float>(random.between(-4000, 4000)) / 37.0F,
                         .l = random.chance(80) ? 1.0F + static_cast<float>(random.between(0, 100'000)) / 91.0F : 0x1p20F};
    const float sink = random.chance(50) ? kNegInf : static_cast<float>(random.between(-3000, 3000)) / 41.0F;
    const Finished row = finalize(state, sink);
    const ExactRow exact = exact_row(state, sink);
    ASSERT_LE(std::fabs(static_cast<double>(row.scale) - exact.scale), exact.scale_bound)
        << state.m << ' ' << state.l << ' ' << sink;
    ASSERT_LE(std::fabs(static_cast<double>(row.lse) - exact.lse), exact.lse_bound) << state.m << ' ' << state.l << ' ' << sink;
  }
}

TEST(SoftmaxFinalize, R02_AnEmptyRowIsZeroAndMinusInfinity) {
  EXPECT_EQ(bits(finalize(State::empty()).scale), 0U);
  EXPECT_EQ(finalize(State::empty()).lse, kNegInf);
}

TEST(SoftmaxFinalize, R02_AnEmptyRowWithASinkIsZeroAndTheSink) {
  for (const float sink : {0.0F, 1.0F, -7.25F, 88.0F, -1e4F, 1e30F}) {
    const Finished row = finalize(State::empty(), sink);
    EXPECT_EQ(row.scale, 0.0F);
    EXPECT_LE(std::fabs(static_cast<double>(row.lse) - static_cast<double>(sink)),
              4.0 * kRoundoff * std::fabs(static_cast<double>(sink)));
  }
}

TEST(SoftmaxFinalize, ASinkTakesItsShareOfTheDenominatorOnly) {
  const Finished half = finalize({.m = 0.0F, .l = 1.0F}, 0.0F);  // one key of score 0 and a sink of 0
  EXPECT_EQ(half.scale, 0.5F);
  EXPECT_FLOAT_EQ(half.lse, kLn2);
  EXPECT_EQ(finalize({.m = 3.0F, .l = 4.0F}, -1e30F).scale, finalize({.m = 3.0F, .l = 4.0F}).scale)
      << "a sink far below is no sink";
  EXPECT_EQ(finalize({.m = 3.0F, .l = 4.0F}, 1e30F).scale, 0.0F) << "a sink far above takes everything";
}

TEST(SoftmaxFinalize, R11_ASinkOfAnySizeIsItsRowsLseWhereItTakesAll) {
  for (const float sink : {1e30F, 2e38F, 3e38F, kLargest}) {
    EXPECT_EQ(finalize({.m = 3.0F, .l = 4.0F}, sink).lse, sink);
    EXPECT_EQ(finalize({.m = 3.0F, .l = 4.0F}, sink).scale, 0.0F);
    EXPECT_EQ(finalize({.m = 3.0F, .l = 4.0F}, -sink).scale, 0.25F);
  }
}

TEST(SoftmaxFinalize, R11_HugeScoresKeepTheirWeight) {
  for (const float m : {1e30F, -1e30F, -5e4F, kBendLog2, -kBendLog2}) {
    const ExactRow exact = exact_row({.m = m, .l = 8.0F}, kNegInf);
    EXPECT_EQ(finalize({.m = m, .l = 8.0F}).scale, 0.125F) << m;
    EXPECT_LE(std::fabs(static_cast<double>(finalize({.m = m, .l = 8.0F}).lse) - exact.lse), exact.lse_bound) << m;
  }
}

TEST(SoftmaxScale, R11_SoftCapIsCapTimesTanhWithinSixRoundoffs) {
  Stream random(8);
  for (std::int32_t round = 0; round < full_or_reduced(200'000, 20'000); ++round) {
    const float cap = static_cast<float>(random.between(1, 1000)) / 7.0F;
    const float score = magnitude(random) * (random.chance(50) ? 1.0F : -1.0F);
    const double exact = static_cast<double>(cap) * std::tanh(static_cast<double>(score) / static_cast<double>(cap));
    // 1 u for the argument (tanh shrinks a relative error), 4 u for tanhf (2 ulp), 1 u to leave.
    ASSERT_LE(std::fabs(static_cast<double>(soft_cap(score, cap)) - exact), 6.0 * kRoundoff * std::fabs(exact) + kSmallest)
        << score << ' ' << cap;
    ASSERT_EQ(soft_cap(-score, cap), -soft_cap(score, cap));
  }
}

TEST(SoftmaxScale, SoftCapNeverExceedsTheCapAndKeepsNan) {
  for (const float cap : {0.5F, 30.0F, 50.0F}) {
    EXPECT_EQ(soft_cap(kInf, cap), cap);
    EXPECT_EQ(soft_cap(-kInf, cap), -cap) << "finite: masking must come after the cap";
    EXPECT_LE(soft_cap(kLargest, cap), cap);
    EXPECT_TRUE(std::isnan(soft_cap(kNan, cap)));
    EXPECT_EQ(soft_cap(0.0F, cap), 0.0F);
  }
}

TEST(SoftmaxScale, R11_FiniteNumbersStayFiniteAndInOrderInTheLog2Domain) {
  EXPECT_EQ(to_log2(kInf), kInf);
  EXPECT_EQ(to_log2(-kInf), -kInf);
  EXPECT_TRUE(std::isnan(to_log2(kNan)));
  float before = -kInf;
  for (const float x : {-kLargest, -3e38F, -2.37e38F, -1.8e38F, -0x1p127F, -1e38F, -1.0F, 0.0F, 1.0F, 1e38F, 0x1p127F, 1.8e38F,
                        2.37e38F, 3e38F, kLargest}) {
    EXPECT_TRUE(std::isfinite(to_log2(x))) << x;
    EXPECT_GT(to_log2(x), before) << x;
    EXPECT_NEAR(static_cast<double>(from_log2(to_log2(x))), static_cast<double>(x),
                4.0 * kRoundoff * std::fabs(static_cast<double>(x)));
    before = to_log2(x);
  }
  EXPECT_EQ(to_log2(1e38F), 1e38F * kLog2E);
}

TEST(SoftmaxScale, Log2ScaleIsTheScaleTimesLog2OfERoundedOnce) {
  for (std::int32_t head_dim = 1; head_dim <= 256; ++head_dim) {
    const long double exact = std::log2(std::exp(1.0L)) / std::sqrt(static_cast<long double>(head_dim));
    const auto found = static_cast<long double>(log2_scale(0.0F, head_dim));
    EXPECT_LE(std::fabs(found - exact), 1.0001L * kRoundoff * exact) << head_dim;
  }
  EXPECT_EQ(log2_scale(1.0F, 64), kLog2E);
  EXPECT_EQ(log2_scale(-2.0F, 64), -2.0F * kLog2E);
  EXPECT_NE(log2_scale(0.1F, 64), log2_scale(0.0F, 64)) << "a given scale is used";
  EXPECT_EQ(log2_scale(-0.0F, 64), 0.0F) << "-0 is the number, 0 the default";
}

}  // namespace
}  // namespace lean::softmax
