// Parts staged at a segment's end: how the consumer warps lay their (O, m, l) side by side in the exchange area, from which the
// fix-up merges them. Rows of partials in slots lie the same way.
#pragma once

#include <cstdint>

#include "backends/cuda/kernel_config.hpp"
#include "base/int_math.hpp"

namespace lean::cuda {

/// Neighbouring elements of a row that are kept together: a vector.
inline constexpr std::int32_t kVectorDims = 4;

/// Where a vector of a row is kept among the row's, staged or in a slot. The swizzle keeps warps free of bank conflicts when
/// they stage theirs. Its own inverse.
template <KernelConfig kConfig>
[[nodiscard]] __device__ __forceinline__ std::int32_t swizzled_vector(std::int32_t row, std::int32_t vector) {
  return vector ^ (2 * ((kConfig.narrow() ? row / 2 : row) & 3));
}

/// Which rows of the block the warps stage at once: all, or each half of a matrix product's, one round after the other.
template <KernelConfig kConfig>
struct StagedRows {
  static constexpr std::int32_t kOfWarp = kConfig.staged_rows();
  static constexpr std::int32_t kRounds = kConfig.warp_rows() / kOfWarp;
  static constexpr std::int32_t kCount = kConfig.row_warps() * kOfWarp;

  std::int32_t round = 0;

  /// A staged row's place among the block's.
  [[nodiscard]] __device__ __forceinline__ std::int32_t row(std::int32_t staged) const {
    return round * kOfWarp + staged + (kRounds - 1) * (staged & ~(kOfWarp - 1));
  }
  /// How many of them are among the block's first `count`.
  [[nodiscard]] __device__ __forceinline__ std::int32_t existing(std::int32_t count) const {
    if constexpr (kRounds == 1) return min(count, kCount);
    const std::int32_t of_last = count % kMmaRows - round * kOfWarp;  // of the last warp that has any
    return count / kMmaRows * kOfWarp + max(0, min(of_last, kOfWarp));
  }
};

}  // namespace lean::cuda
