// The kernel ahead of a call that appends (append.hpp): new rows of K and V into the cache, rotated and rounded or divided by their
// scale, and with a rotary embedding all queries, rotated, into their rows of the output. A thread makes eight dims of a row.
#include "backends/cuda/append.hpp"

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "backends/cuda/device.hpp"
#include "backends/cuda/enqueue_kernel.hpp"
#include "backends/cuda/kernel/elements.cuh"
#include "backends/cuda/kernel_config.hpp"
#include "backends/cuda/ptx/grid.cuh"
#include "backends/cuda/ptx/mma.cuh"
#include "base/alignment.hpp"
#include "base/int_math.hpp"
#include "lean/float_types.hpp"
#include "problem/address.hpp"
#include "problem/append.hpp"
#include "problem/kv_scales.hpp"
#include "problem/pages.hpp"
#include "problem/preconditions.hpp"
#include "problem/sequence.hpp"

namespace lean::cuda {
namespace {

constexpr std::int32_t kThreads = 256;
constexpr std::int64_t kManyCtas = 4096;    // four times what a large GPU holds at once
constexpr std::int32_t kPieceElements = 8;  // of a row, by one thread: 16 bytes of 16-bit elements

/// Rows that a token brings: its queries, where they are rotated, then K and V of each kv head.
struct TokenRows {
  std::int32_t queries;
  std::int32_t kv_heads;

  LEAN_HD explicit TokenRows(const Problem& problem)
      : queries(problem.append.rotary_dim > 0 ? problem.q_heads : 0), kv_heads(problem.kv_heads) {}

  [[nodiscard]] LEAN_HD std::int64_t count() const { return queries + std::int64_t{2} * kv_heads; }
};

/// Of the wider of a token's rows; of the others the last are not there.
[[nodiscard]] LEAN_HD std::int64_t pieces_of(const Problem& problem) {
  return ceil_div(max_of(problem.head_dim, value_dim_of(problem)), kPieceElements);
}

/// A row of 16-bit elements as it comes, and the position it is rotated by.
struct SourceRow {
  const std::uint16_t* elements;
  bool bf16;
  std::int64_t stride;  // elements from one to the next
  std::int64_t position;
  bool rotates;

