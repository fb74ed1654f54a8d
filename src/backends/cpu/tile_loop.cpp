#include "backends/cpu/tile_loop.hpp"

#include "base/float_types.hpp"
#include "base/int_math.hpp"
#include "problem/preconditions.hpp"

namespace lean::cpu {
namespace {

/// Which kernel reads the tensor: its own type's, or fp32's after a copy.
int kernel_of(const TensorView& tensor) noexcept { return table_index(in_place(tensor) ? tensor.dtype : DType::kFloat32); }

Prefetch prefetch_of(const TensorView& tensor, std::int64_t first_elem, std::int64_t tokens, std::int32_t dims) noexcept {
  if (!in_place(tensor) || tokens <= 0) return {};
  const std::int64_t element_bytes = bytes_of(tensor.dtype);
  return {.data = element(tensor, first_elem),
          .token_stride_bytes = tensor.strides.token * element_bytes,
          .tokens = static_cast<std::int32_t>(tokens),
          .row_bytes = static_cast<std::int32_t>(dims * element_bytes)};
}

}  // namespace

void TileLoop::begin(const TileOutput& output) noexcept {
  output_ = output;
  const std::int32_t group = problem_.q_heads / problem_.kv_heads;
  const std::int32_t stride = memory_.layout.config.head_dim;
  const bool cumulative = problem_.cu_q_tokens != nullptr;
  for (std::int32_t r = 0; r < output.rows; ++r) {
    const PackedRow at = packed_row(output.first_row + r, group);
    const HeadPosition head{output.kv_head.sequence, output.kv_head.head * group + at.head_in_group};
    const std::int64_t offset =
        q_offset(problem_.q.strides, output.lengths, head, cumulative) + at.token * problem_.q.strides.token;
    float* row = memory_.query + std::int64_t{r} * stride;
    load_row(kernels_, problem_.q, offset, row, problem_.head_dim);
    for (std::int32_t d = problem_.head_dim; d < stride; ++d) row[d] = 0.0F;
    if (problem_.q.dtype == DType::kBFloat16) {  // exact: the values were bf16
      std::uint16_t* bf16 = memory_.query_bf16 + std::int64_t{r} * stride;
      for (std::int32_t d = 0; d < stride; ++d) bf16[d] = from_float<BFloat16>(row[d]).bits;
    }
    kernels_.order_query[kernel_of(problem_.k)](row, problem_.head_dim);
  }
}

void TileLoop::run(std::int64_t tile_begin, std::int64_t tile_end, const fixup::Partial& into) noexcept {
  const std::int32_t tile_tokens = memory_.layout.config.tile_tokens;
  const std::int32_t value_dim = value_dim_of(problem_);
  const Sequence& lengths = output_.lengths;
  const bool cumulative = problem_.cu_kv_tokens != nullptr;
  const std::int64_t k_base = kv_offset(problem_.k.strides, lengths, output_.kv_head, cumulative);
  const std::int64_t v_base = kv_offset(problem_.v.strides, lengths, output_.kv_head, cumulative);
  const QueryRows q{{memory_.query, output_.rows, memory_.layout.config.head_dim}, memory_.query_bf16};
  const RowBuffer s{memory_.scores, output_.rows, memory_.layout.score_stride()};
  const RowBuffer o{into.o, output_.rows, static_cast<std::int32_t>(into.value_stride)};
  const SoftmaxRows softmax_rows{log2_scale_, memory_.visible, into.m, into.l, memory_.rescale};
  // One past the last token of this run that any row sees.
  const std::int64_t end = min_of(visible_end_of(output_.rows - 1), lengths.kv_begin + tile_end * tile_tokens);
  for (std::int64_t token = lengths.kv_begin + tile_begin * tile_tokens; token < end; token += tile_tokens) {
    const auto tokens = static_cast<std::int32_t>(min_of(tile_tokens, end - token));
    const std::int64_t next = token + tile_tokens;
    const TokenRows k =
        tile_rows(problem_.k, k_base + token * problem_.k.strides.token, tokens, problem_.head_dim, memory_.packed_k);
    const TokenRows v = tile_rows(problem_.v, v_base + token * problem_.v.strides.token, tokens, value_dim, memory_.packed_v);
    set_visible(token, tokens);
    kernels_.scores[kernel_of(problem_.k)](q, k, s,
                                           prefetch_of(problem_.v, v_base + token * problem_.v.strides.token, tokens, value_dim));
    kernels_.online_softmax(s, tokens, softmax_rows);
    kernels_.accumulate[kernel_of(problem_.v)](
        o, s, v, memory_.rescale,
        prefetch_of(problem_.k, k_base + next * problem_.k.strides.token, min_of(tile_tokens, end - next), problem_.head_dim));
  }
}

std::int32_t TileLoop::visible_end_of(std::int32_t row) const noexcept {
  const std::int32_t group = problem_.q_heads / problem_.kv_heads;
  return visible_end(output_.lengths, packed_row(output_.first_row + row, group).token, problem_.scores.causal);
}

/// How many of the tile's tokens each row sees.
void TileLoop::set_visible(std::int64_t token, std::int32_t tokens) noexcept {
  for (std::int32_t r = 0; r < output_.rows; ++r) {
    memory_.visible[r] = static_cast<std::int32_t>(clamp_to(visible_end_of(r) - token, 0, tokens));
  }
}

TokenRows TileLoop::tile_rows(const TensorView& tensor, std::int64_t first_elem, std::int32_t tokens, std::int32_t dims,
                              float* packed) const noexcept {
  if (in_place(tensor)) return {element(tensor, first_elem), tensor.strides.token * bytes_of(tensor.dtype), tokens, dims};
  const std::int64_t stride = round_up(dims, kLaneMultiple);
  for (std::int32_t t = 0; t < tokens; ++t)
    load_row(kernels_, tensor, first_elem + t * tensor.strides.token, packed + t * stride, dims);
  return {packed, stride * static_cast<std::int64_t>(sizeof(float)), tokens, dims};
}

}  // namespace lean::cpu
