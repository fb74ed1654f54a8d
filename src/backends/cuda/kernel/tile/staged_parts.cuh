// Parts staged at a segment's end: how the consumer warps lay their (O, m, l) side by side in the exchange area, from which the fix-up
// merges them. Rows of partials in slots lie the same way.
#pragma once

#include <cstdint>

#include "backends/cuda/kernel_config.hpp"
#include "base/int_math.hpp"

namespace lean::cuda {

/// Neighbouring elements of a row that are kept together.
inline constexpr std::int32_t kQuadDims = 4;

/// Where four elements of a row are kept among the row's, staged or in a slot. The twist keeps warps free of bank conflicts when
/// they stage theirs. Its own inverse.
template <KernelConfig kConfig>
[[nodiscard]] __device__ __forceinline__ std::int32_t twisted_quad(std::int32_t row, std::int32_t quad) {
  return quad ^ (2 * ((kConfig.narrow() ? row / 2 : row) & 3));
}

/// Which rows of the block the warps stage at once: all, or in turn each half of a matrix product's.
template <KernelConfig kConfig>
struct StagedRows {
  static constexpr std::int32_t kOfWarp = kConfig.staged_rows();
  static constexpr std::int32_t kTurns = kConfig.warp_rows() / kOfWarp;
  static constexpr std::int32_t kCount = kConfig.row_warps() * kOfWarp;

  std::int32_t turn = 0;

  /// Among the block's.
  [[nodiscard]] __device__ __forceinline__ std::int32_t row(std::int32_t staged) const {
    return turn * kOfWarp + staged + (kTurns - 1) * (staged & ~(kOfWarp - 1));
  }
  /// How many of them are among the block's first `count`.
  [[nodiscard]] __device__ __forceinline__ std::int32_t existing(std::int32_t count) const {
    if constexpr (kTurns == 1) return min(count, kCount);
    const std::int32_t of_last = count % kMmaRows - turn * kOfWarp;  // of the last warp that has any
    return count / kMmaRows * kOfWarp + max(0, min(of_last, kOfWarp));
  }
};

}  // namespace lean::cuda
