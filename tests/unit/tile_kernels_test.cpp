// TileKernels, one by one and on every instruction set of this machine: the online softmax of a tile, and tiles of many rows.
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

/// Rows of small whole numbers in a type: sums of their products are exact in any order.
template <typename T>
std::vector<T> whole_numbers(std::int32_t rows, std::int32_t dims, support::Stream& random) {
  std::vector<T> values(static_cast<std::size_t>(rows * dims));
  for (T& value : values) value = from_float<T>(static_cast<float>(random.between(-8, 8)));
  return values;
}

template <typename T>
TokenRows rows_of(const std::vector<T>& values, std::int32_t tokens, std::int32_t dims) {
  return {.data = values.data(), .token_stride_bytes = dims * static_cast<std::int64_t>(sizeof(T)), .tokens = tokens, .dims = dims};
}

/// A block's rows on their way through tiles.
struct Block {
  Block(std::int32_t rows, std::int32_t tokens, std::int32_t value_stride)
      : scores(rows, tokens), sums(rows, value_stride), o(rows, value_stride), state(rows, tokens) {
    std::fill_n(o.buffer().data, std::ptrdiff_t{rows} * value_stride, 0.0F);
  }

  Scores scores;
  support::AlignedRows sums;
  support::AlignedRows o;
  Softmax state;
};

/// Tiles turned and by stages, of one call: the same bits, since scores are exact. Rules of rows, of all where they mask, halve scores;
/// rows see any number of tokens.
template <typename T>
void check_turned_tiles(CpuIsa isa, DType dtype) {
  const TileKernels& kernels = kernels_for(isa);
  const int type = table_index(dtype);
  const TurnedTile* turned = kernels.turned[type];
  if (turned == nullptr) return;
  support::Stream random(11);
  for (const std::int32_t dims : {1, 2, 15, 31, 32, 33, 64, 80, 127, 128, 129, 192, 200, 257, 576}) {
    for (const std::int32_t tokens : {1, 15, 16, 17, 31, 33, 64, 100}) {
      if (!turned->serves(dims)) continue;
      const std::int32_t rows = static_cast<std::int32_t>(random.between(turned->from_rows, 200));
      const std::int32_t room = static_cast<std::int32_t>(round_up(rows, kTurnedMultiple));
      const std::int32_t value_dims = random.one_of({dims, std::min(dims, 64)});
      const auto stride = static_cast<std::int32_t>(round_up(dims, kLaneMultiple));
      const auto value_stride = static_cast<std::int32_t>(round_up(value_dims, kLaneMultiple));
      support::AlignedRows queries(room, stride);
      std::vector<std::uint16_t> queries_bf16(static_cast<std::size_t>(room * stride));
      for (std::int32_t r = 0; r < room; ++r) {
        float* row = queries.buffer().row(r);
        for (std::int32_t d = 0; d < dims; ++d) row[d] = static_cast<float>(random.between(-8, 8));
        for (std::int32_t d = 0; d < stride; ++d)
          queries_bf16[static_cast<std::size_t>(r * stride + d)] = from_float<BFloat16>(row[d]).bits;
        kernels.order_query[type](row, dims);
      }
      QueryRows q{queries.buffer(), queries_bf16.data()};
      q.f32.rows = rows;
      Block by_stages(room, tokens, value_stride);
      Block at_once(room, tokens, value_stride);
      const auto of_call = [&](RowBuffer buffer) { return buffer.rows = rows, buffer; };
      const auto padded = static_cast<std::int32_t>(round_up(tokens, kTurnedMultiple));
      support::AlignedRows turned_k(padded, static_cast<std::int32_t>(round_up(dims, kTurnedMultiple)));
      support::AlignedRows turned_v(padded, static_cast<std::int32_t>(round_up(value_dims, kTurnedMultiple)));
      const auto halve = [](const void*, std::int32_t, const RowBuffer& s) noexcept {
        for (std::int32_t r = 0; r < s.rows; ++r) {
          for (std::int32_t t = 0; t < s.stride; ++t) s.row(r)[t] *= 0.5F;
        }
        return true;
      };
      for (int tile = 0; tile < 2; ++tile) {
        const std::vector<T> keys = whole_numbers<T>(tokens, dims, random);
        const std::vector<T> values = whole_numbers<T>(tokens, value_dims, random);
        const bool scales = random.chance(50);
        const bool masks = scales && random.chance(50);
        const float scale = random.one_of({0.125F, -0.25F});
        const bool rises = random.chance(50);  // as behind a causal limit
        for (std::int32_t r = 0; r < rows; ++r) {
          const auto of_causal = static_cast<std::int32_t>(std::int64_t{tokens} * r / rows);
          by_stages.state.visible[static_cast<std::size_t>(r)] = rises ? of_causal : random.one_of({0, tokens / 2, tokens});
        }
        at_once.state.visible = by_stages.state.visible;
        const TokenRows k = rows_of(keys, tokens, dims);
        const TokenRows v = rows_of(values, tokens, value_dims);
        kernels.scores[type](q, k, of_call(by_stages.scores.buffer()), {});
        if (scales) halve(nullptr, 0, of_call(by_stages.scores.buffer()));
        const SoftmaxRows softmax{scales ? 1.0F : scale, by_stages.state.visible.data(), by_stages.state.m.data(),
                                  by_stages.state.l.data(), by_stages.state.rescale.data()};
        kernels.online_softmax(of_call(by_stages.scores.buffer()), tokens, softmax);
        kernels.accumulate[type](of_call(by_stages.o.buffer()), of_call(by_stages.sums.buffer()),
                                 of_call(by_stages.scores.buffer()), v, by_stages.state.rescale.data(), {});
        turned->compute({.q = q,
                         .k = k,
                         .v = v,
                         .turned_k = turned_k.buffer().data,
                         .turned_v = turned_v.buffer().data,
                         .s = of_call(at_once.scores.buffer()),
                         .sums = of_call(at_once.sums.buffer()),
                         .o = of_call(at_once.o.buffer()),
                         .softmax = {scale, at_once.state.visible.data(), at_once.state.m.data(), at_once.state.l.data(),
                                     at_once.state.rescale.data()},
                         .apply_rules = scales ? +halve : nullptr,
                         .masks = masks});
      }
      for (std::int32_t r = 0; r < rows; ++r) {
        const auto i = static_cast<std::size_t>(r);
        ASSERT_EQ(by_stages.state.m[i], at_once.state.m[i]) << name_of(isa) << " " << dims << " dims, row " << r << " of " << rows;
        ASSERT_EQ(by_stages.state.l[i], at_once.state.l[i]) << name_of(isa) << " " << dims << " dims, row " << r << " of " << rows;
        for (std::int32_t d = 0; d < value_dims; ++d) {
          ASSERT_EQ(by_stages.o.buffer().row(r)[d], at_once.o.buffer().row(r)[d])
              << name_of(isa) << ", " << dims << ", " << value_dims << " dims, " << tokens << " tokens, " << rows << " rows: " << r
              << ", " << d;
        }
      }
    }
  }
}

TEST(TileKernels, TurnedTilesAreThoseOfTheStages) {
  for (const CpuIsa isa : support::available_isas()) {
    check_turned_tiles<float>(isa, DType::kFloat32);
    check_turned_tiles<Half>(isa, DType::kFloat16);
    check_turned_tiles<BFloat16>(isa, DType::kBFloat16);
    check_turned_tiles<Float8E4M3>(isa, DType::kFloat8E4M3);
    check_turned_tiles<Float8E5M2>(isa, DType::kFloat8E5M2);
  }
}

}  // namespace
}  // namespace lean::cpu
