// TileKernels: every entry is there; apply_rule: each rule on one row of scores, for every instruction set; tanh against the C library's in double.
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "backends/cpu/tile_kernels.hpp"
#include "lean/lean.hpp"
#include "softmax/scale.hpp"
#include "softmax/state.hpp"
#include "support/tables.hpp"

namespace lean::cpu {
namespace {

constexpr std::int32_t kTokens = 48;
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

struct alignas(64) Row {
  float x[kTokens] = {};
};

Row apply(CpuIsa isa, Row row, const ScoreRule& rule) {
  kernels_for(isa).apply_rule(row.x, kTokens, rule);
  return row;
}

TEST(TileKernels, EveryTypeHasItsKernels) {
  for (const CpuIsa isa : support::available_isas()) {
    const TileKernels& kernels = kernels_for(isa);
    for (int type = 0; type < kKvTypes; ++type) {
      EXPECT_NE(kernels.order_query[type], nullptr) << name_of(isa) << " " << type;
      EXPECT_NE(kernels.scores[type], nullptr) << name_of(isa) << " " << type;
      EXPECT_NE(kernels.accumulate[type], nullptr) << name_of(isa) << " " << type;
      EXPECT_NE(kernels.restore_values[type], nullptr) << name_of(isa) << " " << type;
      EXPECT_NE(kernels.load_row[type], nullptr) << name_of(isa) << " " << type;
    }
    for (int type = 0; type < kOutputTypes; ++type) EXPECT_NE(kernels.store_row[type], nullptr) << name_of(isa) << " " << type;
  }
}

TEST(ScoreRules, TanhIsWithinTwoToTheMinus22) {
  for (const CpuIsa isa : support::available_isas()) {
    double worst = 0.0;
    for (int step = -30'000; step <= 30'000; ++step) {
      Row row;
      for (std::int32_t t = 0; t < kTokens; ++t) {
        row.x[t] =
            std::exp2(static_cast<float>(step) * 5e-4F) * (t % 2 == 0 ? 1.0F : -1.0F) * (1.0F + static_cast<float>(t) * 1e-5F);
      }
      const Row tanh = apply(isa, row, {.scale = 1.0F, .cap = 1.0F});
      for (std::int32_t t = 0; t < kTokens; ++t) {
        const double exact = std::tanh(static_cast<double>(row.x[t]));
        worst = std::max(worst, std::abs(static_cast<double>(tanh.x[t]) - exact) / std::abs(exact));
      }
    }
    EXPECT_LT(worst, 0x1p-22) << name_of(isa);
    EXPECT_GT(worst, 0.0);
    const Row ends = apply(isa, {{0.0F, -0.0F, INFINITY, -INFINITY, kNan, 1e-40F, 1e30F}}, {.scale = 1.0F, .cap = 2.0F});
    EXPECT_EQ(ends.x[0], 0.0F);
    EXPECT_EQ(ends.x[1], 0.0F);
    EXPECT_EQ(ends.x[2], 2.0F);
    EXPECT_EQ(ends.x[3], -2.0F);
    EXPECT_TRUE(std::isnan(ends.x[4]));
    EXPECT_NEAR(ends.x[5], 1e-40F, 1e-42F);
    EXPECT_EQ(ends.x[6], 2.0F);
  }
}

TEST(ScoreRules, AlibiTakesTheSlopeTimesTheDistanceToEitherSide) {
  for (const CpuIsa isa : support::available_isas()) {
    const Row row = apply(isa, {}, {.scale = 1.0F, .slope = 0.25F, .distance = -20});
    for (std::int32_t t = 0; t < kTokens; ++t) EXPECT_EQ(row.x[t], -0.25F * static_cast<float>(std::abs(t - 20))) << name_of(isa);
  }
}

TEST(ScoreRules, WhatIsHiddenIsMinusInfinityWhateverItsScore) {
  Row bias;
  for (std::int32_t t = 0; t < kTokens; ++t) bias.x[t] = t % 5 == 0 ? softmax::kNegInf : 0.5F;
  for (const CpuIsa isa : support::available_isas()) {
    for (const float score : {3.0F, kNan, INFINITY, -INFINITY}) {
      Row row;
      for (float& x : row.x) x = score;
      const Row ruled = apply(isa, row, {.scale = 2.0F, .bias = bias.x, .seen_begin = 7});
      for (std::int32_t t = 0; t < kTokens; ++t) {
        if (t < 7 || t % 5 == 0) {
          EXPECT_EQ(ruled.x[t], softmax::kNegInf) << name_of(isa) << " " << t;
        } else if (std::isnan(score)) {
          EXPECT_TRUE(std::isnan(ruled.x[t]));
        } else {
          EXPECT_EQ(ruled.x[t], 2.0F * score + 0.5F) << name_of(isa) << " " << t;
        }
      }
    }
  }
}

}  // namespace
}  // namespace lean::cpu
