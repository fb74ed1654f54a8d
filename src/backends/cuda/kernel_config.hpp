// KernelConfig: the one value that names a variant of the CUDA LeanTile, and the table of all of them. The table drives
// the instantiations, select(), supports(), the documents and the tests.
#pragma once

#include <cstdint>

#include "base/int_math.hpp"
#include "lean/problem.hpp"
#include "schedule/line_shape.hpp"
#include "tile/tile_config.hpp"

namespace lean::cuda {

inline constexpr std::int32_t kWarpThreads = 32;
inline constexpr std::int32_t kMmaRows = 16;     // query rows of one matrix product
inline constexpr std::int32_t kNarrowRows = 8;   // likewise, where tokens are its rows and queries its columns (narrow_tile.cuh)
inline constexpr std::int32_t kMmaDims = 16;     // dims of one matrix product of Q K^T
inline constexpr std::int32_t kMmaTokens = 16;   // tokens of one matrix product of P V
inline constexpr std::int32_t kPieceBytes = 16;  // what is copied, and read, at once

/// Tensor copies lay a tile down in columns of so many bytes, one behind the other.
[[nodiscard]] constexpr std::int32_t stage_column_bytes(std::int32_t row_bytes) noexcept { return least_of(128, row_bytes); }

[[nodiscard]] constexpr bool is_fp8(DType dtype) noexcept { return dtype == DType::kFloat8E4M3 || dtype == DType::kFloat8E5M2; }

/// Of the factors of matrix products, for K and V of a type.
[[nodiscard]] constexpr DType product_dtype(DType kv_dtype) noexcept { return is_fp8(kv_dtype) ? DType::kFloat16 : kv_dtype; }

/// What calls of a variant may ask. Nearly all calls of a server are decode steps that ask for nothing rare, and in short ones every
/// instruction and register counts, so these have variants whose code holds nothing else.
enum class Scope : std::int32_t {
  kDecodeStep,  // flat line, d the variant's own, last arriver; lse, sinks, windows, causal n_q; tiles or pages end to end, of 8 or 16 rows, fp8 of 8
  kStridedStep,  // likewise, by threads: short pages and strides that tensor copies cannot take; 16 bits
  kTensorStep,   // likewise, but of any type, layout and d, and up to 128 rows: by tensor copies, else by threads
  kChunkStep,    // kDecodeStep under fixed_chunk, without windows; fp8 too
  kAnyCall
};
inline constexpr Scope kScopes[] = {Scope::kDecodeStep, Scope::kStridedStep, Scope::kTensorStep, Scope::kChunkStep,
                                    Scope::kAnyCall};

struct KernelConfig {
  DType dtype = DType::kFloat16;    // of K and V, and of queries; kFloat8E4M3 stands for E5M2 too, beside queries of fp16 and bf16
  std::int32_t head_dim = 0;        // widest d; a smaller multiple of 8 leaves the rest unused
  std::int32_t q_rows = 0;          // rows of a row block
  std::int32_t tile_tokens = 0;     // tokens of a LeanTile
  std::int32_t consumer_warps = 0;  // row_warps() x token_warps()
  Scope scope = Scope::kAnyCall;

