#include "backends/cuda/append.hpp"

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "backends/cuda/device.hpp"
#include "backends/cuda/kernel/elements.cuh"
#include "backends/cuda/kernel_config.hpp"
#include "backends/cuda/ptx/grid.cuh"
#include "backends/cuda/ptx/mma.cuh"
#include "base/float_types.hpp"
#include "base/int_math.hpp"
#include "problem/address.hpp"
#include "problem/append.hpp"
#include "problem/kv_scales.hpp"
#include "problem/pages.hpp"
#include "problem/sequence.hpp"

namespace lean::cuda {
namespace {

constexpr std::int32_t kThreads = 256;
constexpr std::int64_t kManyCtas = 4096;    // four times what a large GPU holds at once
constexpr std::int32_t kPieceElements = 8;  // of a row, by one thread: 16 bytes of 16-bit elements

/// Rows that a token brings: its queries, where they are turned, then K and V of each kv head.
struct TokenRows {
  std::int64_t queries;
  std::int64_t kv_heads;

  LEAN_HD explicit TokenRows(const Problem& problem)
      : queries(problem.append.rotary_dim > 0 ? problem.q_heads : 0), kv_heads(problem.kv_heads) {}

  [[nodiscard]] LEAN_HD std::int64_t count() const { return queries + 2 * kv_heads; }
};

/// A row of 16-bit elements as it comes, and the position it is turned by.
struct SourceRow {
  const std::uint16_t* elements;
  bool bf16;
  std::int64_t stride;  // elements from one to the next
  std::int64_t position;
  bool turns;

