// Rows of K and V that threads copy, piece by piece.
#pragma once

#include <cstdint>

#include "backends/cuda/kernel/kv_rows.cuh"
#include "backends/cuda/kernel/load/stage_columns.cuh"
#include "backends/cuda/ptx/copy.cuh"

namespace lean::cuda {

/// Only rows of single bytes may begin anywhere.
template <KernelConfig kConfig>
inline constexpr bool kOddPieces = kConfig.kv_type().bytes == 1 && !kConfig.step();

/// Bytes that a thread copies at once.
template <KernelConfig kConfig>
[[nodiscard]] __device__ __forceinline__ std::int32_t piece_bytes(const DeviceCall& call) {
  return kOddPieces<kConfig> ? call.load.copy_bytes : kPieceBytes;
}

/// Bytes of a row in memory, or as it is filled up; of wide tiles as the call says it, lest loops over pieces be unrolled.
template <KernelConfig kConfig>
[[nodiscard]] __device__ __forceinline__ std::int32_t row_bytes(const DeviceCall& call) {
  if constexpr (kConfig.wide()) return call.load.stage_bytes / kConfig.tile_tokens;
  return (kConfig.step() ? kConfig.head_dim : call.problem.head_dim) * bytes_of(kConfig.dtype);
}

/// Bytes from a row of a stage to the next.
template <KernelConfig kConfig>
[[nodiscard]] __device__ __forceinline__ std::int32_t stage_row_bytes(const DeviceCall& call) {
  return kOddPieces<kConfig> ? kConfig.stage_row_bytes(call.problem.head_dim) : row_bytes<kConfig>(call);
}

/// What threads copy of a row at once, how often.
template <KernelConfig kConfig>
[[nodiscard]] __device__ __forceinline__ std::int32_t row_pieces_of(const DeviceCall& call, bool keys) {
  constexpr std::int32_t kColumnPieces = kConfig.column_bytes() / kPieceBytes;
  if constexpr (kConfig.few_values()) return (keys ? kConfig.columns() : kConfig.value_columns()) * kColumnPieces;
  return row_bytes<kConfig>(call) / piece_bytes<kConfig>(call);
}

/// Where a stage holds what is copied at once as `piece` of a row.
template <KernelConfig kConfig>
[[nodiscard]] __device__ __forceinline__ std::uint32_t place_in_stage(const DeviceCall& call, std::int32_t row,
                                                                      std::int32_t piece) {
  if constexpr (kConfig.in_columns()) {
    return place_in_columns<kConfig>(row, piece);
  } else {
    return static_cast<std::uint32_t>(row * stage_row_bytes<kConfig>(call) + piece * piece_bytes<kConfig>(call));
  }
}

template <KernelConfig kConfig>
__device__ __forceinline__ void copy_piece(const DeviceCall& call, std::uint32_t to, const std::byte* from, bool exists) {
  if constexpr (kOddPieces<kConfig>) {
    if (call.load.copy_bytes == 1) return ptx::copy_byte(to, from, exists);
    ptx::async_copy(to, from, call.load.copy_bytes, exists);
  } else {
    ptx::async_copy_16(to, from, exists);
  }
}

}  // namespace lean::cuda
