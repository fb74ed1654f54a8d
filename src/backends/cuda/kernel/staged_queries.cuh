// How the queries of a row block lie in shared memory, from which warps load them 8 dims at a time: rows that bulk copies bring lie
// apart, those that threads stage are swizzled.
#pragma once

#include <cstdint>

#include "backends/cuda/kernel_config.hpp"
#include "backends/cuda/wide_layout.hpp"

namespace lean::cuda {

inline constexpr std::int32_t kQueryBytes = 2;      // of an element
inline constexpr std::int32_t kQueryPieceDims = 8;  // 16 bytes

template <KernelConfig kConfig>
inline constexpr std::int32_t kQueryPieces =  // of a staged row
    (kConfig.wide() ? kConfig.stage_row_bytes(kConfig.head_dim) / kQueryBytes : kConfig.head_dim) / kQueryPieceDims;

/// Bytes from a staged row of queries to the next: rows that bulk copies bring lie apart, so that ldmatrix meets no bank twice.
template <KernelConfig kConfig>
inline constexpr std::int32_t kQueryRowBytes = kQueryPieces<kConfig> * kPieceBytes + (kConfig.bulk_queries() ? kPieceBytes : 0);

/// Where 8 dims of a row are staged. Rows end to end are swizzled, which keeps ldmatrix free of bank conflicts.
template <KernelConfig kConfig>
[[nodiscard]] __device__ __forceinline__ std::uint32_t query_address(std::uint32_t staged, std::int32_t row, std::int32_t piece) {
  if constexpr (kConfig.wide()) {  // in columns, as a tile of K
    return staged + wide::piece_place(kConfig.q_rows, row, piece);
  }
  const std::int32_t place = kConfig.bulk_queries() ? piece : piece ^ (row % 8);
  return staged + static_cast<std::uint32_t>(row * kQueryRowBytes<kConfig> + place * kPieceBytes);
}

}  // namespace lean::cuda
