// TileKernels, one by one and on every instruction set of this machine: the online softmax of a tile, and scores of many rows.
#include "backends/cpu/tile_kernels.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "base/int_math.hpp"
#include "lean/float_types.hpp"
#include "lean/lean.hpp"
#include "support/aligned_rows.hpp"
#include "support/random.hpp"
#include "support/tables.hpp"

namespace lean::cpu {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

/// Rows of scores, all NaN until they are written.
class Scores {
 public:
  Scores(std::int32_t rows, std::int32_t tokens) : rows_(rows, support::score_stride(tokens), kNan) {}

  [[nodiscard]] RowBuffer buffer() { return rows_.buffer(); }
  [[nodiscard]] float& at(std::int32_t r, std::int32_t t) { return rows_.buffer().row(r)[t]; }

 private:
  support::AlignedRows rows_;
};

/// What rows are in before a tile, and after it.
struct Softmax {
  std::vector<float> m;
  std::vector<float> l;
  std::vector<float> rescale;
  std::vector<std::int32_t> visible;

  Softmax(std::int32_t rows, std::int32_t tokens)
      : m(static_cast<std::size_t>(rows), -kInf),
        l(static_cast<std::size_t>(rows)),
        rescale(static_cast<std::size_t>(rows), kNan),
        visible(static_cast<std::size_t>(rows), tokens) {}

