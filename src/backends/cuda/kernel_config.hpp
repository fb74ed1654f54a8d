// KernelConfig: the one value that names a variant of the CUDA LeanTile, and what follows from it for the host and the kernel
// alike. All variants that there are stand in kernel_rows.hpp.
#pragma once

#include <cstdint>

#include "backends/cuda/architecture.hpp"
#include "backends/cuda/scope.hpp"
#include "backends/cuda/wide_layout.hpp"
#include "base/hd.hpp"
#include "base/int_math.hpp"
#include "base/kv_type.hpp"
#include "lean/problem.hpp"
#include "schedule/line_shape.hpp"
#include "tile/tile_config.hpp"

namespace lean::cuda {

inline constexpr std::int32_t kWarpThreads = 32;
inline constexpr std::int32_t kMmaRows = 16;     // query rows of one matrix product
inline constexpr std::int32_t kNarrowRows = 8;   // query rows of one whose columns they are, tokens its rows (narrow_tile.cuh)
inline constexpr std::int32_t kMmaDims = 16;     // dims of one matrix product of Q K^T
inline constexpr std::int32_t kMmaTokens = 16;   // tokens of one matrix product of P V
inline constexpr std::int32_t kPieceBytes = 16;  // what is copied, and read, at once

/// Bytes of the queries of a row block that have two places in shared memory, at most; longer ones leave room for one.
inline constexpr std::int32_t kTwoPlacesBytes = 32 * 1024;

/// Tensor copies lay a tile down in columns of so many bytes, one behind the other.
[[nodiscard]] constexpr std::int32_t stage_column_bytes(std::int32_t row_bytes) noexcept { return min_of(128, row_bytes); }

struct KernelConfig {
  Architecture architecture = Architecture::kSm80;
  DType dtype = DType::kFloat16;    // of K and V, and of queries; kFloat8E4M3 stands for E5M2 too, beside queries of fp16 and bf16
  std::int32_t head_dim = 0;        // widest d; a smaller multiple of 8 leaves the rest unused
  std::int32_t q_rows = 0;          // rows of a row block
  std::int32_t tile_tokens = 0;     // tokens of a LeanTile
  std::int32_t consumer_warps = 0;  // row_warps() x token_warps() x value_warps()
  Scope scope = Scope::kAnyCall;

  [[nodiscard]] constexpr ScopeTraits traits() const noexcept { return traits_of(scope); }
  [[nodiscard]] constexpr KvType kv_type() const noexcept { return kv_type_of(dtype); }

  // The traits that the kernel asks for again and again, by names of their own.
  [[nodiscard]] constexpr bool step() const noexcept { return traits().step; }
  [[nodiscard]] constexpr bool ruled() const noexcept { return traits().ruled; }
  [[nodiscard]] constexpr bool wide() const noexcept { return traits().wide; }
  [[nodiscard]] constexpr bool latent() const noexcept { return traits().latent; }
  [[nodiscard]] constexpr bool in_turns() const noexcept { return traits().in_turns; }
  [[nodiscard]] constexpr bool swaps_ab() const noexcept { return traits().swaps_ab; }
  /// Row blocks of a kv head are many, and a line is a stair (schedule/stair_line.hpp); in a decode step it is flat.
  [[nodiscard]] constexpr bool stairs() const noexcept { return wide() && !step(); }
  /// One row block alone reads K and V: always, or as it happens (kernel/asked.cuh).
  [[nodiscard]] constexpr bool reads_once() const noexcept { return !stairs(); }
  [[nodiscard]] constexpr bool may_read_once() const noexcept { return reads_once() || (latent() && !in_turns()); }
  [[nodiscard]] constexpr bool converts() const noexcept { return traits().converts; }
  /// K and V have scales (problem/kv_scales.hpp).
  [[nodiscard]] constexpr bool scaled() const noexcept { return kv_type().scaled || converts(); }
  [[nodiscard]] constexpr bool few_values() const noexcept { return traits().value_dim > 0 && !latent(); }
  [[nodiscard]] constexpr bool any_call() const noexcept { return !step() && !wide(); }
  /// Bulk copies bring K and V, whatever the call.
  [[nodiscard]] constexpr bool copies_runs() const noexcept { return traits().copies == Copies::kRuns; }
  /// Threads copy all of them.
  [[nodiscard]] constexpr bool copies_by_threads() const noexcept { return traits().copies == Copies::kThreads && !converts(); }
  [[nodiscard]] constexpr bool in_columns() const noexcept { return traits().stage == StageOrder::kColumns; }
  [[nodiscard]] constexpr bool fills_rows() const noexcept { return traits().dims == Dims::kFilledUp; }
  [[nodiscard]] constexpr bool chunks_only() const noexcept { return traits().chunks == Chunks::kAlways; }
  [[nodiscard]] constexpr bool exchanges() const noexcept { return traits().exchanges; }
  /// CTAs of a multiprocessor.
  [[nodiscard]] constexpr std::int32_t ctas() const noexcept { return traits().ctas; }

