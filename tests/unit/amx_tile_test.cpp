// The tile on AMX, computed on tile registers in software: scores and accumulate for few rows and many, rows side by side, apart and in
// tables, tiles that end anywhere. Needs AVX-512-BF16, as the rest of its arithmetic is done there.
#if defined(__x86_64__) && defined(__linux__)

#include "support/tile_registers.hpp"

#define amx_bf16_kernels amx_bf16_kernels_in_software  // the library has these names
#define amx_turned_tile amx_turned_tile_in_software
#include "backends/cpu/amx_bf16.cpp"
#include "backends/cpu/amx_turned_tile.cpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <vector>

#include "base/int_math.hpp"
#include "lean/lean.hpp"
#include "support/aligned_rows.hpp"
#include "support/random.hpp"

namespace lean::cpu {
namespace {

/// bf16 rows of small whole numbers, whose products' sums are exact: side by side, apart, or each where it likes, named by a table.
class Tokens {
 public:
  enum class Lie { kSideBySide, kApart, kAnywhere, kInPages };

  Tokens(std::int32_t tokens, std::int32_t dims, Lie lie, support::Stream& random) {
    const std::int32_t stride = lie == Lie::kSideBySide ? dims : 2 * dims;
    values_.resize(static_cast<std::size_t>(2 * tokens * stride));
    for (std::uint16_t& value : values_) value = from_float<BFloat16>(static_cast<float>(random.between(-4, 4))).bits;
    rows_ = {.data = values_.data(), .token_stride_bytes = std::int64_t{2} * stride, .tokens = tokens, .dims = dims};
    if (lie != Lie::kAnywhere && lie != Lie::kInPages) return;
    for (std::int32_t t = 0; t < tokens; ++t) {
      const std::int32_t at = lie == Lie::kAnywhere ? (t * 7 + 3) % (2 * tokens) : t / 16 % 2 * tokens + t;  // runs of 16
      table_.push_back(reinterpret_cast<const std::byte*>(values_.data() + static_cast<std::ptrdiff_t>(at) * stride));
    }
    rows_.table = table_.data();
  }
  Tokens(const Tokens&) = delete;
  Tokens& operator=(const Tokens&) = delete;

  [[nodiscard]] const TokenRows& rows() const { return rows_; }
  [[nodiscard]] float at(std::int32_t t, std::int32_t d) const {
    return to_float(BFloat16{reinterpret_cast<const std::uint16_t*>(rows_.row(t))[d]});
  }