  [[nodiscard]] constexpr bool step() const noexcept { return scope != Scope::kAnyCall; }
  /// The copy engine brings K and V, whatever the call.
  [[nodiscard]] constexpr bool bulk_step() const noexcept { return scope == Scope::kDecodeStep || scope == Scope::kChunkStep; }
  /// A stage holds a tile in columns as tensor copies lay it down, ready to be read, and not row by row.
  [[nodiscard]] constexpr bool in_columns() const noexcept { return scope == Scope::kTensorStep; }
  /// Rows of fewer dims than the variant's are served too: what is missing of them is 0 in a stage.
  [[nodiscard]] constexpr bool pads_rows() const noexcept { return in_columns(); }
  /// Tokens are the rows of matrix products and queries their columns: half the products of 16 rows.
  [[nodiscard]] constexpr bool narrow() const noexcept { return q_rows == kNarrowRows; }
  /// Looks whether a short line without cumulative lengths is even (schedule/even_line.hpp). Others with many rows or tensor copies would spill for it.
  [[nodiscard]] constexpr bool looks_for_even_lines() const noexcept {
    return step() && scope != Scope::kChunkStep && (bulk_step() || narrow());
  }
  [[nodiscard]] constexpr bool fp8() const noexcept { return is_fp8(dtype); }
  [[nodiscard]] constexpr DType product_dtype() const noexcept { return cuda::product_dtype(dtype); }
  /// Of a row of K or V in a stage, where it begins at a multiple of kPieceBytes.
  [[nodiscard]] constexpr std::int32_t stage_row_bytes(std::int32_t dims) const noexcept {
    return static_cast<std::int32_t>(round_up(dims * bytes_of(dtype), kPieceBytes));
  }
  [[nodiscard]] constexpr std::int32_t column_bytes() const noexcept { return stage_column_bytes(stage_row_bytes(head_dim)); }
  [[nodiscard]] constexpr std::int32_t columns() const noexcept { return stage_row_bytes(head_dim) / column_bytes(); }
  /// Warps side by side along the rows, and along the tokens of a tile.
  [[nodiscard]] constexpr std::int32_t row_warps() const noexcept { return narrow() ? 1 : q_rows / kMmaRows; }
  [[nodiscard]] constexpr std::int32_t token_warps() const noexcept { return consumer_warps / row_warps(); }
  /// Of a warp's rows.
  [[nodiscard]] constexpr std::int32_t warp_rows() const noexcept { return narrow() ? kNarrowRows : kMmaRows; }
  /// Of those, the ones it stages at once at a segment's end.
  [[nodiscard]] constexpr std::int32_t staged_rows() const noexcept { return step() ? warp_rows() : kMmaRows / 2; }
  /// Of the area where the warps stage their parts, and where queries and scores lie for a while.
  [[nodiscard]] constexpr std::int32_t exchange_floats() const noexcept {
    return most_of(8192, consumer_warps * staged_rows() * head_dim);
  }
  /// The copy engine brings the queries, a row at a time, which is for few rows; else the consumers do.
  [[nodiscard]] constexpr bool bulk_queries() const noexcept { return step() && q_rows <= kMmaRows; }
  /// Warps hold their queries in registers; else they load them anew for every tile, so that nothing is spilled.
  [[nodiscard]] constexpr bool holds_queries() const noexcept { return !step() || fp8() || narrow(); }
  /// Runs of kMmaTokens that one warp takes of a tile.
  [[nodiscard]] constexpr std::int32_t warp_runs() const noexcept { return tile_tokens / (token_warps() * kMmaTokens); }
  [[nodiscard]] constexpr std::int32_t consumer_threads() const noexcept { return consumer_warps * kWarpThreads; }
  /// Producers feed the ring: with the copy engine a warp does, or one thread. A CTA gets its registers for four warps at a time.
  [[nodiscard]] constexpr std::int32_t producer_warps() const noexcept { return bulk_step() ? 1 : (step() ? 4 : 2); }
  [[nodiscard]] constexpr std::int32_t producer_threads() const noexcept { return producer_warps() * kWarpThreads; }
  /// Whether one more warp finds out who shares the outputs; else a producer does, once a segment's first tiles are under way.
  [[nodiscard]] constexpr bool has_sharing_warp() const noexcept { return !step(); }
  [[nodiscard]] constexpr std::int32_t cta_warps() const noexcept {
    return consumer_warps + producer_warps() + (has_sharing_warp() ? 1 : 0);
  }

  [[nodiscard]] constexpr tile::TileConfig tile() const noexcept {
    return {.q_dtype = product_dtype(),
            .kv_dtype = dtype,
            .head_dim = head_dim,
            .value_dim = head_dim,
            .tile_tokens = tile_tokens,
            .q_rows = q_rows};
  }

