// Where things lie for products of warpgroups, against a model of what the hardware reads: descriptors decoded as the PTX ISA says,
// bytes swizzled as it says, for whole products Q K^T and P V of a wide tile.
#include "backends/cuda/wide_layout.hpp"

#include <gtest/gtest.h>

#include <cstdint>
#include <set>
#include <utility>
#include <vector>

#include "backends/cuda/kernel_rows.hpp"

namespace lean::cuda::wide {
namespace {

/// A descriptor's fields, in bytes (PTX ISA, "Matrix Descriptor Format").
struct Descriptor {
  explicit Descriptor(std::uint64_t bits)
      : start(static_cast<std::uint32_t>(bits & 0x3FFF) * 16),
        leading(static_cast<std::uint32_t>(bits >> 16 & 0x3FFF) * 16),
        stride(static_cast<std::uint32_t>(bits >> 32 & 0x3FFF) * 16),
        base_offset(static_cast<std::uint32_t>(bits >> 49 & 7)),
        swizzle(static_cast<std::uint32_t>(bits >> 62)) {}

  std::uint32_t start, leading, stride, base_offset, swizzle;
};

/// The swizzle of 128 bytes: bits 4 to 6 of an address change with bits 7 to 9.
std::uint32_t swizzled(std::uint32_t address) { return address ^ (address >> 7 & 7U) << 4; }

/// Where the hardware reads element (row, k) of a factor whose rows run along the sum.
std::uint32_t along_sum(const Descriptor& d, std::int32_t row, std::int32_t k) {
  return swizzled(d.start + static_cast<std::uint32_t>(row / 8) * d.stride + static_cast<std::uint32_t>(row % 8 * 128 + 2 * k));
}

/// Where it reads element (k, column) of a factor whose rows are the sum's terms: 64 columns of 8 rows lie together.
std::uint32_t as_terms(const Descriptor& d, std::int32_t k, std::int32_t column) {
  return swizzled(d.start + static_cast<std::uint32_t>(column / 64) * d.leading + static_cast<std::uint32_t>(k / 8) * d.stride +
                  static_cast<std::uint32_t>(k % 8 * 128 + column % 64 * 2));
}

/// Where element `dim` of a row was stored, by a tensor copy or a thread.
std::uint32_t stored(std::uint32_t begin, std::int32_t rows, std::int32_t row, std::int32_t dim) {
  return begin + piece_place(rows, row, dim / 8) + static_cast<std::uint32_t>(dim % 8 * 2);
}

constexpr std::uint32_t kBegin = 5 * 1024;  // columns begin at any multiple of 1024 bytes

/// The wide variants, of one type.
std::vector<KernelConfig> configs() {
  std::vector<KernelConfig> found;
  for (const KernelRow& row : kWideRows) found.push_back(config_of(kWideRows.architecture, row, DType::kFloat16));
  return found;
}

TEST(WideLayout, PiecesOfARowLieApartAndFillTheColumns) {
  for (const KernelConfig& config : configs()) {
    const std::int32_t stage_bytes = config.tile_tokens * config.stage_row_bytes(config.head_dim);
    std::set<std::uint32_t> places;
    for (std::int32_t row = 0; row < config.tile_tokens; ++row) {
      for (std::int32_t piece = 0; piece < config.columns() * kPieces; ++piece)
        places.insert(piece_place(config.tile_tokens, row, piece));
    }
    EXPECT_EQ(places.size(), static_cast<std::size_t>(stage_bytes / 16));
    EXPECT_EQ(*places.rbegin(), static_cast<std::uint32_t>(stage_bytes - 16));
    EXPECT_EQ(stage_bytes % 1024, 0) << "columns and stages begin where a swizzle does";
    EXPECT_EQ(config.tile_tokens % kAtomRows, 0);
    EXPECT_GE(config.columns() * kColumnBytes, config.head_dim * 2);
    EXPECT_LT((config.columns() - 1) * kColumnBytes, config.head_dim * 2);
  }
}

/// A quarter warp that loads the same piece of 8 rows meets no bank twice.
TEST(WideLayout, EqualPiecesOfEightRowsLieInAllBanks) {
  for (std::int32_t piece = 0; piece < 16; ++piece) {
    std::set<std::uint32_t> banks;
    for (std::int32_t row = 8; row < 16; ++row) banks.insert(piece_place(128, row, piece) % 128 / 16);
    EXPECT_EQ(banks.size(), 8U) << piece;
  }
}

TEST(WideLayout, DescriptorsSayWhatThePtxIsaAsksFor) {
  const Descriptor d(descriptor(0x2F400, 16'384));
  EXPECT_EQ(d.start, 0x2F400U);
  EXPECT_EQ(d.leading, 16'384U);
  EXPECT_EQ(d.stride, 1024U);
  EXPECT_EQ(d.base_offset, 0U);
  EXPECT_EQ(d.swizzle, 1U);
  EXPECT_EQ(Descriptor(descriptor(0x7FFF0, 16)).start, 0x3FFF0U) << "18 bits of a shared address";
  for (std::uint32_t begin = 0; begin < 227 * 1024; begin += 1024) {  // wherever a stage may lie, and whatever of it is meant
    for (const std::uint32_t bytes : {0U, 16U, 96U, 2048U, 14'336U, 16'384U + 96U, 73'728U}) {
      if (begin + bytes >= 227 * 1024) continue;
      EXPECT_EQ(further(descriptor(begin, 16'384), bytes), descriptor(begin + bytes, 16'384)) << begin << " + " << bytes;
    }
  }
}

/// Every step of Q K^T reads 16 dims of the rows of a warpgroup, or where factors are swapped of all rows, and of all tokens or half of
/// them, from where they were stored.
TEST(WideLayout, ProductsOfQueriesAndKeysReadWhatWasStored) {
  struct Factor {
    std::int32_t rows;   // as it lies
    std::int32_t first;  // of those that a product reads
    std::int32_t count;
  };
  for (const KernelConfig& config : configs()) {
    const std::int32_t rows = config.swaps_ab() ? config.q_rows : 64;
    for (const Factor& factor : {Factor{config.q_rows, 0, rows}, Factor{config.q_rows, config.q_rows - rows, rows},
                                 Factor{config.tile_tokens, 0, config.tile_tokens},
                                 Factor{config.tile_tokens, config.tile_tokens / 2, config.tile_tokens / 2}}) {
      for (std::int32_t step = 0; step < config.head_dim / 16; ++step) {
        const auto begin = kBegin + static_cast<std::uint32_t>(factor.first * kColumnBytes);
        const Descriptor d(descriptor(begin + step_place(factor.rows, step), 16));
        for (std::int32_t row = 0; row < factor.count; ++row) {
          for (std::int32_t k = 0; k < 16; ++k)
            ASSERT_EQ(along_sum(d, row, k), stored(kBegin, factor.rows, factor.first + row, 16 * step + k)) << row << ' ' << step;
        }
      }
    }
  }
}

/// Every run of P V reads all dims of 16 tokens, or of a latent tile a warpgroup's half of the values' dims in the keys' stage, or where
/// factors are swapped 64 of them, a column.
TEST(WideLayout, ProductsOfWeightsAndValuesReadWhatWasStored) {
  for (const KernelConfig& config : configs()) {
    const auto column_bytes = static_cast<std::uint32_t>(config.tile_tokens * kColumnBytes);
    const std::int32_t own_dims = config.swaps_ab() ? 64 : config.summed_dims() / config.value_warps();
    EXPECT_LE(own_dims, 256) << "columns of a product";
    for (std::int32_t first = 0; first < config.summed_dims(); first += own_dims) {
      for (std::int32_t run = 0; run < config.tile_tokens / 16; ++run) {
        const Descriptor d(descriptor(kBegin + value_place(first, column_bytes) + run_place(run), column_bytes));
        for (std::int32_t k = 0; k < 16; ++k) {
          for (std::int32_t dim = 0; dim < own_dims; ++dim)
            ASSERT_EQ(as_terms(d, k, dim), stored(kBegin, config.tile_tokens, 16 * run + k, first + dim))
                << run << ' ' << k << ' ' << dim;
        }
      }
    }
  }
}

TEST(WideLayout, AWarpgroupHoldsEveryElementOfAnAccumulatorOnce) {
  constexpr std::int32_t kColumns = 128;
  std::set<std::pair<std::int32_t, std::int32_t>> elements;
  for (std::int32_t thread = 0; thread < 128; ++thread) {
    for (std::int32_t i = 0; i < kColumns / 2; ++i) {
      const Place place = accumulator_place(thread, i);
      EXPECT_EQ(place.row / 16, thread / 32) << "a warp's rows are its own";
      EXPECT_LT(place.column, kColumns);
      elements.emplace(place.row, place.column);
    }
  }
  EXPECT_EQ(elements.size(), 64U * kColumns);
  // The first figures of the PTX ISA's table: thread 0 has (0, 0), (0, 1), (8, 0), (8, 1), (0, 8); thread 5 begins with (1, 2).
  EXPECT_EQ(accumulator_place(0, 3), (Place{8, 1}));
  EXPECT_EQ(accumulator_place(0, 4), (Place{0, 8}));
  EXPECT_EQ(accumulator_place(5, 0), (Place{1, 2}));
}

/// Operand A in registers (PTX ISA, "Register Fragments for A", 16 bits): register i of a lane holds two neighbours of row quad, 8
/// below it for odd i, 8 columns on from i = 2.
TEST(WideLayout, WeightsLieWhereTheNextProductWantsThem) {
  for (std::int32_t thread = 0; thread < 128; ++thread) {
    for (std::int32_t run = 0; run < 8; ++run) {
      for (std::int32_t i = 0; i < 4; ++i) {
        const Place wanted{.row = thread / 32 * 16 + thread % 32 / 4 + i % 2 * 8, .column = 16 * run + i / 2 * 8 + thread % 4 * 2};
        EXPECT_EQ(accumulator_place(thread, operand_pair(run, i)), wanted);
        EXPECT_EQ(accumulator_place(thread, operand_pair(run, i) + 1), (Place{wanted.row, wanted.column + 1}));
      }
    }
  }
}

/// Where factors are swapped, weights pass through shared memory: what a lane has of an accumulator, tokens by query rows, lies where the
/// next product reads it, query rows by tokens. Of a stored matrix the PTX ISA has lane i hold elements 2 (i % 4) and + 1 of row i / 4, and
/// with .trans these are of the columns that lanes give addresses of.
TEST(WideLayout, SwappedWeightsLieWhereTheNextProductReadsThem) {
  int variants = 0;
  for (const KernelConfig& config : configs()) {
    if (!config.swaps_ab()) continue;
    ++variants;
    std::set<std::uint32_t> bytes;
    for (std::int32_t warp = 0; warp < 4; ++warp) {
      for (std::int32_t column = 0; column < config.q_rows; column += 16) {
        for (std::int32_t lane = 0; lane < 32; ++lane) {
          const std::uint32_t row_at = kBegin + transposed_place(config.q_rows, 32 * warp + lane, column);
          for (std::int32_t i = 0; i < 8; ++i) {
            // Element i of that row: held by a lane of row i of the matrix, whose column is lane % 8.
            const std::int32_t holder = 32 * warp + 4 * i + lane % 8 / 2;
            const std::int32_t matrix = lane / 8;
            const Place held = accumulator_place(holder, (column / 8 + matrix / 2) * 4 + matrix % 2 * 2 + lane % 2);
            const std::uint32_t at = row_at + static_cast<std::uint32_t>(2 * i);
            bytes.insert(at);
            ASSERT_EQ(at, stored(kBegin, config.q_rows, held.column, held.row)) << warp << ' ' << lane << ' ' << i;
          }
        }
      }
    }
    EXPECT_EQ(bytes.size(), static_cast<std::size_t>(64 * config.q_rows)) << "every weight once";
  }
  EXPECT_GT(variants, 0);
}

}  // namespace
}  // namespace lean::cuda::wide