  /// Dims of the values that are summed.
  [[nodiscard]] constexpr std::int32_t summed_dims() const noexcept {
    return traits().value_dim > 0 ? traits().value_dim : head_dim;
  }
  /// The same of partials, whose rows are whole slices of a merge (kernel/output/row_slice.cuh): the rest of the last holds nothing.
  [[nodiscard]] constexpr std::int32_t value_dim() const noexcept {
    return summed_dims() <= 64 ? summed_dims() : static_cast<std::int32_t>(round_up(summed_dims(), 128));
  }
  /// Warps beside each other that have the same rows and tokens, each with its own dims of the values.
  [[nodiscard]] constexpr std::int32_t value_warps() const noexcept { return swaps_ab() ? consumer_warps : latent() ? 2 : 1; }
  /// Places for the queries of a segment: of two, those of the next come while one is computed.
  [[nodiscard]] constexpr std::int32_t query_places() const noexcept {
    return wide() && q_rows * stage_row_bytes(head_dim) > kTwoPlacesBytes ? 1 : 2;
  }

  /// Tokens are the rows of matrix products and queries their columns: half the products of 16 rows.
  [[nodiscard]] constexpr bool narrow() const noexcept { return q_rows == kNarrowRows; }
  /// Looks whether a short line without cumulative lengths is even (schedule/even_line.hpp). Others with many rows or tensor copies
  /// would spill for it.
  [[nodiscard]] constexpr bool looks_for_even_lines() const noexcept {
    return step() && !chunks_only() && (copies_runs() || narrow() || latent());
  }
  /// Bytes of a row of K or V in a stage, where it begins at a multiple of kPieceBytes; products of warpgroups read whole columns.
  [[nodiscard]] constexpr std::int32_t stage_row_bytes(std::int32_t dims) const noexcept {
    return static_cast<std::int32_t>(round_up(dims * bytes_of(dtype), wide() ? wide::kColumnBytes : kPieceBytes));
  }
  [[nodiscard]] constexpr std::int32_t column_bytes() const noexcept { return stage_column_bytes(stage_row_bytes(head_dim)); }
  [[nodiscard]] constexpr std::int32_t columns() const noexcept { return stage_row_bytes(head_dim) / column_bytes(); }
  /// The same of a stage that holds values.
  [[nodiscard]] constexpr std::int32_t value_columns() const noexcept {
    return few_values() ? stage_row_bytes(summed_dims()) / column_bytes() : columns();
  }
  /// Bytes from a stage to the next: of K and V in turn, one with the other, where values have fewer columns.
  [[nodiscard]] constexpr std::int32_t mean_stage_bytes(std::int32_t dims) const noexcept {
    return tile_tokens * (few_values() ? (columns() + value_columns()) * column_bytes() / 2 : stage_row_bytes(dims));
  }
  /// Bytes from the ring's begin to a stage, which lie `stage_bytes` apart in the mean: K in every other one, V between them.
  [[nodiscard]] LEAN_HD constexpr std::int32_t stage_place(std::int32_t stage_bytes, std::int32_t index) const noexcept {
    const std::int32_t more = few_values() && index % 2 != 0 ? columns() - value_columns() : 0;
    return index * stage_bytes + more * column_bytes() * tile_tokens / 2;
  }
  /// Parts in which a stage comes and is let go of: of latent tiles in turns the columns of either warpgroup's values, so that the next
  /// tile's come as soon as one is done with its own; of swapped ones two columns of values.
  [[nodiscard]] constexpr std::int32_t stage_parts() const noexcept { return in_turns() ? 2 : swaps_ab() && !converts() ? 4 : 1; }
  /// Their places among those of all stages.
  [[nodiscard]] LEAN_HD constexpr std::int32_t part_of_stage(std::int32_t stage, std::int32_t part) const noexcept {
    return stage * stage_parts() + part;
  }
  /// The first column of one; the last holds all that follow, which no value lies in.
  [[nodiscard]] constexpr std::int32_t part_column(std::int32_t part) const noexcept {
    return part == stage_parts()
               ? columns()
               : part * summed_dims() * static_cast<std::int32_t>(bytes_of(dtype)) / (stage_parts() * column_bytes());
  }
  /// Warps side by side along the rows, and along the tokens of a tile.
  [[nodiscard]] constexpr std::int32_t row_warps() const noexcept { return narrow() || swaps_ab() ? 1 : q_rows / kMmaRows; }
  [[nodiscard]] constexpr std::int32_t token_warps() const noexcept { return consumer_warps / (row_warps() * value_warps()); }
  /// Query rows of a warp.
  [[nodiscard]] constexpr std::int32_t warp_rows() const noexcept { return narrow() ? kNarrowRows : kMmaRows; }
  /// Those of a warp's query rows that it stages at once at a segment's end.
  [[nodiscard]] constexpr std::int32_t staged_rows() const noexcept { return step() ? warp_rows() : kMmaRows / 2; }
  /// Size of the area where the warps stage their parts, and where queries and scores lie for a while: nothing of the sort where warps
  /// hold whole rows and their queries have a place of their own. Of swapped tiles the weights of two lie there, a column each,
  /// and while parts are merged up to 32 bundles of a slice (StagedBundles): these fill the half that a CTA has of two on a multiprocessor.
  [[nodiscard]] constexpr std::int32_t exchange_floats() const noexcept {
    return stairs() ? 4 : swaps_ab() ? 4096 : max_of(8192 / ctas(), consumer_warps * staged_rows() * value_dim());
  }
  /// Bytes of rows that wait in shared memory to be converted: what fills a stage. Beside latent tiles there is no room for them, and
  /// threads hold a part of them in registers.
  [[nodiscard]] constexpr std::int32_t unconverted_bytes() const noexcept {
    return converts() && !latent() ? tile_tokens * head_dim : 0;
  }
  /// Contributors of a decode step's output meet at one counter, however many they are, and where they are many, those that have nothing
  /// else to do merge together (fixup/joint_merge.hpp).
  [[nodiscard]] constexpr bool step_merges_jointly() const noexcept { return step() && !chunks_only() && !exchanges(); }
  /// The fewest parts that are: 32 partials of 16 rows of 128 dims are 256 KB, which one multiprocessor reads in some 3 us. Of two the
  /// wait for each other costs more (docs/notebook/merging.md), and of 8 rows a merge on one level is a trip to memory, whoever does it.
  [[nodiscard]] constexpr std::int32_t fewest_joint_parts() const noexcept { return wide() ? 2 : narrow() ? 33 : 8; }
  /// Another launch of the same call may run beside it: few rows' beside chunks (schedule/side_by_side.hpp), whose kernels serve calls
  /// without any, too. Whether one does is the call's (call_plan.cpp: beside_kernel()).
  [[nodiscard]] constexpr bool may_run_beside() const noexcept {
    return wide() ? !latent() && !few_values() && !converts() && !ruled() : traits().beside;
  }
  /// Bulk copies bring the queries, a row at a time, which is for few rows; else the consumers do.
  [[nodiscard]] constexpr bool bulk_queries() const noexcept { return step() && !wide() && q_rows <= kMmaRows; }
  /// Queries of a segment have a place of their own, to which bulk copies or producer threads bring them (query_places()).
  [[nodiscard]] constexpr bool queries_ahead() const noexcept { return bulk_queries() || wide(); }
  /// Warps hold their queries in registers; else they load them anew for every tile, so that nothing is spilled.
  [[nodiscard]] constexpr bool holds_queries() const noexcept { return !step() || kv_type().converted() || narrow(); }
  /// Runs of kMmaTokens that one warp takes of a tile.
  [[nodiscard]] constexpr std::int32_t warp_runs() const noexcept { return tile_tokens / (token_warps() * kMmaTokens); }
  [[nodiscard]] constexpr std::int32_t consumer_threads() const noexcept { return consumer_warps * kWarpThreads; }
  /// Producers feed the ring: with bulk copies a warp does, or one thread.
  [[nodiscard]] constexpr std::int32_t producer_warps() const noexcept { return traits().producer_warps; }
  [[nodiscard]] constexpr std::int32_t producer_threads() const noexcept { return producer_warps() * kWarpThreads; }
  [[nodiscard]] constexpr bool has_contributors_warp() const noexcept { return traits().contributors_warp; }
  [[nodiscard]] constexpr std::int32_t cta_warps() const noexcept {
    return consumer_warps + producer_warps() + (has_contributors_warp() ? 1 : 0);
  }