  [[nodiscard]] __device__ float element(std::int32_t dim) const { return to_fp32(elements[dim * stride]); }
  [[nodiscard]] __device__ float to_fp32(std::uint16_t bits) const {
    return bf16 ? to_float<DType::kBFloat16>(bits) : to_float<DType::kFloat16>(bits);
  }
};

struct Piece {
  float x[kPieceElements];
};

[[nodiscard]] __device__ bool aligned_to(const void* address, std::uintptr_t bytes) {
  return reinterpret_cast<std::uintptr_t>(address) % bytes == 0;
}

[[nodiscard]] __device__ Piece load_piece(const SourceRow& row, std::int32_t dim) {
  Piece piece;
  const std::uint16_t* const from = row.elements + dim * row.stride;
  if (row.stride == 1 && aligned_to(from, sizeof(uint4))) {
    const uint4 eight = *reinterpret_cast<const uint4*>(from);
    const std::uint32_t pairs[] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
    for (int i = 0; i < kPieceElements; ++i) piece.x[i] = row.to_fp32(static_cast<std::uint16_t>(pairs[i / 2] >> (i % 2 * 16)));
  } else {
#pragma unroll
    for (int i = 0; i < kPieceElements; ++i) piece.x[i] = row.element(dim + i);
  }
  return piece;
}

/// Elements [dim, dim + kPieceElements) of the row, turned.
[[nodiscard]] __device__ Piece turned_piece(const Append& append, const SourceRow& row, std::int32_t dim) {
  Piece piece = load_piece(row, dim);
  if (!row.turns) return piece;
#pragma unroll
  for (int i = 0; i < kPieceElements; ++i) {
    if (dim + i >= append.rotary_dim) continue;
    const RotaryPair pair = rotary_pair_of(append, dim + i);
    const bool leads = dim + i == pair.first;
    const float other = row.element(leads ? pair.second : pair.first);
    const Turned turned = turn(append, row.position, pair, leads ? piece.x[i] : other, leads ? other : piece.x[i]);
    piece.x[i] = leads ? turned.first : turned.second;
  }
  return piece;
}

/// To a row of 16-bit elements that begins at a multiple of 4 bytes.
__device__ void store_piece(std::byte* to, const Piece& piece, bool bf16) {
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

/// To a row of fp8 that may begin anywhere, divided by its scale.
__device__ void store_quantised_piece(std::byte* to, const Piece& piece, float scale, DType dtype) {
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

/// One piece of one row that a token brings. A token before the sequence's first has queries only.
struct Place {
  HeadPosition head;
  std::int64_t token;  // counted as those of the cache
  std::int32_t dim;
};

__device__ void write_query(const Problem& problem, const Sequence& lengths, const Place& at) {
  const bool bf16 = problem.q.dtype == DType::kBFloat16;
  const SourceRow row{.elements = static_cast<const std::uint16_t*>(problem.q.data) +
                                  append_offset(problem, problem.q.strides, lengths, at.head, at.token),
                      .bf16 = bf16,
                      .stride = 1,
                      .position = rotary_position(lengths, at.token),
                      .turns = turns_queries(problem.append, lengths)};
  auto* const to =
      static_cast<std::uint16_t*>(problem.o.data) + append_offset(problem, problem.o.strides, lengths, at.head, at.token) + at.dim;
  store_piece(reinterpret_cast<std::byte*>(to), turned_piece(problem.append, row, at.dim), bf16);
}

/// Where the cache keeps a token's row; null where its page lies outside the pool.
[[nodiscard]] __device__ std::byte* cache_row(const Problem& problem, const TensorView& cache, const Sequence& lengths,
                                              HeadPosition head, std::int64_t token) {
  const PagedKv& pages = problem.pages;
  std::int64_t offset;
  if (is_paged(pages)) {
    const std::int64_t page = quotient(token, std::int64_t{pages.page_tokens});
    const std::int32_t id = page_ids(pages, lengths, head.sequence)[page];
    if (!in_pool(pages, id)) return nullptr;
    offset = page_offset(cache.strides, id, head.head) + (token - page * pages.page_tokens) * cache.strides.token;
  } else {
    offset = kv_offset(cache.strides, lengths, head, problem.cu_kv_tokens != nullptr) + token * cache.strides.token;
  }
  return static_cast<std::byte*>(const_cast<void*>(cache.data)) + offset * bytes_of(cache.dtype);
}

__device__ void write_new_row(const Problem& problem, const Sequence& lengths, const Place& at, bool keys) {
  const TensorView& fresh = keys ? problem.append.k : problem.append.v;
  const TensorView& cache = keys ? problem.k : problem.v;
  std::byte* const kept = cache_row(problem, cache, lengths, at.head, at.token);
  if (kept == nullptr) return;
  const bool bf16 = problem.q.dtype == DType::kBFloat16;
  const SourceRow row{
      .elements = static_cast<const std::uint16_t*>(fresh.data) + append_offset(problem, fresh.strides, lengths, at.head, at.token),
      .bf16 = bf16,
      .stride = fresh.strides.dim,
      .position = rotary_position(lengths, at.token),
      .turns = keys && problem.append.rotary_dim > 0};
  const Piece piece = turned_piece(problem.append, row, at.dim);
  std::byte* const to = kept + at.dim * bytes_of(cache.dtype);
  if (is_fp8(cache.dtype)) {
    const float scale = keys ? k_scale_of(problem, at.head.head) : v_scale_of(problem, at.head.head);
    store_quantised_piece(to, piece, scale, cache.dtype);
  } else {
    store_piece(to, piece, bf16);
  }
}

/// CTAs (x, y) share out the rows of sequence x, a piece a thread.
__global__ void __launch_bounds__(kThreads) append_kernel(const __grid_constant__ Problem problem) {
  ptx::start_dependents();
  ptx::await_earlier_kernels();  // over already where this is not a dependent launch
  const std::int64_t sequence = blockIdx.x;
  const Sequence lengths = LengthSource(problem)(sequence);
  const std::int64_t first_new = first_new_token(problem, lengths);
  const TokenRows rows(problem);
  const std::int64_t row_pieces = problem.head_dim / kPieceElements;
  const std::int64_t pieces = lengths.q_tokens * rows.count() * row_pieces;
  for (std::int64_t i = std::int64_t{blockIdx.y} * kThreads + threadIdx.x; i < pieces; i += std::int64_t{gridDim.y} * kThreads) {
    const std::int64_t row = quotient(i, row_pieces);
    const std::int64_t query = quotient(row, rows.count());
    const std::int64_t row_of_token = row - query * rows.count();
    const std::int64_t new_row = row_of_token - rows.queries;
    const bool keys = new_row < rows.kv_heads;
    const std::int64_t head = new_row < 0 ? row_of_token : new_row - (keys ? 0 : rows.kv_heads);
    const Place at{.head = {sequence, static_cast<std::int32_t>(head)},
                   .token = std::int64_t{lengths.kv_end} - lengths.q_tokens + query,
                   .dim = static_cast<std::int32_t>(i - row * row_pieces) * kPieceElements};
    if (new_row < 0) {
      write_query(problem, lengths, at);
    } else if (at.token >= first_new) {
      write_new_row(problem, lengths, at, keys);
    }
  }
}

/// Of a sequence: no more than have work where it has as many query tokens as it may.
std::int64_t ctas_of_sequence(const Problem& problem) noexcept {
  const std::int64_t pieces = problem.q_tokens * TokenRows(problem).count() * (problem.head_dim / kPieceElements);
  return max_of(1, min_of(ceil_div(pieces, kThreads), kManyCtas / problem.batch));
}

}  // namespace

Status enqueue_append(const Problem& problem, bool dependent_launch, void* stream) noexcept {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(problem.batch), static_cast<unsigned>(ctas_of_sequence(problem)));
  config.blockDim = dim3(kThreads);
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = &attribute;
  config.numAttrs = dependent_launch ? 1 : 0;
  return cuda_status(cudaLaunchKernelEx(&config, append_kernel, problem), "cudaLaunchKernelEx");
}

Problem after_append(const Problem& problem) noexcept {
  Problem after = problem;
  if (problem.append.rotary_dim > 0) after.q = {.data = problem.o.data, .dtype = problem.o.dtype, .strides = problem.o.strides};
  after.append = {};
  return after;
}

}  // namespace lean::cuda
