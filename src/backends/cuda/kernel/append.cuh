// Append: rows of new tokens and turned queries. Every CTA that sees new tokens makes its own copy in the ring, turned and rounded as
// the cache holds it; the one whose row block holds the token's own query writes it to the cache too. So nobody reads what
// another CTA writes.
#pragma once

#include <cstdint>

#include "backends/cuda/kernel/cta_shared.cuh"
#include "backends/cuda/kernel/elements.cuh"
#include "backends/cuda/kernel/queries.cuh"
#include "backends/cuda/ptx/copy.cuh"
#include "backends/cuda/ptx/mma.cuh"
#include "base/float_types.hpp"
#include "problem/address.hpp"
#include "problem/append.hpp"
#include "problem/kv_scales.hpp"
#include "problem/pages.hpp"

namespace lean::cuda {

/// A row of 16-bit elements, bf16 or fp16, and the position it is turned by.
struct TurnedRow {
  const std::uint16_t* elements;
  bool bf16;
  std::int64_t stride;  // elements from one to the next
  std::int64_t position;
  bool turns;
};

[[nodiscard]] __device__ inline float turned_element(const Append& append, const TurnedRow& row, std::int32_t dim) {
  const auto element = [&row](std::int32_t i) {
    const std::uint16_t bits = row.elements[i * row.stride];
    return row.bf16 ? to_float<DType::kBFloat16>(bits) : to_float<DType::kFloat16>(bits);
  };
  if (!row.turns || dim >= append.rotary_dim) return element(dim);
  const RotaryPair pair = rotary_pair_of(append, dim);
  const Turned turned = turn(append, row.position, pair, element(pair.first), element(pair.second));
  return dim == pair.first ? turned.first : turned.second;
}

/// Eight neighbouring elements from `dim` on, rounded to the row's type.
[[nodiscard]] __device__ __forceinline__ uint4 turned_piece(const Append& append, const TurnedRow& row, std::int32_t dim) {
  std::uint32_t pairs[kQueryPieceDims / 2];
#pragma unroll
  for (std::uint32_t& pair : pairs) {
    const float low = turned_element(append, row, dim);
    const float high = turned_element(append, row, dim + 1);
    pair = row.bf16 ? ptx::pack<DType::kBFloat16>(low, high) : ptx::pack<DType::kFloat16>(low, high);
    dim += 2;
  }
  return {pairs[0], pairs[1], pairs[2], pairs[3]};
}

/// The same, divided by the cache's scale and rounded to fp8.
[[nodiscard]] __device__ __forceinline__ uint2 quantised_piece(const Append& append, const TurnedRow& row, std::int32_t dim,
                                                               float scale, bool e5m2) {
  std::uint32_t fours[2] = {0, 0};
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float x = turned_element(append, row, dim + i) / scale;
    const std::uint32_t code = e5m2 ? from_float<Float8E5M2>(x).bits : from_float<Float8E4M3>(x).bits;
    fours[i / 4] |= code << (i % 4 * 8);
  }
  return {fours[0], fours[1]};
}

/// The queries of a record's row block, turned, to the exchange area, by all consumer threads. Called before a segment begins, when
/// nothing is kept in registers yet.
template <KernelConfig kConfig>
__device__ __noinline__ void stage_turned_queries(const DeviceCall& call, std::int32_t place) {
  CtaMemory<kConfig>& memory = cta_memory<kConfig>();
  const SegmentRecord& record = memory.shared.records[place];
  const Problem& problem = call.problem;
  const Sequence& lengths = record.lengths;
  const std::int32_t row_pieces = problem.head_dim / kQueryPieceDims;
  const std::uint32_t staged = ptx::shared_address(memory.exchange);
  consumer_sync<kConfig>();  // what the segment before had there is read
#pragma unroll 1
  for (auto i = static_cast<std::int32_t>(threadIdx.x); i < kConfig.q_rows * kQueryPieces<kConfig>;
       i += kConfig.consumer_threads()) {
    const std::int32_t row = i / kQueryPieces<kConfig>;
    const std::int32_t piece = i % kQueryPieces<kConfig>;
    uint4 eight = {0, 0, 0, 0};
    if (row < record.rows && piece < row_pieces) {
      const PackedRow at = query_of<kConfig>(call, record, row);
      const std::int64_t token = std::int64_t{lengths.kv_end} - lengths.q_tokens + at.token;
      eight = turned_piece(problem.append,
                           {.elements = query_row(call, record, at),
                            .bf16 = problem.q.dtype == DType::kBFloat16,
                            .stride = 1,
                            .position = rotary_position(lengths, token),
                            .turns = turns_queries(problem.append, lengths)},
                           piece * kQueryPieceDims);
    }
    ptx::store_shared(query_address<kConfig>(staged, row, piece), eight);
  }
}

