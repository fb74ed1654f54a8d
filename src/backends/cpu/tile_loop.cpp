// Alg. 1 on a thread: the tiles of one output, in order, into an un-scaled partial.
#include "backends/cpu/tile_loop.hpp"

#include <algorithm>

#include "backends/cpu/elements.hpp"
#include "base/int_math.hpp"
#include "problem/address.hpp"
#include "problem/kv_scales.hpp"
#include "problem/preconditions.hpp"

namespace lean::cpu {
namespace {

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
  for (std::int32_t r = 0; r < output.rows; ++r) {
    const PackedRow at = output.row(r);
    const std::int64_t offset =
        q_offset(problem_.q.strides, output.lengths, output.q_head(at), cumulative) + at.token * problem_.q.strides.token;
    float* row = memory_.query + std::int64_t{r} * stride;
    load_row(kernels_, problem_.q, element(problem_.q, offset), row, problem_.head_dim);
    rotate_query(problem_, output.lengths, at.token, row);
    for (std::int32_t d = problem_.head_dim; d < stride; ++d) row[d] = 0.0F;
    if (problem_.q.dtype == DType::kBFloat16) {  // exact: the values are bf16's
      kernels_.store_row[table_index(DType::kBFloat16)](row, 1.0F, memory_.query_bf16 + std::int64_t{r} * stride, stride);
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
  RowsAhead ahead;
  KvTile tile = locate(token);
  TokenRows first_v = asked_for(problem_.v, tile.v);  // nobody has asked for the first tile: its V comes with its own scores
  for (KvTile next; token < end; tile = next, first_v = {}) {
    set_visible(token, tile.tokens);
    token += tile_tokens;
    next = token < end ? locate(token) : KvTile{};
    const TokenRows next_k = asked_for(problem_.k, next.k);
    const bool turns = memory_.layout.turns_tiles && output_.rows >= kernels_.turned->from_rows && !rules_.masks(output_, tile);
    const std::int32_t together = turns ? kernels_.turned->rows_together : output_.rows;
    if (kernels_.asks_ahead) {
      const auto rounds = static_cast<std::int32_t>(ceil_div(output_.rows, together));
      ahead.begin({first_v, next_k, asked_for(problem_.v, next.v)}, bytes_of(problem_.k.dtype), rounds);
    }
    const Prefetch with_scores{asked_for(problem_.v, tile.v), distance_bytes, &ahead};
    if (turns) {
      compute_turned(tile, into, with_scores);
    } else {
      compute(tile, into, with_scores, {next_k, distance_bytes, &ahead});
    }
  }
  for (std::int32_t r = 0; r < output_.rows; ++r) {
    kernels_.restore_values[kernel_of(problem_.v)](into.o_row(r), value_dim_of(problem_));
  }
}

/// All rows of the block through a tile's stages.
void TileLoop::compute(KvTile& tile, const fixup::Partial& into, const Prefetch& with_scores,
                       const Prefetch& with_accumulate) const noexcept {
  const Rows rows = rows_of(0, output_.rows, into);
  SoftmaxRows softmax = rows.softmax;
  const auto& scores = one_order_ || output_.rows < kManyRows ? kernels_.scores : kernels_.scores_of_many;
  scores[kernel_of(problem_.k)](rows.q, kernel_rows(problem_.k, tile.k, memory_.packed_k), rows.s, with_scores);
  if (rules_.apply(output_, score_scale_, tile, rows.s)) softmax.scale = 1.0F;
  if (kernels_.asks_ahead) {
    softmax.ahead = with_scores.ahead;
    softmax.ahead->share(kSoftmaxEighths, output_.rows);
  }
  kernels_.online_softmax(rows.s, tile.tokens, softmax);
  const TokenRows v = kernel_rows(problem_.v, tile.v, memory_.packed_v);
  kernels_.accumulate[kernel_of(problem_.v)](rows.o, rows.sums, rows.s, v, softmax.rescale, with_accumulate);
}

/// The same of a turned tile, a few rows at a time: their scores are computed beside the softmax of those before.
void TileLoop::compute_turned(KvTile& tile, const fixup::Partial& into, const Prefetch& prefetch) const noexcept {
  const TurnedTile& turned = *kernels_.turned;
  turned.begin(tile.k, tile.v, memory_.packed_k, memory_.packed_v);
  const TokenRows k{.data = memory_.packed_k, .tokens = tile.tokens, .dims = tile.k.dims};
  const TokenRows v{.data = memory_.packed_v, .tokens = tile.tokens, .dims = tile.v.dims};
  Rows rows = rows_of(0, turned.rows_together, into);
  turned.scores(rows.q, k, rows.s, prefetch);
  for (std::int32_t row = 0; row < output_.rows; row += turned.rows_together) {
    const std::int32_t end = row + turned.rows_together;
    const Rows next = end < output_.rows ? rows_of(end, turned.rows_together, into) : Rows{};
    if (rules_.apply(output_.part(row, turned.rows_together), score_scale_, tile, rows.s)) rows.softmax.scale = 1.0F;
    rows.softmax.ahead = prefetch.ahead;
    turned.online_softmax(rows.s, tile.tokens, rows.softmax, {next.q, k, next.s});
    turned.accumulate(rows.o, rows.sums, rows.s, v, rows.softmax.rescale, prefetch);
    rows = next;
  }
  turned.end();
}

/// `count` rows of the block from `first` on, as far as it has them. Of two runs of rows that follow each other one has its scores
/// behind the other's.
TileLoop::Rows TileLoop::rows_of(std::int32_t first, std::int32_t count, const fixup::Partial& into) const noexcept {
  const std::int32_t rows = min_of(count, output_.rows - first);
  const std::int32_t head_dim = memory_.layout.config.head_dim;
  const std::int32_t score_stride = memory_.layout.score_stride();
  const auto value_stride = static_cast<std::int32_t>(into.value_stride);
  const std::int64_t first_query = std::int64_t{first} * head_dim;
  const std::int64_t first_score = std::int64_t{first / count % 2 * count} * score_stride;
  return {.q = {{memory_.query + first_query, rows, head_dim}, memory_.query_bf16 + first_query},
          .s = {memory_.scores + first_score, rows, score_stride},
          .o = {into.o_row(first), rows, value_stride},
          .sums = {memory_.sums, rows, value_stride},
          .softmax = {score_scale_, memory_.visible + first, into.m + first, into.l + first, memory_.rescale + first}};
}

/// How many of the tile's tokens each row sees, counted from its first.
void TileLoop::set_visible(std::int64_t token, std::int32_t tokens) noexcept {
  for (std::int32_t r = 0; r < output_.rows; ++r) {
    memory_.visible[r] = static_cast<std::int32_t>(clamp_to(output_.seen_by(output_.row(r).token).end - token, 0, tokens));
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
