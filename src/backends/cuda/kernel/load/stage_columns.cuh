// Columns of a stage: tiles as tensor copies lay them down; threads that copy into columns use the same order. A column holds 128 bytes of each
// row, or all of a shorter one, row by row, one column behind the other. This is the swizzle of tensor maps (PTX ISA, "Swizzling
// modes"): piece c of row r lies where piece c ^ swizzle(r) would, so equal pieces of 8 rows meet in no bank.
#pragma once

#include <cstdint>

#include "backends/cuda/kernel_config.hpp"
#include "backends/cuda/tensor_map.hpp"
#include "base/int_math.hpp"
#include "problem/sequence.hpp"

namespace lean::cuda {

/// log2 of how many of 8 neighbouring rows begin in the same bank: gcd(pieces of a row, 8).
[[nodiscard]] __device__ constexpr std::int32_t same_bank_bits(std::int32_t pieces) {
  std::int32_t bits = 0;
  while (bits < 3 && pieces % (2 << bits) == 0) ++bits;
  return bits;
}

/// Bytes of one column of a stage.
template <KernelConfig kConfig>
inline constexpr std::uint32_t column_stage_bytes = kConfig.tile_tokens * kConfig.column_bytes();

/// Where a stage holds a piece of a row.
template <KernelConfig kConfig>
[[nodiscard]] __device__ __forceinline__ std::uint32_t place_in_columns(std::int32_t row, std::int32_t piece) {
  constexpr std::int32_t kPieces = kConfig.column_bytes() / kPieceBytes;
  const std::int32_t swizzle = row % 8 >> (3 - same_bank_bits(kPieces));
  return static_cast<std::uint32_t>(piece / kPieces) * column_stage_bytes<kConfig> +
         static_cast<std::uint32_t>(row * kConfig.column_bytes() + (piece % kPieces ^ swizzle) * kPieceBytes);
}

/// Where the stage holds the same piece `rows` further, a multiple of 4 known to the compiler, and `columns` further; `place` lies
/// in the first 4 rows of 8, or in the first 8 where `rows` is a multiple of 8.
template <KernelConfig kConfig>
[[nodiscard]] __device__ __forceinline__ std::uint32_t further_in_columns(std::uint32_t place, std::int32_t rows,
                                                                          std::int32_t columns) {
  constexpr std::int32_t kPieces = kConfig.column_bytes() / kPieceBytes;
  const std::int32_t swizzle = rows % 8 >> (3 - same_bank_bits(kPieces));
  return (place ^ static_cast<std::uint32_t>(swizzle * kPieceBytes)) + static_cast<std::uint32_t>(rows * kConfig.column_bytes()) +
         static_cast<std::uint32_t>(columns) * column_stage_bytes<kConfig>;
}

/// Whether the places of a sequence's tokens fit the 31 bits that a box is told its own by.
[[nodiscard]] __device__ __forceinline__ bool has_box_places(const Sequence& lengths) {
  return lengths.kv_first_token <= INT32_MAX - lengths.kv_end;
}

/// A low box of a tile, for each of some lanes of all producers: what copies of a warp's lanes are asked for one after the other.
template <KernelConfig kConfig>
struct LaneBox {
  static constexpr std::int32_t kOfColumn = kConfig.tile_tokens / kBoxRows;
  static constexpr std::int32_t kAll = kOfColumn * kConfig.columns();
  static constexpr std::int32_t kOfWarp = ceil_div(kAll, kConfig.producer_warps());

  std::int32_t row = kConfig.tile_tokens;  // of a lane that has none
  std::int32_t column = 0;

  __device__ __forceinline__ LaneBox() {
    const auto own_lane = static_cast<std::int32_t>(threadIdx.x % kWarpThreads);
    if (own_lane >= kOfWarp) return;
    const std::int32_t box = (static_cast<std::int32_t>(threadIdx.x) / kWarpThreads - kConfig.consumer_warps) * kOfWarp + own_lane;
    if (kAll % kOfWarp != 0 && box >= kAll) return;  // the last warp has fewer
    row = box % kOfColumn * kBoxRows;
    column = box / kOfColumn;
  }
};

}  // namespace lean::cuda