 private:
  std::vector<std::uint16_t> values_;
  std::vector<const std::byte*> table_;
  TokenRows rows_;
};

struct Case {
  std::int32_t rows;
  std::int32_t tokens;
  std::int32_t dims;
  Tokens::Lie lie;
};

template <typename TCheck>
void for_cases(const TCheck& check) {
  for (const std::int32_t rows : {1, 4, 15, 16, 17, 32, 33, 128}) {
    for (const std::int32_t tokens : {1, 15, 16, 31, 32, 33, 64, 100, 128}) {
      for (const std::int32_t dims : {32, 64, 96, 128, 256}) {
        if (std::int64_t{tokens} * dims > 128 * 128) continue;  // 64 KB of K and V: a tile has no more
        for (const auto lie : {Tokens::Lie::kSideBySide, Tokens::Lie::kApart, Tokens::Lie::kAnywhere, Tokens::Lie::kInPages}) {
          check(Case{rows, tokens, dims, lie});
        }
      }
    }
  }
}

bool computes_here() { return __builtin_cpu_supports("avx512bf16") != 0; }

TEST(AmxTile, ScoresAreThoseOfAllPairs) {
  if (!computes_here()) GTEST_SKIP() << "no AVX-512-BF16 here";
  support::Stream random(3);
  for_cases([&](const Case& c) {
    const Tokens keys(c.tokens, c.dims, c.lie, random);
    std::vector<std::uint16_t> queries(static_cast<std::size_t>(c.rows * c.dims));
    for (std::uint16_t& query : queries) query = from_float<BFloat16>(static_cast<float>(random.between(-4, 4))).bits;
    support::AlignedRows found(c.rows, support::score_stride(c.tokens));
    const RowBuffer s = found.buffer();
    scores({{nullptr, c.rows, c.dims}, queries.data()}, keys.rows(), s, {});
    for (std::int32_t r = 0; r < c.rows; ++r) {
      for (std::int32_t t = 0; t < c.tokens; ++t) {
        float expected = 0.0F;
        for (std::int32_t d = 0; d < c.dims; ++d) {
          expected += to_float(BFloat16{queries[static_cast<std::size_t>(r * c.dims + d)]}) * keys.at(t, d);
        }
        ASSERT_EQ(s.row(r)[t], expected) << c.rows << " rows, " << c.tokens << " tokens, " << c.dims << " dims: " << r << ", " << t;
      }
    }
  });
}

TEST(AmxTile, OutputsAreWeightedSumsOfValues) {
  if (!computes_here()) GTEST_SKIP() << "no AVX-512-BF16 here";
  support::Stream random(5);
  for_cases([&](const Case& c) {
    const Tokens values(c.tokens, c.dims, c.lie, random);
    support::AlignedRows outputs(c.rows, c.dims);
    support::AlignedRows sums(c.rows, c.dims);
    support::AlignedRows weights(c.rows, support::score_stride(c.tokens));
    const RowBuffer o = outputs.buffer();
    const RowBuffer p = weights.buffer();
    std::vector<float> expected(static_cast<std::size_t>(c.rows * c.dims));
    std::vector<float> rescale(static_cast<std::size_t>(c.rows));
    for (std::int32_t r = 0; r < c.rows; ++r) {
      for (std::int32_t t = 0; t < c.tokens; ++t) p.row(r)[t] = static_cast<float>(random.between(0, 8)) * 0.125F;
      rescale[static_cast<std::size_t>(r)] = random.one_of({0.0F, 0.5F, 1.0F});
      for (std::int32_t d = 0; d < c.dims; ++d) {
        const float before = static_cast<float>(random.between(-4, 4));
        const std::int32_t in_order = d % 32;  // where accumulate keeps it: halves of 128 bits, first the lower ones
        const std::int32_t kept = d - in_order + in_order / 8 * 4 + in_order % 4 + (in_order % 8 >= 4 ? 16 : 0);
        o.row(r)[kept] = before;
        float sum = before * rescale[static_cast<std::size_t>(r)];
        for (std::int32_t t = 0; t < c.tokens; ++t) sum += p.row(r)[t] * values.at(t, d);
        expected[static_cast<std::size_t>(r * c.dims + d)] = sum;
      }
    }
    accumulate(o, sums.buffer(), p, values.rows(), rescale.data(), {});
    for (std::int32_t r = 0; r < c.rows; ++r) {
      restore_values(o.row(r), c.dims);
      for (std::int32_t d = 0; d < c.dims; ++d) {
        ASSERT_EQ(o.row(r)[d], expected[static_cast<std::size_t>(r * c.dims + d)])
            << c.rows << " rows, " << c.tokens << " tokens, " << c.dims << " dims: " << r << ", " << d;
      }
    }
  });
}

/// Rows as numbers of 8 significant bits, whose products' sums are rounded.
std::vector<std::uint16_t> bf16_rows(std::int32_t rows, std::int32_t dims, support::Stream& random) {
  std::vector<std::uint16_t> values(static_cast<std::size_t>(rows * dims));
  for (std::uint16_t& value : values) value = from_float<BFloat16>(static_cast<float>(random.between(-255, 255)) / 64.0F).bits;
  return values;
}

TEST(AmxTile, TurnedTilesGiveTheSameBits) {
  if (!computes_here()) GTEST_SKIP() << "no AVX-512-BF16 here";
  support::Stream random(7);
  for_cases([&](const Case& c) {
    const Tokens keys(c.tokens, c.dims, c.lie, random);
    const Tokens values(c.tokens, c.dims, c.lie, random);
    support::AlignedRows turned_k(round_up(c.tokens, 16), c.dims);
    support::AlignedRows turned_v(round_up(c.tokens, 16), c.dims);
    const TokenRows k{.data = turned_k.buffer().data, .tokens = c.tokens, .dims = c.dims};
    const TokenRows v{.data = turned_v.buffer().data, .tokens = c.tokens, .dims = c.dims};
    const auto room = static_cast<std::int32_t>(round_up(c.rows, kTurnedTile.rows_together));
    std::vector<std::uint16_t> queries = bf16_rows(room, c.dims, random);
    const std::int32_t stride = support::score_stride(c.tokens);
    support::AlignedRows plain_s(c.rows, stride);
    support::AlignedRows turned_s(kTurnedTile.rows_together, stride);
    support::AlignedRows plain_o(c.rows, c.dims, 3.0F);
    support::AlignedRows turned_o(c.rows, c.dims, 3.0F);
    support::AlignedRows plain_sums(c.rows, c.dims);
    support::AlignedRows turned_sums(kTurnedTile.rows_together, c.dims);
    const std::vector<float> rescale(static_cast<std::size_t>(c.rows), 0.7F);
    scores({{nullptr, c.rows, c.dims}, queries.data()}, keys.rows(), plain_s.buffer(), {});
    const RowBuffer s = plain_s.buffer();
    for (std::int32_t r = 0; r < c.rows; ++r) std::fill(s.row(r) + c.tokens, s.row(r) + round_up(c.tokens, 16), 0.0F);
    const std::vector<float> found(s.data, s.row(c.rows));
    accumulate(plain_o.buffer(), plain_sums.buffer(), s, values.rows(), rescale.data(), {});
    kTurnedTile.begin(keys.rows(), values.rows(), turned_k.buffer().data, turned_v.buffer().data);
    for (std::int32_t row = 0; row < c.rows; row += kTurnedTile.rows_together) {
      const std::int32_t rows = std::min(kTurnedTile.rows_together, c.rows - row);
      RowBuffer part = turned_s.buffer();
      part.rows = rows;
      kTurnedTile.scores({{nullptr, rows, c.dims}, queries.data() + std::int64_t{row} * c.dims}, k, part, {});
      for (std::int32_t r = 0; r < rows; ++r) {
        ASSERT_TRUE(std::equal(part.row(r), part.row(r) + c.tokens, found.data() + std::int64_t{row + r} * stride))
            << c.rows << " rows, " << c.tokens << " tokens, " << c.dims << " dims: " << row + r;
        std::fill(part.row(r) + c.tokens, part.row(r) + round_up(c.tokens, 16), 0.0F);
      }
      round_weights(part, c.tokens);
      const RowBuffer o{turned_o.buffer().row(row), rows, c.dims};
      kTurnedTile.accumulate(o, {turned_sums.buffer().data, rows, c.dims}, part, v, rescale.data() + row, {});
    }
    kTurnedTile.end();
    const RowBuffer expected = plain_o.buffer();
    ASSERT_TRUE(std::equal(expected.data, expected.row(c.rows), turned_o.buffer().data))
        << c.rows << " rows, " << c.tokens << " tokens, " << c.dims << " dims";
  });
}

/// Scores of which rows see some, all or none, of which some are -inf or NaN.
void fill_scores(const RowBuffer& s, std::int32_t tokens, std::vector<std::int32_t>& visible, support::Stream& random) {
  for (std::int32_t r = 0; r < s.rows; ++r) {
    for (std::int32_t t = 0; t < tokens; ++t) s.row(r)[t] = static_cast<float>(random.between(-4000, 4000)) / 64.0F;
    visible[static_cast<std::size_t>(r)] = random.one_of({0, tokens / 2, tokens, tokens});
    if (random.between(0, 7) == 0) std::fill(s.row(r), s.row(r) + tokens, -std::numeric_limits<float>::infinity());
    if (random.between(0, 7) == 0) s.row(r)[random.between(0, tokens - 1)] = std::numeric_limits<float>::quiet_NaN();
  }
}

bool same(float a, float b) { return a == b || (a != a && b != b); }

TEST(AmxTile, TheSoftmaxOfATurnedTileIsTheOtherOneWithRoundedWeights) {
  const TileKernels* other = avx512_kernels();
  if (!computes_here() || other == nullptr) GTEST_SKIP() << "no AVX-512-BF16 here";
  support::Stream random(11);
  for_cases([&](const Case& c) {
    if (c.lie != Tokens::Lie::kSideBySide) return;
    const std::int32_t rows = std::min(c.rows, kTurnedTile.rows_together);
    const std::int32_t next_rows = random.one_of({0, 5, kTurnedTile.rows_together});
    const std::int32_t stride = support::score_stride(c.tokens);
    std::vector<std::int32_t> visible(static_cast<std::size_t>(rows));
    support::AlignedRows plain(rows, stride);
    support::AlignedRows turned(rows, stride);
    support::AlignedRows next(kTurnedTile.rows_together, stride);
    const RowBuffer p = plain.buffer();
    fill_scores(p, c.tokens, visible, random);
    std::copy(p.data, p.row(rows), turned.buffer().data);
    std::vector<float> m[2];
    std::vector<float> l[2];
    std::vector<float> rescale[2];
    for (int i = 0; i < 2; ++i) {
      m[i].assign(static_cast<std::size_t>(rows), random.one_of({softmax::kNegInf, 3.0F}));
      m[i] = m[0];
      l[i].assign(m[i].size(), 2.0F);
      rescale[i].assign(m[i].size(), 0.0F);
    }
    const float scale = random.one_of({0.125F, -0.25F});
    const auto softmax_rows = [&](int i) {
      return SoftmaxRows{scale, visible.data(), m[i].data(), l[i].data(), rescale[i].data(), nullptr};
    };
    const Tokens keys(c.tokens, c.dims, c.lie, random);
    support::AlignedRows turned_k(round_up(c.tokens, 16), c.dims);
    support::AlignedRows turned_v(round_up(c.tokens, 16), c.dims);
    const TokenRows k{.data = turned_k.buffer().data, .tokens = c.tokens, .dims = c.dims};
    std::vector<std::uint16_t> queries = bf16_rows(kTurnedTile.rows_together, c.dims, random);
    support::AlignedRows expected_next(std::max(1, next_rows), stride);
    RowBuffer next_s = next.buffer();
    next_s.rows = next_rows;
    RowBuffer expected_s = expected_next.buffer();
    expected_s.rows = next_rows;
    scores({{nullptr, next_rows, c.dims}, queries.data()}, keys.rows(), expected_s, {});
    other->online_softmax(p, c.tokens, softmax_rows(0));
    kTurnedTile.begin(keys.rows(), keys.rows(), turned_k.buffer().data, turned_v.buffer().data);
    const RowBuffer s = turned.buffer();
    kTurnedTile.online_softmax(s, c.tokens, softmax_rows(1), {{{nullptr, next_rows, c.dims}, queries.data()}, k, next_s});
    kTurnedTile.end();
    for (std::int32_t r = 0; r < rows; ++r) {
      const auto i = static_cast<std::size_t>(r);
      ASSERT_TRUE(same(m[0][i], m[1][i]) && same(l[0][i], l[1][i]) && same(rescale[0][i], rescale[1][i])) << r;
      for (std::int32_t t = 0; t < c.tokens; ++t) {
        const BFloat16 weight{reinterpret_cast<const std::uint16_t*>(s.row(r))[t]};
        const float rounded = to_float(from_float<BFloat16>(p.row(r)[t]));
        ASSERT_TRUE(same(to_float(weight), rounded)) << c.rows << " rows, " << c.tokens << " tokens: " << r << ", " << t;
      }
    }
    for (std::int32_t r = 0; r < next_rows; ++r) {
      ASSERT_TRUE(std::equal(next_s.row(r), next_s.row(r) + c.tokens, expected_s.row(r))) << r;
    }
  });
}

}  // namespace
}  // namespace lean::cpu

#endif
