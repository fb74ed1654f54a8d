// Alg. 1 on a thread: the tiles of one output, in order, into an un-scaled partial.
#include "backends/cpu/tile_loop.hpp"

#include <algorithm>
#include <cstring>

#include "backends/cpu/elements.hpp"
#include "base/int_math.hpp"
#include "problem/address.hpp"
#include "problem/append.hpp"
#include "problem/kv_scales.hpp"
#include "problem/preconditions.hpp"

namespace lean::cpu {
namespace {

constexpr std::int32_t kQueriesAhead = 16;  // rows asked for together while as many are loaded

/// Which kernel reads the tensor: its own type's, or fp32's after a copy.
int kernel_of(const TensorView& tensor) noexcept { return table_index(in_place(tensor) ? tensor.dtype : DType::kFloat32); }

/// A tile that is copied first is not asked for.
TokenRows asked_for(const TensorView& tensor, const TokenRows& rows) noexcept { return in_place(tensor) ? rows : TokenRows{}; }

}  // namespace

void TileLoop::begin(const TileOutput& output) noexcept {
  output_ = output;
  score_scale_ = log2_scale_ * k_scale_of(problem_, output.kv_head.head);
  tiles_.begin(output);
  const std::int32_t stride = memory_.layout.config.head_dim;
  const bool cumulative = problem_.cu_q_tokens != nullptr;
  const auto query_at = [&](PackedRow at) {
    const Strides& strides = problem_.q.strides;
    return element(problem_.q, q_offset(strides, output.lengths, output.q_head(at), cumulative) + at.token * strides.token);
  };
  const bool asks = output.rows > kQueriesAhead && in_place(problem_.q);  // rows of several tokens may lie a page apart each
  for (std::int32_t r = 0; r < output.rows; ++r) {
    if (asks && r % kQueriesAhead == 0) {
      for (std::int32_t later = r == 0 ? 0 : r + kQueriesAhead; later < min_of(r + 2 * kQueriesAhead, output.rows); ++later) {
        ask_for_row(query_at(output.row(later)), problem_.head_dim * bytes_of(problem_.q.dtype));
      }
    }
    const PackedRow at = output.row(r);
    float* row = memory_.query + std::int64_t{r} * stride;
    load_row(kernels_, problem_.q, query_at(at), row, problem_.head_dim);
    rotate_query(problem_, output.lengths, at.token, row);
    std::fill(row + problem_.head_dim, row + stride, 0.0F);
    if (problem_.q.dtype == DType::kBFloat16) {
      std::uint16_t* bits = memory_.query_bf16 + std::int64_t{r} * stride;
      if (in_place(problem_.q) && !rotates_queries(problem_.append, output.lengths)) {
        std::memcpy(bits, query_at(at), static_cast<std::size_t>(problem_.head_dim) * sizeof(*bits));
        std::fill(bits + problem_.head_dim, bits + stride, std::uint16_t{0});
      } else {  // exact: the values are bf16's
        kernels_.store_row[table_index(DType::kBFloat16)](row, 1.0F, bits, stride);
      }
    }
    kernels_.order_query[kernel_of(problem_.k)](row, problem_.head_dim);
  }
}

void TileLoop::run(std::int64_t tile_begin, std::int64_t tile_end, const fixup::Partial& into) noexcept {
  const std::int32_t tile_tokens = memory_.layout.config.tile_tokens;
  const Sequence& lengths = output_.lengths;
  // One past the last token of this run that any row sees.
  const std::int64_t end = min_of(output_.seen().end, lengths.kv_begin + tile_end * tile_tokens);
  std::int64_t token = lengths.kv_begin + tile_begin * tile_tokens;
  if (token >= end) return;
  const auto locate = [&](std::int64_t from) {
    return tiles_.locate(from, static_cast<std::int32_t>(min_of(tile_tokens, end - from)));
  };
  static const std::int32_t distance_bytes = read_ahead_bytes();
  const bool turns = memory_.layout.turned != nullptr && output_.rows >= memory_.layout.turned->from_rows;
  RowsAhead ahead;
  KvTile tile = locate(token);
  TokenRows first_v = asked_for(problem_.v, tile.v);  // nobody has asked for the first tile: its V comes with its own scores
  for (KvTile next; token < end; tile = next, first_v = {}) {
    set_visible(token, tile.tokens);
    token += tile_tokens;
    next = token < end ? locate(token) : KvTile{};
    const TokenRows next_k = asked_for(problem_.k, next.k);
    if (kernels_.asks_ahead) ahead.begin({first_v, next_k, asked_for(problem_.v, next.v)}, bytes_of(problem_.k.dtype));
    const Prefetch with_scores{asked_for(problem_.v, tile.v), distance_bytes, &ahead};
    const Prefetch with_accumulate{next_k, distance_bytes, &ahead};
    if (turns) {
      compute_turned(tile, into, with_scores, with_accumulate);
    } else {
      compute(tile, into, with_scores, with_accumulate);
    }
  }
  for (std::int32_t r = 0; r < output_.rows; ++r) {
    kernels_.restore_values[kernel_of(problem_.v)](into.o_row(r), value_dim_of(problem_));
  }
}

/// All rows of the block through a tile's stages, one after the other.
void TileLoop::compute(KvTile& tile, const fixup::Partial& into, const Prefetch& with_scores,
                       const Prefetch& with_accumulate) const noexcept {
  Rows rows = rows_of(into);
  kernels_.scores[kernel_of(problem_.k)](rows.q, kernel_rows(problem_.k, tile.k, memory_.packed_k), rows.s, with_scores);
  if (rules_.apply(output_, score_scale_, tile, rows.s)) rows.softmax.scale = 1.0F;
  if (kernels_.asks_ahead) {
    rows.softmax.ahead = with_scores.ahead;
    rows.softmax.ahead->share(kSoftmaxEighths, output_.rows);
  }
  kernels_.online_softmax(rows.s, tile.tokens, rows.softmax);
  const TokenRows v = kernel_rows(problem_.v, tile.v, memory_.packed_v);
  kernels_.accumulate[kernel_of(problem_.v)](rows.o, rows.sums, rows.s, v, memory_.rescale, with_accumulate);
}

void TileLoop::compute_turned(KvTile& tile, const fixup::Partial& into, const Prefetch& with_scores,
                              const Prefetch& with_accumulate) const noexcept {
  struct Context {
    const TileLoop& loop;
    KvTile& tile;
  } const context{*this, tile};
  const auto apply_rules = [](const void* opaque, std::int32_t first, const RowBuffer& s) noexcept {
    const auto& [loop, its_tile] = *static_cast<const Context*>(opaque);
    return loop.rules_.apply(loop.output_.part(first, s.rows), loop.score_scale_, its_tile, s);
  };
  const Rows rows = rows_of(into);
  memory_.layout.turned->compute({.q = rows.q,
                                  .k = tile.k,
                                  .v = tile.v,
                                  .turned_k = memory_.packed_k,
                                  .turned_v = memory_.packed_v,
                                  .s = rows.s,
                                  .sums = rows.sums,
                                  .o = rows.o,
                                  .softmax = rows.softmax,
                                  .with_scores = with_scores,
                                  .with_accumulate = with_accumulate,
                                  .apply_rules = apply_rules,
                                  .context = &context,
                                  .masks = rules_.masks(output_, tile)});
}

TileLoop::Rows TileLoop::rows_of(const fixup::Partial& into) const noexcept {
  const auto value_stride = static_cast<std::int32_t>(into.value_stride);
  return {.q = {{memory_.query, output_.rows, memory_.layout.config.head_dim}, memory_.query_bf16},
          .s = {memory_.scores, output_.rows, memory_.layout.score_stride()},
          .o = {into.o, output_.rows, value_stride},
          .sums = {memory_.sums, output_.rows, value_stride},
          .softmax = {score_scale_, memory_.visible, into.m, into.l, memory_.rescale}};
}

/// How many of the tile's tokens each row sees, counted from its first; the first row sees the fewest.
void TileLoop::set_visible(std::int64_t token, std::int32_t tokens) noexcept {
  const auto visible_to = [&](std::int32_t query_token) {
    return static_cast<std::int32_t>(clamp_to(output_.seen_by(query_token).end - token, 0, tokens));
  };
  PackedRow at = output_.row(0);
  std::int32_t visible = visible_to(at.token);
  if (visible == tokens) {
    std::fill_n(memory_.visible, output_.rows, tokens);
    return;
  }
  for (std::int32_t r = 0; r < output_.rows; ++r) {
    memory_.visible[r] = visible;
    if (++at.head_in_group < output_.group) continue;
    at.head_in_group = 0;
    visible = visible_to(++at.token);
  }
}

TokenRows TileLoop::kernel_rows(const TensorView& tensor, const TokenRows& rows, float* packed) const noexcept {
  if (in_place(tensor)) return rows;
  const std::int64_t stride = round_up(rows.dims, kLaneMultiple);
  for (std::int32_t t = 0; t < rows.tokens; ++t) {
    if (KvTiles::is_hidden(rows.row(t))) {
      std::fill_n(packed + t * stride, rows.dims, 0.0F);
    } else if (tiles_.is_new(rows.row(t))) {
      kernels_.load_row[table_index(tensor.dtype)](rows.row(t), packed + t * stride, rows.dims);
    } else {
      load_row(kernels_, tensor, rows.row(t), packed + t * stride, rows.dims);
    }
  }
  return {packed, stride * static_cast<std::int64_t>(sizeof(float)), rows.tokens, rows.dims};
}

}  // namespace lean::cpu
