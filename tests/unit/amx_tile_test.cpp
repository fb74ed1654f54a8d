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
#include "lean/float_types.hpp"
#include "lean/lean.hpp"
#include "support/aligned_rows.hpp"
#include "support/random.hpp"
#include "support/reduced.hpp"

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
  support::EveryNth some(7);
  for (const std::int32_t rows : {1, 4, 15, 16, 17, 32, 33, 128}) {
    for (const std::int32_t tokens : {1, 15, 16, 31, 32, 33, 64, 100, 128}) {
      for (const std::int32_t dims : {32, 64, 96, 128, 256}) {
        if (std::int64_t{tokens} * dims > 128 * 128) continue;  // 64 KB of K and V: a tile has no more
        for (const auto lie : {Tokens::Lie::kSideBySide, Tokens::Lie::kApart, Tokens::Lie::kAnywhere, Tokens::Lie::kInPages}) {
          if (!some.skips()) check(Case{rows, tokens, dims, lie});
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

/// What score rules may leave: rows of -inf, and a NaN.
bool spoil(const void* tokens, std::int32_t first, const RowBuffer& s) noexcept {
  const std::int32_t some = std::min(16, *static_cast<const std::int32_t*>(tokens));
  for (std::int32_t r = 0; r < s.rows; ++r) {
    if ((first + r) % 7 == 3) std::fill(s.row(r), s.row(r) + some, -std::numeric_limits<float>::infinity());
    if ((first + r) % 11 == 5) s.row(r)[(first + r) % some] = std::numeric_limits<float>::quiet_NaN();
  }
  return false;
}

bool same(float a, float b) { return a == b || (a != a && b != b); }

/// A block's rows on their way through tiles, by stages or turned.
struct Block {
  Block(const Case& c, std::int32_t room)
      : scores_memory(room, support::score_stride(c.tokens)),
        sums_memory(room, c.dims),
        outputs_memory(c.rows, c.dims),
        m(static_cast<std::size_t>(c.rows), softmax::kNegInf),
        l(m.size()),
        rescale(m.size()),
        s(of(scores_memory, c.rows)),
        sums(of(sums_memory, c.rows)),
        o(outputs_memory.buffer()) {}

  static RowBuffer of(support::AlignedRows& memory, std::int32_t rows) {
    RowBuffer buffer = memory.buffer();
    buffer.rows = rows;
    return buffer;
  }
  [[nodiscard]] SoftmaxRows softmax_rows(float scale, const std::vector<std::int32_t>& visible) {
    return {scale, visible.data(), m.data(), l.data(), rescale.data()};
  }

  support::AlignedRows scores_memory;
  support::AlignedRows sums_memory;
  support::AlignedRows outputs_memory;
  std::vector<float> m;
  std::vector<float> l;
  std::vector<float> rescale;
  RowBuffer s;
  RowBuffer sums;
  RowBuffer o;
};

TEST(AmxTile, TurnedTilesGiveTheSameBits) {
  const TileKernels* others = avx512_kernels();
  if (!computes_here() || others == nullptr) GTEST_SKIP() << "no AVX-512-BF16 here";
  support::Stream random(7);
  for_cases([&](const Case& c) {
    const auto room = static_cast<std::int32_t>(round_up(c.rows, 32));
    const std::vector<std::uint16_t> queries = bf16_rows(room, c.dims, random);
    const QueryRows q{{nullptr, c.rows, c.dims}, const_cast<std::uint16_t*>(queries.data())};
    const float scale = random.one_of({0.125F, -0.25F});
    const bool masks = random.chance(50);
    Block by_stages(c, room);
    Block turned(c, room);
    support::AlignedRows turned_k(static_cast<std::int32_t>(round_up(c.tokens, 16)), c.dims);
    support::AlignedRows turned_v(static_cast<std::int32_t>(round_up(c.tokens, 16)), c.dims);
    for (int tile = 0; tile < 2; ++tile) {
      const Tokens keys(c.tokens, c.dims, c.lie, random);
      const Tokens values(c.tokens, c.dims, c.lie, random);
      std::vector<std::int32_t> visible;
      while (visible.size() < by_stages.m.size()) visible.push_back(random.one_of({0, c.tokens / 2, c.tokens, c.tokens}));
      scores(q, keys.rows(), by_stages.s, {});
      spoil(&c.tokens, 0, by_stages.s);
      others->online_softmax(by_stages.s, c.tokens, by_stages.softmax_rows(scale, visible));
      accumulate(by_stages.o, by_stages.sums, by_stages.s, values.rows(), by_stages.rescale.data(), {});
      kTurnedTile.compute({.q = q,
                           .k = keys.rows(),
                           .v = values.rows(),
                           .turned_k = turned_k.buffer().data,
                           .turned_v = turned_v.buffer().data,
                           .s = turned.s,
                           .sums = turned.sums,
                           .o = turned.o,
                           .softmax = turned.softmax_rows(scale, visible),
                           .apply_rules = spoil,
                           .context = &c.tokens,
                           .masks = masks});
    }
    for (std::int32_t r = 0; r < c.rows; ++r) {
      const auto i = static_cast<std::size_t>(r);
      ASSERT_TRUE(same(by_stages.m[i], turned.m[i]) && same(by_stages.l[i], turned.l[i])) << r;
      ASSERT_TRUE(std::equal(by_stages.o.row(r), by_stages.o.row(r) + c.dims, turned.o.row(r), same))
          << c.rows << " rows, " << c.tokens << " tokens, " << c.dims << " dims: " << r;
    }
  });
}

}  // namespace
}  // namespace lean::cpu

#endif
