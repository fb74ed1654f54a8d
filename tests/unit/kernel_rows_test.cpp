// The table of variants of the CUDA kernel, as far as no CUDA is needed to look at it.
#include "backends/cuda/kernel_rows.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <iterator>
#include <set>
#include <tuple>
#include <vector>

#include "backends/cuda/kernel/tuning.hpp"

namespace lean::cuda {
namespace {

TEST(KernelRows, EveryRowSaysWhyAndByWhichMeasurement) {
  std::set<std::tuple<Architecture, Scope, std::int32_t, std::int32_t, std::int32_t>> seen;
  for (const ArchitectureRows& table : kKernelRows) {
    for (const KernelRow& row : table) {
      EXPECT_TRUE(seen.emplace(table.architecture, row.scope, row.kv_bytes, row.head_dim, row.q_rows).second) << row.q_rows;
      EXPECT_STRNE(row.reason.why, "");
      EXPECT_STRNE(row.reason.measured, "");
      EXPECT_NE(std::ranges::find(kHeadDims, row.head_dim), std::end(kHeadDims)) << row.head_dim;
      EXPECT_TRUE(std::ranges::any_of(kFamilies, [&](const NamedFamily& named) { return named.family.has(row); }));
    }
  }
  EXPECT_GT(seen.size(), 60U);
}

/// What LEAN_CUDA_WIDE leaves out is no row that a call needs: every width has one without it, or the plain kernel.
TEST(KernelRows, WideRowsStandBesideOthersOfTheirDims) {
  std::int32_t narrower = 0;
  for (const KernelRow& wide : kWideRows) {
    EXPECT_STRNE(wide.reason.why, "");
    EXPECT_STRNE(wide.reason.measured, "");
    EXPECT_GE(wide.head_dim, narrower) << "a call takes the first that holds its dims";
    narrower = wide.head_dim;
    EXPECT_EQ(traits_of(wide.scope).latent, wide.head_dim > kWidestCudaHead);
    const auto has_row = [&](const NamedFamily& named) { return named.family.has(wide); };
    const int families = traits_of(wide.scope).converts ? 1 : 2;  // fp16, which fp8 becomes, or fp16 and bf16
    EXPECT_EQ(std::ranges::count_if(kFamilies, has_row) + std::ranges::count_if(kWideFamilies, has_row), families);
  }
}

/// Families without other rows have wide or latent ones and nothing else, and widths that no other family has.
TEST(KernelRows, WideFamiliesHaveWideRows) {
  for (const NamedFamily& named : kWideFamilies) {
    EXPECT_EQ(std::ranges::find(kHeadDims, named.family.head_dim), std::end(kHeadDims)) << named.name;
    for (const ArchitectureRows& table : kKernelRows) {
      EXPECT_FALSE(std::ranges::any_of(table, [&](const KernelRow& row) { return named.family.has(row); })) << named.name;
    }
    std::set<std::tuple<Scope, std::int32_t>> seen;
    for (const KernelRow& row : kWideRows) {
      if (!named.family.has(row)) continue;
      EXPECT_TRUE(seen.emplace(row.scope, row.q_rows).second) << named.name;
    }
    EXPECT_FALSE(seen.empty()) << named.name;
  }
}

/// Beside its queries a wide variant's shared memory holds two tiles of keys and two of values, and what merges has whole slices of
/// its partials' rows.
TEST(KernelRows, WideVariantsHoldFourStagesBesideTheirQueries) {
  for (const KernelRow& row : kWideRows) {
    if (traits_of(row.scope).latent) continue;
    const KernelConfig config = config_of(Architecture::kSm90, row, DType::kBFloat16);
    const std::int32_t queries = config.query_places() * config.q_rows * config.stage_row_bytes(config.head_dim);
    EXPECT_LE(queries + kWideStages * config.mean_stage_bytes(config.head_dim), (227 - 8) * 1024) << row.head_dim;
    EXPECT_EQ(config.summed_dims(), config.few_values() ? kFewValueDim : row.head_dim);
    EXPECT_GE(config.value_dim(), config.summed_dims());
    EXPECT_TRUE(config.value_dim() == 64 || config.value_dim() % 128 == 0) << config.value_dim();
    EXPECT_EQ(config.row_warps(), 8);
    EXPECT_EQ(config.token_warps(), 1);
    EXPECT_EQ(sum_roundings(config.tile()), config.tile_tokens / 4) << row.head_dim;
  }
}

/// Stages follow each other without a gap, whichever of K and V has fewer columns.
TEST(KernelRows, StagesOfKeysAndValuesLieEndToEnd) {
  bool uneven = false;
  for (const KernelRow& row : kWideRows) {
    const KernelConfig config = config_of(Architecture::kSm90, row, DType::kBFloat16);
    const std::int32_t mean = config.mean_stage_bytes(config.head_dim);
    std::int32_t end = 0;
    for (std::int32_t stage = 0; stage < kWideStages; ++stage) {
      EXPECT_EQ(config.stage_place(mean, stage), end) << row.head_dim << ", " << stage;
      EXPECT_EQ(end % 1024, 0) << "where a swizzle begins";
      end += config.tile_tokens * config.column_bytes() * (stage % 2 == 0 ? config.columns() : config.value_columns());
    }
    EXPECT_EQ(end, kWideStages * mean);
    uneven = uneven || config.value_columns() != config.columns();
  }
  EXPECT_TRUE(uneven);
}

/// A latent variant's partials and outputs are of the values' dims, its sums those of a warp that takes every token of a tile, and the
/// queries of a segment and two tiles fit beside each other with 8 KB to spare for all else.
TEST(KernelRows, LatentVariantsAreOfTheValuesDims) {
  for (const Scope scope : {Scope::kLatentTile, Scope::kLatentTurns, Scope::kLatentFp8Tile}) {
    const KernelConfig config = config_of(Architecture::kSm90, family_named("f16_d576"), 64, scope);
    EXPECT_TRUE(config.wide() && config.latent());
    EXPECT_EQ(config.tile().head_dim, 576);
    EXPECT_EQ(config.tile().value_dim, 512);
    EXPECT_EQ(config.row_warps(), 4);
    EXPECT_EQ(config.token_warps(), 1);
    EXPECT_EQ(config.warp_runs(), 4);
    EXPECT_EQ(sum_roundings(config.tile()), 16);
    EXPECT_EQ(config.columns(), 9);
    EXPECT_EQ(config.column_bytes(), 128);
    const std::int32_t queries = config.query_places() * config.q_rows * config.head_dim * 2;
    const std::int32_t tiles = 2 * config.tile_tokens * config.stage_row_bytes(config.head_dim);
    EXPECT_EQ(tiles, kLatentRingBytes);
    EXPECT_LE(queries + tiles, (227 - 8) * 1024);
    EXPECT_EQ(config.part_column(0), 0);
    EXPECT_EQ(config.stage_parts(), config.in_turns() ? 2 : 1);
    EXPECT_EQ(config.part_column(config.stage_parts()), config.columns());
    if (config.in_turns()) {
      EXPECT_EQ(config.part_column(1), 4) << "256 dims of 16 bits";
    }
  }
}

/// The same of one whose factors are swapped: a warpgroup has all rows, and the fewest a place for those of the next segment too.
TEST(KernelRows, SwappedVariantsAreDecodeStepsOfOneWarpgroup) {
  int variants = 0;
  for (const KernelRow& row : kWideRows) {
    const KernelConfig config = config_of(Architecture::kSm90, row, DType::kFloat16);
    if (!config.swaps_ab()) continue;
    ++variants;
    EXPECT_TRUE(config.wide() && config.latent() && config.step() && !config.stairs() && config.reads_once());
    EXPECT_TRUE(config.traits().chunks == Chunks::kNever && !config.exchanges() && !config.may_run_beside());
    EXPECT_EQ(config.consumer_threads(), 128);
    EXPECT_EQ(config.tile_tokens, 64) << "rows of a product";
    EXPECT_LE(config.summed_dims() * config.q_rows, 128 * 128) << "registers of O";
    EXPECT_EQ(config.warp_runs(), 4);
    EXPECT_EQ(sum_roundings(config.tile()), 16);
    EXPECT_EQ(config.query_places(), config.q_rows == 16 ? 2 : 1);
    EXPECT_EQ(config.part_column(config.stage_parts()), config.columns());
    EXPECT_EQ(config.stage_parts(), config.converts() ? 1 : 4);
    const std::int32_t queries = config.query_places() * config.q_rows * config.head_dim * 2;
    const std::int32_t exchange = config.exchange_floats() * 4;
    EXPECT_GE(exchange, 2 * config.q_rows * 128) << "weights of two tiles";
    EXPECT_LE(queries + exchange + kLatentRingBytes, (227 - 8) * 1024);
  }
  EXPECT_EQ(variants, 4);
}

/// find_kernel() takes the first row block that holds a call's rows.
TEST(KernelRows, RowBlocksOfAKindAscend) {
  std::vector<ArchitectureRows> tables(std::begin(kKernelRows), std::end(kKernelRows));
  tables.push_back(kWideRows);
  for (const ArchitectureRows& table : tables) {
    for (const KernelRow* row = table.begin() + 1; row != table.end(); ++row) {
      const KernelRow& before = row[-1];
      if (std::tie(before.scope, before.kv_bytes, before.head_dim) != std::tie(row->scope, row->kv_bytes, row->head_dim)) continue;
      EXPECT_LT(before.q_rows, row->q_rows);
    }
  }
}

/// Whatever a device lacks is served by older rows: any call, of every type, width and row block, is among those of the oldest.
TEST(KernelRows, TheOldestArchitectureServesAnyCall) {
  const ArchitectureRows& oldest = *std::prev(std::end(kKernelRows));
  EXPECT_EQ(oldest.architecture, Architecture::kSm80);
  for (const NamedFamily& named : kFamilies) {
    EXPECT_TRUE(std::ranges::any_of(oldest.begin(), oldest.end(), [&](const KernelRow& row) {
      return named.family.has(row) && !traits_of(row.scope).step;
    })) << named.name;
  }
}

TEST(KernelRows, ADeviceRunsTheNewestThatItsCapabilityHas) {
  EXPECT_EQ(architecture_of(8, 0), Architecture::kSm80);
  EXPECT_EQ(architecture_of(8, 9), Architecture::kSm80);
  EXPECT_EQ(architecture_of(9, 0), Architecture::kSm90);
  EXPECT_EQ(architecture_of(12, 1), Architecture::kSm90);
  EXPECT_TRUE(std::ranges::is_sorted(kArchitectures, std::ranges::greater{}));
}

}  // namespace
}  // namespace lean::cuda