/// Where the cache keeps a token's row of the record's head; null where its page lies outside the pool.
[[nodiscard]] __device__ inline std::byte* cache_row(const DeviceCall& call, const TensorView& cache, const SegmentRecord& record,
                                                     std::int32_t token) {
  const PagedKv& pages = call.problem.pages;
  std::int64_t offset;
  if (is_paged(pages)) {
    const std::int32_t page = page_of(call, token);
    const std::int32_t id = page_ids(pages, record.lengths, record.sequence)[page];
    if (!in_pool(pages, id)) return nullptr;
    offset = page_offset(cache.strides, id, record.kv_head) + (token - page * pages.page_tokens) * cache.strides.token;
  } else {
    offset = kv_offset(cache.strides, record.lengths, {record.sequence, record.kv_head}, call.problem.cu_kv_tokens != nullptr) +
             token * cache.strides.token;
  }
  return static_cast<std::byte*>(const_cast<void*>(cache.data)) + offset * bytes_of(cache.dtype);
}

/// Eight bytes to a row that may begin anywhere.
__device__ inline void store_bytes(std::byte* to, const uint2& eight) {
#pragma unroll
  for (std::uint32_t i = 0; i < 8; ++i) to[i] = static_cast<std::byte>((i < 4 ? eight.x : eight.y) >> (i % 4 * 8));
}

/// New rows of K or of V: tokens [begin, end), from `stage` on.
struct NewRows {
  bool keys;
  std::int32_t begin;
  std::int32_t end;
  std::uint32_t stage;
};

/// Makes them, by `threads` threads of which this is the given one. A row whose page lies outside the pool becomes 0; returns whether
/// this thread met one.
template <KernelConfig kConfig>
[[nodiscard]] __device__ __forceinline__ bool make_new_rows(const DeviceCall& call, const SegmentRecord& record,
                                                            const NewRows& rows, std::int32_t thread, std::int32_t threads) {
  const Problem& problem = call.problem;
  const TensorView& fresh = rows.keys ? problem.append.k : problem.append.v;
  const std::int32_t row_pieces = problem.head_dim / kQueryPieceDims;
  const std::int32_t pieces = (rows.end - rows.begin) * row_pieces;
  bool lacks_page = false;
#pragma unroll 1
  for (std::int32_t i = thread; i < pieces; i += threads) {
    const std::int32_t row = i / row_pieces;
    const std::int32_t piece = i - row * row_pieces;
    const std::int32_t token = rows.begin + row;
    std::byte* const kept = cache_row(call, rows.keys ? problem.k : problem.v, record, token);
    const std::int64_t first_row = std::int64_t{record.row_block} * kConfig.q_rows;
    const bool writes = kept != nullptr && writes_new_token(record.lengths, call.shape.group, first_row, record.rows, token);
    const std::int64_t offset = append_offset(problem, fresh.strides, record.lengths, {record.sequence, record.kv_head}, token);
    const TurnedRow from{.elements = static_cast<const std::uint16_t*>(fresh.data) + offset,
                         .bf16 = problem.q.dtype == DType::kBFloat16,
                         .stride = fresh.strides.dim,
                         .position = rotary_position(record.lengths, token),
                         .turns = rows.keys && problem.append.rotary_dim > 0};
    const std::uint32_t to = rows.stage + static_cast<std::uint32_t>(row * kConfig.stage_row_bytes(problem.head_dim));
    const std::int32_t dim = piece * kQueryPieceDims;
    if constexpr (kConfig.fp8()) {
      uint2 eight = {0, 0};
      if (kept != nullptr) {
        const float scale = rows.keys ? k_scale_of(problem, record.kv_head) : v_scale_of(problem, record.kv_head);
        eight = quantised_piece(problem.append, from, dim, scale, problem.k.dtype == DType::kFloat8E5M2);
      }
      if (writes) store_bytes(kept + dim, eight);
      ptx::store_shared_8(to + static_cast<std::uint32_t>(dim), eight);
    } else {
      uint4 eight = {0, 0, 0, 0};
      if (kept != nullptr) eight = turned_piece(problem.append, from, dim);
      if (writes) *reinterpret_cast<uint4*>(kept + dim * 2) = eight;
      ptx::store_shared(to + static_cast<std::uint32_t>(dim * 2), eight);
    }
    lacks_page = lacks_page || kept == nullptr;
  }
  ptx::fence_before_copies();  // to the same stage, later
  return lacks_page;
}

}  // namespace lean::cuda
