// The tile on AMX, computed on tile registers in software: scores and accumulate for few rows and many, rows side by side, apart and in
// tables, tiles that end anywhere. Needs AVX-512-BF16, as the rest of its arithmetic is done there.
#if defined(__x86_64__) && defined(__linux__)

#include "support/tile_registers.hpp"

#define amx_bf16_kernels amx_bf16_kernels_in_software  // the library has one of that name
#include "backends/cpu/amx_bf16.cpp"

#include <gtest/gtest.h>

#include <vector>

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

}  // namespace
}  // namespace lean::cpu

#endif