  void take(CpuIsa isa, Scores& scores, std::int32_t tokens, float scale) {
    kernels_for(isa).online_softmax(scores.buffer(), tokens, {scale, visible.data(), m.data(), l.data(), rescale.data()});
  }
};

/// Weights are within a relative 2^-22.5 of those of the very scores times the scale, 0 where these weigh nothing or are not seen, and
/// l is their sum; for positive, negative and no scale, and any number of rows, tokens and hidden ones.
TEST(TileKernels, WeightsAreThoseOfScaledScores) {
  for (const CpuIsa isa : support::available_isas()) {
    support::Stream random(7);
    for (int i = 0; i < 400; ++i) {
      const auto rows = static_cast<std::int32_t>(random.between(1, 19));
      const auto tokens = static_cast<std::int32_t>(random.between(1, 70));
      const float scale = random.one_of({1.0F, 0.125F, 30.0F, -0.5F, 0.0F, -0.0F});
      Scores scores(rows, tokens);
      Softmax state(rows, tokens);
      std::vector<std::vector<float>> scaled(static_cast<std::size_t>(rows), std::vector<float>(static_cast<std::size_t>(tokens)));
      for (std::int32_t r = 0; r < rows; ++r) {
        const auto row = static_cast<std::size_t>(r);
        state.visible[row] = static_cast<std::int32_t>(random.between(0, tokens));
        if (random.chance(50)) state.m[row] = static_cast<float>(random.between(-30, 30)), state.l[row] = 2.0F;
        const float spread = random.one_of({1.0F, 20.0F, 1e6F, 1e30F});
        for (std::int32_t t = 0; t < tokens; ++t) {
          const float score = random.chance(3) ? -kInf : spread * static_cast<float>(random.between(-1000, 1000)) * 0.001F;
          scores.at(r, t) = score;
          const float product = score * scale;
          scaled[row][static_cast<std::size_t>(t)] = t < state.visible[row] ? product : -kInf;
        }
      }
      const Softmax before = state;
      state.take(isa, scores, tokens, scale);
      for (std::int32_t r = 0; r < rows; ++r) {
        const auto row = static_cast<std::size_t>(r);
        const auto weighs_nothing_known = [](float x) { return std::isnan(x) || x == kInf; };  // -inf times 0 or a negative scale
        if (std::ranges::any_of(scaled[row], weighs_nothing_known)) {
          EXPECT_TRUE(std::isnan(state.m[row]) && std::isnan(state.l[row]));
          continue;
        }
        const float m = std::max(before.m[row], *std::ranges::max_element(scaled[row]));
        ASSERT_EQ(state.m[row], m) << name_of(isa) << " " << i;
        if (m == -kInf) {
          EXPECT_EQ(state.rescale[row], 1.0F);
          EXPECT_EQ(state.l[row], 0.0F);
        }
        double sum = 0.0;
        for (std::int32_t t = 0; t < tokens; ++t) {
          const float x = scaled[row][static_cast<std::size_t>(t)] - m;  // rounded: what a weight is of
          const double exact = m == -kInf || x < -126.0F ? 0.0 : std::exp2(static_cast<double>(x));
          ASSERT_NEAR(scores.at(r, t), exact, exact * std::exp2(-22.5)) << name_of(isa) << " " << i << ": " << x;
          sum += exact;
        }
        const double rescaled = m == -kInf || before.l[row] == 0.0F ? 0.0 : before.l[row] * std::exp2(double{before.m[row]} - m);
        ASSERT_NEAR(state.l[row], rescaled + sum, (rescaled + sum) * 1e-5) << name_of(isa) << " " << i;
      }
    }
  }
}

/// A NaN that a row sees is in its m and l, whatever the others are; one that it does not see is in neither.
TEST(TileKernels, R08_ANanIsSeenWhereItIs) {
  constexpr std::int32_t kTokens = 37;
  for (const CpuIsa isa : support::available_isas()) {
    for (const float others : {1.0F, -kInf, -1e30F}) {
      for (std::int32_t at = 0; at < kTokens; ++at) {
        for (const float scale : {0.5F, -0.5F}) {
          Scores scores(2, kTokens);
          Softmax state(2, kTokens);
          state.visible[1] = at;
          for (std::int32_t r = 0; r < 2; ++r) {
            for (std::int32_t t = 0; t < kTokens; ++t) scores.at(r, t) = t == at ? kNan : std::copysign(others, others * scale);
          }
          state.take(isa, scores, kTokens, scale);
          EXPECT_TRUE(std::isnan(state.m[0]) && std::isnan(state.l[0])) << name_of(isa) << " " << others << " " << at;
          const bool seen = others != -kInf && at > 0;
          EXPECT_EQ(state.m[1], seen ? std::copysign(others, others * scale) * scale : -kInf);
          EXPECT_EQ(state.l[1], seen ? static_cast<float>(at) : 0.0F) << name_of(isa) << " " << others << " " << at;
          EXPECT_EQ(scores.at(1, at), 0.0F);
        }
      }
    }
  }
}

/// Keys and queries in a type, whose products are exact sums of small whole numbers, so any order of adding gives the same.
template <typename T>
void check_scores_of_many(DType dtype, CpuIsa isa) {
  const TileKernels& kernels = kernels_for(isa);
  const int type = table_index(dtype);
  support::Stream random(11);
  for (const std::int32_t dims : {1, 2, 15, 31, 32, 33, 64, 80, 127, 128, 129, 192, 200, 257, 576}) {
    for (const std::int32_t tokens : {1, 15, 16, 17, 31, 33, 64}) {
      const auto rows = static_cast<std::int32_t>(random.between(kManyRows, 128));
      const auto stride = static_cast<std::int32_t>(round_up(dims, kLaneMultiple));
      support::AlignedRows queries(rows, stride);
      std::vector<std::uint16_t> queries_bf16(static_cast<std::size_t>(rows * stride));
      std::vector<T> keys(static_cast<std::size_t>(tokens * dims));  // as many as there are, for whoever reads past them
      std::vector<std::vector<float>> expected(static_cast<std::size_t>(rows),
                                               std::vector<float>(static_cast<std::size_t>(tokens)));
      const auto small = [&] { return static_cast<float>(random.between(-8, 8)); };
      for (T& key : keys) key = from_float<T>(small());
      for (std::int32_t r = 0; r < rows; ++r) {
        float* row = queries.buffer().row(r);
        for (std::int32_t d = 0; d < dims; ++d) row[d] = small();
        for (std::int32_t d = 0; d < stride; ++d)
          queries_bf16[static_cast<std::size_t>(r * stride + d)] = from_float<BFloat16>(row[d]).bits;
        for (std::int32_t t = 0; t < tokens; ++t) {
          for (std::int32_t d = 0; d < dims; ++d) {
            expected[static_cast<std::size_t>(r)][static_cast<std::size_t>(t)] +=
                row[d] * to_float(keys[static_cast<std::size_t>(t * dims + d)]);
          }
        }
        kernels.order_query[type](row, dims);
      }
      Scores scores(rows, tokens);
      const TokenRows k{.data = reinterpret_cast<const std::byte*>(keys.data()),
                        .token_stride_bytes = dims * static_cast<std::int64_t>(sizeof(T)),
                        .tokens = tokens,
                        .dims = dims};
      kernels.scores_of_many[type]({queries.buffer(), queries_bf16.data()}, k, scores.buffer(), {});
      for (std::int32_t r = 0; r < rows; ++r) {
        for (std::int32_t t = 0; t < tokens; ++t) {
          ASSERT_EQ(scores.at(r, t), expected[static_cast<std::size_t>(r)][static_cast<std::size_t>(t)])
              << name_of(isa) << ", " << dims << " dims, " << tokens << " tokens, " << rows << " rows: " << r << ", " << t;
        }
      }
    }
  }
}

TEST(TileKernels, ScoresOfManyRowsAreThoseOfAllPairs) {
  for (const CpuIsa isa : support::available_isas()) {
    check_scores_of_many<BFloat16>(DType::kBFloat16, isa);
    check_scores_of_many<Half>(DType::kFloat16, isa);
  }
}

}  // namespace
}  // namespace lean::cpu