  bool operator==(const KernelConfig&) const = default;
};

/// What the schedule's units mean here (docs/schedule.md). A constant of the variant, so that the kernel's divisions by it are shifts.
/// Lining up with outputs may lose a worker 3 tiles of 64 KB: the best of three measured (docs/cuda-backend.md has them, and a fit); so
/// many idle workers as whole outputs leave cost less than merges, since those left read nearly as fast.
[[nodiscard]] constexpr schedule::CostModel cost_model(const tile::TileConfig& config) noexcept {
  const std::int64_t tile_bytes = std::int64_t{2} * config.tile_tokens * config.head_dim * bytes_of(config.kv_dtype);
  return {.tile_units = 16,
          .free_rows = 16,
          .row_units = 0,
          .segment_units = 8,
          .min_worker_tiles = 1,
          .sliver_tiles = 1,
          .align_percent = 5,
          .whole_percent = 20,
          .align_units = static_cast<std::int32_t>(3 * 16 * 65536 / tile_bytes)};
}

[[nodiscard]] constexpr std::int32_t cta_threads(const KernelConfig& config) noexcept { return config.cta_warps() * kWarpThreads; }

/// A family shares a translation unit: one type (or both fp8 types) and head dimension, every row block.
struct KernelFamily {
  DType dtype = DType::kFloat16;
  std::int32_t head_dim = 0;
};

inline constexpr std::int32_t kHeadDims[] = {64, 128, 256};
inline constexpr std::int32_t kRowBlocks[] = {kNarrowRows, 16, 32, 64, 128};

/// The variant of a family for one row block. LeanTile sizes: sweep in docs/cuda-backend.md. K of a tile is 32 KB where the registers of
/// its scores allow, but a tile of any call is small enough for parts with 99 KB of shared memory, and chunks, whose tiles fix the order
/// of sums, have the same tiles in both of their scopes.
[[nodiscard]] constexpr KernelConfig config_of(const KernelFamily& family, std::int32_t q_rows, Scope scope) noexcept {
  KernelConfig config{.dtype = family.dtype, .head_dim = family.head_dim, .q_rows = q_rows, .scope = scope};
  config.consumer_warps = family.head_dim > 128 ? 4 : 8;
  config.tile_tokens = q_rows <= 32 && family.head_dim <= 128 ? 128 : 64;
  if (config.fp8() && q_rows <= kMmaRows) config.tile_tokens *= 2;
  if (config.step() && scope != Scope::kChunkStep && family.head_dim == 64 && q_rows <= 64) config.tile_tokens *= 2;
  return config;
}

/// Roundings of a warp's running sums for each tile of a variant, at most: of every kMmaTokens tokens that it takes, a lane adds 4 weights to
/// l, one by one; O takes their products at once, by an addition that truncates, which counts twice.
[[nodiscard]] constexpr std::int32_t sum_roundings(const tile::TileConfig& tile) noexcept {
  KernelConfig config = config_of({tile.kv_dtype, tile.head_dim}, tile.q_rows, Scope::kAnyCall);
  config.tile_tokens = tile.tile_tokens;
  return 4 * config.warp_runs();
}
/// Of the products of one such addition among themselves, truncations all.
inline constexpr std::int32_t kProductRoundings = 2 * kMmaTokens;

/// Whether a call of chunks is a decode step must not show in its bits.
[[nodiscard]] constexpr bool chunks_have_same_tiles(const KernelFamily& family) noexcept {
  return config_of(family, kMmaRows, Scope::kChunkStep).tile_tokens == config_of(family, kMmaRows, Scope::kAnyCall).tile_tokens;
}
static_assert(chunks_have_same_tiles({DType::kFloat16, 64}) && chunks_have_same_tiles({DType::kFloat8E4M3, 64}));

/// Above 128 dims the accumulators of 128 rows do not fit the registers. More than 16 rows and most of fp8 are bound by arithmetic, of which
/// tensor steps have less; the rest is bound by the read. With fixed_chunk one query token chooses the variant, and seldom has more than 16
/// rows.
[[nodiscard]] constexpr bool has_variant(const KernelFamily& family, std::int32_t q_rows, Scope scope) noexcept {
  switch (scope) {
    case Scope::kDecodeStep: return q_rows <= (is_fp8(family.dtype) ? kNarrowRows : kMmaRows);
    case Scope::kStridedStep: return q_rows <= kMmaRows && !is_fp8(family.dtype);
    case Scope::kChunkStep: return q_rows == kMmaRows;
    case Scope::kTensorStep: break;
    case Scope::kAnyCall:
      if (q_rows == kNarrowRows) return false;
  }
  return q_rows <= (family.head_dim > 128 ? 64 : 128);
}

}  // namespace lean::cuda