  [[nodiscard]] constexpr tile::TileConfig tile() const noexcept {
    return {.q_dtype = kv_type().product,
            .kv_dtype = dtype,
            .head_dim = head_dim,
            .value_dim = value_dim(),
            .tile_tokens = tile_tokens,
            .q_rows = q_rows};
  }

  bool operator==(const KernelConfig&) const = default;
};

/// What `count` tiles of 64 KB of K and V are in tiles of this kind.
[[nodiscard]] constexpr std::int32_t tiles_of_64_kb(const tile::TileConfig& config, std::int32_t count) noexcept {
  const std::int64_t tile_bytes = std::int64_t{2} * config.tile_tokens * config.head_dim * bytes_of(config.kv_dtype);
  return static_cast<std::int32_t>(std::int64_t{count} * 65536 / tile_bytes);
}

/// What the schedule's units mean here (docs/schedule.md). A constant of the variant, so that the kernel's divisions by it are
/// shifts. Lining up with outputs may lose a worker 3 tiles of 64 KB: the best of three measured (docs/notebook has them,
/// and a fit); so many idle workers as whole outputs leave cost less than merges, since those left read nearly as fast.
[[nodiscard]] constexpr schedule::CostModel cost_model(const tile::TileConfig& config) noexcept {
  return {.tile_units = 16,
          .free_rows = 16,
          .row_units = 0,
          .segment_units = 8,
          .min_worker_tiles = 1,
          .sliver_tiles = 1,
          .align_percent = 5,
          .whole_percent = 20,
          .align_units = tiles_of_64_kb(config, 3 * 16)};
}

/// The same of a variant. Where a decode step's tile takes its read, half of the workers read as fast as all, and cuts off outputs'
/// edges cost 3 to 6 us: of shares of up to 12 tiles of 64 KB any number of workers may be idle, and of up to 48 a quarter of them for
/// whole outputs, whose workers read 2 % less of long calls (docs/notebook/schedule-constants.md, experiments/h100-whole-outputs.jsonl).
/// A second tile is read in 0.5 us, and what two parts are merged in takes 1.4: 2 to 8 x 200 of 8 kv heads took 6.9 to 7.3 us by a worker
/// each and 7.6 to 8.1 by two, on an H200; of three tiles it made no difference (docs/notebook/schedule-constants.md). Of more than 16 rows
/// a tile takes its products.
/// Other kernels' tiles, and those of fp8, take their instructions.
/// A tile of many rows takes its products: 1.99 us on an H100. Beside tiles a segment takes 8.5 (its queries, first scores with nothing
/// under them, rows on their way out) and an output that is shared 16 more: fitted with tools/wide_model.py to
/// experiments/h100-wide-tile.jsonl, 11 % rms. So a segment is charged 4 tiles. These are of the kernels of 2026-11-25, and only their
/// ratios count here; with today's a tile takes 1.52 us (side_times.hpp), for which the charges were not fitted anew.
/// Workers that begin at the same tokens of a head read its K and V once, which is worth 5 % of the workers however long the
/// outputs are (512 of 65536: 4.3 GB from memory, or 0.3). Row blocks of a chunk are alike for that, though causality takes some of
/// their last tiles. Of other dims tiles have 0.5 to 1.25 times as many products, and a segment's ends are shorter or longer likewise:
/// four tiles there too, by arithmetic and not measured. A latent tile takes its read, 72 KB: a segment reads as much of queries, and
/// its partial is 129 KB more, on the whole two tiles (by arithmetic, not measured). Latent calls of few rows are decode steps in this too.
[[nodiscard]] constexpr schedule::CostModel cost_model(const KernelConfig& config) noexcept {
  schedule::CostModel model = cost_model(config.tile());
  const std::int32_t once = config.latent() ? 2 : 1;  // a latent tile's values are its keys
  if (config.step() && !config.kv_type().converted()) {
    model.short_tiles = tiles_of_64_kb(config.tile(), 12 * once);
    model.spare_tiles = tiles_of_64_kb(config.tile(), 48 * once);
    if (config.q_rows <= kMmaRows) model.unshared_tiles = tiles_of_64_kb(config.tile(), 2 * once);
  }
  if (!config.stairs()) return model;
  model.segment_units = (config.latent() ? 2 : 4) * model.tile_units;
  model.alike_percent = 2;
  // On an H200 400 tokens of 4k take 57 us whole, 32 tiles by 104 workers, and 79 cut, 26 by 132; a walk and a merge of two parts take
  // some 4 tiles (experiments/h200-whole-prompts.jsonl). Of latent tiles neither was measured: they keep the charge that they had.
  model.cut_units = (config.latent() ? 6 : 14) * model.tile_units;
  model.whole_units = config.latent() ? 0 : 4 * model.tile_units;
  // 8 MB: with as much nothing was gained (576 tokens of 2k, 32/8 heads of 128), with twice as much 5 % (1,536 of 4k).
  model.far_tiles = tiles_of_64_kb(config.tile(), 128) * once;
  model.whole_percent = model.align_percent;
  model.align_units = schedule::CostModel{}.align_units;
  return model;
}

/// Whether three quarters of a GPU's places for workers read nearly as fast as all, so that whole outputs may leave a quarter idle. Where a
/// multiprocessor has two, they do: 50 x 1000 took an H200 51.4 us by 200 workers, 54.6 by 264 (experiments/h200-spread-workers.jsonl).
/// Else by the bytes a us of the memory for each multiprocessor, 0 if nobody knows: an H100 has 25,400 and read 50 x 500 in 42.0 us by 100
/// workers, 43.7 by 132; an H200 has 37,200 and took 36.9 and 34.9 (docs/notebook/schedule-constants.md).
[[nodiscard]] constexpr bool spares_workers(const KernelConfig& config, std::int32_t memory_share) noexcept {
  return config.ctas() > 1 || memory_share <= 30'000;
}

[[nodiscard]] constexpr schedule::CostModel cost_model(const KernelConfig& config, std::int32_t memory_share) noexcept {
  schedule::CostModel model = cost_model(config);
  if (!spares_workers(config, memory_share)) model.spare_tiles = 0;
  return model;
}

/// CostModel::part_tiles of latent calls of so many rows. Partials grow with rows, and so does what a second level of their merge takes:
/// 1 x 8k with 64 and 128 heads took 39.0 and 41.4 us where a worker had a tile or two, 34.2 and 31.6 with four, with 16 and 32 heads
/// 26.7 and 29.8, and 28.6 and 31.1 with four (h100-latent-scores.jsonl).
[[nodiscard]] LEAN_HD constexpr std::int32_t latent_part_tiles(std::int32_t rows) noexcept { return rows < 64 ? 1 : 4; }

[[nodiscard]] constexpr std::int32_t cta_threads(const KernelConfig& config) noexcept { return config.cta_warps() * kWarpThreads; }

}  // namespace lean::cuda