  [[nodiscard]] __device__ float element(std::int32_t dim) const { return to_fp32(elements[dim * stride]); }
  [[nodiscard]] __device__ float to_fp32(std::uint16_t bits) const {
    return bf16 ? to_float<DType::kBFloat16>(bits) : to_float<DType::kFloat16>(bits);
  }
};

struct Piece {
  float x[kPieceElements];
};

/// Elements [dim, dim + kPieceElements) of a row whose pieces begin at multiples of 16 bytes.
[[nodiscard]] __device__ __forceinline__ Piece load_piece(const SourceRow& row, std::int32_t dim) {
  const uint4 eight = *reinterpret_cast<const uint4*>(row.elements + dim);
  const std::uint32_t pairs[] = {eight.x, eight.y, eight.z, eight.w};
  Piece piece;
#pragma unroll
  for (int i = 0; i < kPieceElements; ++i) piece.x[i] = row.to_fp32(static_cast<std::uint16_t>(pairs[i / 2] >> (i % 2 * 16)));
  return piece;
}

/// Elements [dim, dim + count) of any row, rotated, one by one: a function that is called, since what runs once is paid by its
/// fetching.
[[nodiscard]] __device__ __noinline__ Piece rotated_piece_of_any(const Append& append, const SourceRow& row, std::int32_t dim,
                                                                 std::int32_t count) {
  const std::int64_t tables = rotary_row(append, row.position);
  Piece piece{};
#pragma unroll 1
  for (int i = 0; i < count; ++i) {
    piece.x[i] = row.element(dim + i);
    if (!row.rotates || dim + i >= append.rotary_dim) continue;
    const RotaryPair pair = rotary_pair_of(append, dim + i);
    const Rotated rotated = rotate(append.rotary_cos[tables + pair.angle], append.rotary_sin[tables + pair.angle],
                                   row.element(pair.first), row.element(pair.second));
    piece.x[i] = dim + i == pair.first ? rotated.first : rotated.second;
  }
  return piece;
}

/// Elements [dim, dim + count) of a row, rotated; where rows lie as they usually do, are rotated by halves and have a whole piece, all
/// is loaded at once.
[[nodiscard]] __device__ __forceinline__ Piece rotated_piece(const Append& append, const SourceRow& row, std::int32_t dim,
                                                             std::int32_t count) {
  const std::int32_t half = append.rotary_dim / 2;
  const bool rotates = row.rotates && dim < append.rotary_dim;
  if (count < kPieceElements || row.stride != 1 || !aligned_to(row.elements, sizeof(uint4)) ||
      (rotates && (append.rotary_interleaved || half % kPieceElements != 0))) {
    return rotated_piece_of_any(append, row, dim, count);
  }
  Piece piece = load_piece(row, dim);
  if (!rotates) return piece;
  const bool leads = dim < half;
  const std::int32_t angle = leads ? dim : dim - half;
  const std::int64_t tables = rotary_row(append, row.position) + angle;
  const Piece other = load_piece(row, leads ? dim + half : angle);
#pragma unroll
  for (int i = 0; i < kPieceElements; ++i) {
    const Rotated rotated = rotate(append.rotary_cos[tables + i], append.rotary_sin[tables + i], leads ? piece.x[i] : other.x[i],
                                   leads ? other.x[i] : piece.x[i]);
    piece.x[i] = leads ? rotated.first : rotated.second;
  }
  return piece;
}

/// Stores a piece to a row of 16-bit elements that begins at a multiple of 4 bytes.
__device__ __forceinline__ void store_piece(std::byte* to, const Piece& piece, bool bf16) {
  std::uint32_t pairs[kPieceElements / 2];
#pragma unroll
  for (int i = 0; i < kPieceElements / 2; ++i) {
    const float low = piece.x[2 * i];
    const float high = piece.x[2 * i + 1];
    pairs[i] = bf16 ? ptx::pack<DType::kBFloat16>(low, high) : ptx::pack<DType::kFloat16>(low, high);
  }
  if (aligned_to(to, sizeof(uint4))) {
    *reinterpret_cast<uint4*>(to) = {pairs[0], pairs[1], pairs[2], pairs[3]};
  } else {
#pragma unroll
    for (int i = 0; i < kPieceElements / 2; ++i) reinterpret_cast<std::uint32_t*>(to)[i] = pairs[i];
  }
}

/// Stores a piece to a row of fp8 that may begin anywhere, divided by its scale.
__device__ __noinline__ void store_quantised_piece(std::byte* to, const Piece& piece, float scale, DType dtype) {
  std::uint32_t fours[2] = {0, 0};
#pragma unroll
  for (int i = 0; i < kPieceElements; ++i) {
    const float x = piece.x[i] / scale;
    const std::uint32_t code = dtype == DType::kFloat8E5M2 ? from_float<Float8E5M2>(x).bits : from_float<Float8E4M3>(x).bits;
    fours[i / 4] |= code << (i % 4 * 8);
  }
  if (aligned_to(to, sizeof(uint2))) {
    *reinterpret_cast<uint2*>(to) = {fours[0], fours[1]};
  } else {
#pragma unroll
    for (int i = 0; i < kPieceElements; ++i) to[i] = static_cast<std::byte>(fours[i / 4] >> (i % 4 * 8));
  }
}

/// Stores `count` elements of a piece one by one, `stride` elements apart.
__device__ __noinline__ void store_elements(std::byte* to, const Piece& piece, std::int32_t count, std::int64_t stride, float scale,
                                            DType dtype) {
#pragma unroll 1
  for (int i = 0; i < count; ++i) {
    const float x = piece.x[i];
    std::byte* const at = to + i * stride * bytes_of(dtype);
    switch (dtype) {
      case DType::kFloat16: *reinterpret_cast<std::uint16_t*>(at) = from_float<Half>(x).bits; break;
      case DType::kBFloat16: *reinterpret_cast<std::uint16_t*>(at) = from_float<BFloat16>(x).bits; break;
      case DType::kFloat8E5M2: *at = static_cast<std::byte>(from_float<Float8E5M2>(x / scale).bits); break;
      case DType::kFloat8E4M3: *at = static_cast<std::byte>(from_float<Float8E4M3>(x / scale).bits); break;
      case DType::kFloat32: break;  // refused: preconditions have K and V of q's type or fp8
    }
  }
}

/// A row that a token brings. A token before the sequence's first has queries only.
struct Place {
  HeadPosition head;
  std::int32_t token;  // counted as those of the cache
};

/// A row, rotated or not, and where it goes: null where it is left out.
struct RowCopy {
  SourceRow from;
  std::int32_t dims;
  std::byte* to;
  std::int64_t stride;  // of `to`, elements from one to the next
  DType dtype;          // of `to`
  float scale = 1.0F;   // of fp8
};

[[nodiscard]] __device__ __forceinline__ RowCopy copy_of_query(const Problem& problem, const Sequence& lengths, const Place& at) {
  const std::int64_t from = append_offset(problem, problem.q.strides, lengths, at.head, at.token);
  const std::int64_t to = append_offset(problem, problem.o.strides, lengths, at.head, at.token);
  return {.from = {.elements = static_cast<const std::uint16_t*>(problem.q.data) + from,
                   .bf16 = problem.q.dtype == DType::kBFloat16,
                   .stride = problem.q.strides.dim,
                   .position = rotary_position(problem.append, lengths, at.token),
                   .rotates = rotates_queries(problem.append, lengths)},
          .dims = problem.head_dim,
          .to = reinterpret_cast<std::byte*>(static_cast<std::uint16_t*>(problem.o.data) + to),
          .stride = problem.o.strides.dim,
          .dtype = problem.q.dtype};
}

/// Where the cache keeps a token's row; null where its page lies outside the pool.
[[nodiscard]] __device__ std::byte* cache_row(const Problem& problem, const TensorView& cache, const Sequence& lengths,
                                              HeadPosition head, std::int32_t token) {
  const PagedKv& pages = problem.pages;
  std::int64_t offset;
  if (is_paged(pages)) {
    const std::int32_t page = quotient(token, pages.page_tokens);
    const std::int32_t id = page_ids(pages, lengths, head.sequence)[page];
    if (!in_pool(pages, id)) return nullptr;
    offset = page_offset(cache.strides, id, head.head) + (token - page * pages.page_tokens) * cache.strides.token;
  } else {
    offset = kv_offset(cache.strides, lengths, head, problem.cu_kv_tokens != nullptr) + token * cache.strides.token;
  }
  return static_cast<std::byte*>(const_cast<void*>(cache.data)) + offset * bytes_of(cache.dtype);
}

[[nodiscard]] __device__ __forceinline__ RowCopy copy_of_new_row(const Problem& problem, const Sequence& lengths, const Place& at,
                                                                 bool keys) {
  const TensorView& fresh = keys ? problem.append.k : problem.append.v;
  const TensorView& cache = keys ? problem.k : problem.v;
  const std::int64_t from = append_offset(problem, fresh.strides, lengths, at.head, at.token);
  return {.from = {.elements = static_cast<const std::uint16_t*>(fresh.data) + from,
                   .bf16 = problem.q.dtype == DType::kBFloat16,
                   .stride = fresh.strides.dim,
                   .position = rotary_position(problem.append, lengths, at.token),
                   .rotates = keys && problem.append.rotary_dim > 0},
          .dims = keys ? problem.head_dim : value_dim_of(problem),
          .to = cache_row(problem, cache, lengths, at.head, at.token),
          .stride = cache.strides.dim,
          .dtype = cache.dtype,
          .scale = keys ? k_scale_of(problem, at.head.head) : v_scale_of(problem, at.head.head)};
}

/// CTAs (x, y, z): tokens y, y + gridDim.y, ... of sequence x; of each the z-th part of its rows, a piece a thread.
__global__ void __launch_bounds__(kThreads) append_kernel(const __grid_constant__ Problem problem) {
  ptx::await_earlier_kernels();  // over already where this is not a dependent launch
  if (threadIdx.x == 0) {
    __threadfence();  // so that what those kernels wrote is seen by dependents, which wait for nothing ahead of this one
    ptx::start_dependents();
  }
  const std::int64_t sequence = blockIdx.x;
  if (blockIdx.y == 0 && blockIdx.z == 0 && threadIdx.x == 0) count_new_tokens(problem, sequence);
  const Sequence lengths = LengthSource(problem)(sequence);
  const std::int32_t first_new = first_new_token(problem, lengths);
  const TokenRows rows(problem);
  const auto row_pieces = static_cast<std::uint32_t>(pieces_of(problem));
  const std::uint32_t thread = blockIdx.z * kThreads + threadIdx.x;
  const std::uint32_t at_once = gridDim.z * kThreads / row_pieces;
  if (thread >= at_once * row_pieces) return;
  const auto dim = static_cast<std::int32_t>(thread % row_pieces) * kPieceElements;
  for (std::uint32_t i = thread / row_pieces; i < rows.count(); i += at_once) {
    const auto row = static_cast<std::int32_t>(i);
    const std::int32_t new_row = row - rows.queries;
    const bool keys = new_row < rows.kv_heads;
    const std::int32_t head = new_row < 0 ? row : new_row - (keys ? 0 : rows.kv_heads);
    for (std::int64_t query = blockIdx.y; query < lengths.q_tokens; query += gridDim.y) {  // 31 bits hold every query, not one more
      const Place at{.head = {sequence, head},
                     .token = static_cast<std::int32_t>(query_position(lengths, static_cast<std::int32_t>(query)))};
      if (new_row >= 0 && at.token < first_new) continue;
      const RowCopy copy = new_row < 0 ? copy_of_query(problem, lengths, at) : copy_of_new_row(problem, lengths, at, keys);
      if (copy.to == nullptr || dim >= copy.dims) continue;
      const std::int32_t count = min(kPieceElements, copy.dims - dim);
      const Piece piece = rotated_piece(problem.append, copy.from, dim, count);
      std::byte* const to = copy.to + dim * copy.stride * bytes_of(copy.dtype);
      const bool scaled = kv_type_of(copy.dtype).scaled;
      if (count < kPieceElements || copy.stride != 1 || (!scaled && !aligned_to(to, sizeof(std::uint32_t)))) {
        store_elements(to, piece, count, copy.stride, copy.scale, copy.dtype);
      } else if (scaled) {
        store_quantised_piece(to, piece, copy.scale, copy.dtype);
      } else {
        store_piece(to, piece, copy.from.bf16);
      }
    }
  }
}

/// A token's rows take z CTAs where that is not too many for all sequences; their tokens then as many as there is work and room
/// for.
dim3 grid_of(const Problem& problem) noexcept {
  const std::int64_t of_token = ceil_div(TokenRows(problem).count() * pieces_of(problem), kThreads);
  const std::int64_t z = max_of(1, min_of(of_token, kManyCtas / problem.batch));
  const std::int64_t y = max_of(1, min_of(std::int64_t{problem.q_tokens}, kManyCtas / (problem.batch * z)));
  return {static_cast<unsigned>(problem.batch), static_cast<unsigned>(y), static_cast<unsigned>(z)};
}

}  // namespace

Status enqueue_append(const Problem& problem, bool dependent_launch, void* stream) noexcept {
  return enqueue_kernel({.grid = grid_of(problem), .threads = kThreads, .overlaps = dependent_launch, .stream = stream},
                        append_kernel, problem);
}

TensorView queries_after_append(const Problem& problem) noexcept {
  if (problem.append.rotary_dim == 0) return problem.q;
  return {.data = problem.o.data, .dtype = problem.o.dtype, .strides = problem.o.strides};
}

Problem after_append(const Problem& problem) noexcept {
  Problem after = problem;
  after.q = queries_after_append(problem);
  after.append = {.cached_lengths = problem.append.cached_lengths};  // which its lengths are counted from
  return after;
}

}  // namespace lean::cuda
