// What all lanes of a warp have together. Every lane takes part and gets the same.
#pragma once

#include <cstdint>

namespace lean::cuda::ptx {

inline constexpr std::uint32_t kAllLanes = 0xFFFFFFFFU;

/// The largest; not for NaN. As integers of the same order: one instruction.
[[nodiscard]] __device__ __forceinline__ float warp_max(float x) {
  const auto ordered = [](std::int32_t bits) { return bits ^ ((bits >> 31) & 0x7FFFFFFF); };  // its own inverse
  return __int_as_float(ordered(__reduce_max_sync(kAllLanes, ordered(__float_as_int(x)))));
}

/// The sum, always in the same order.
[[nodiscard]] __device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) x += __shfl_xor_sync(kAllLanes, x, lanes);
  return x;
}

}  // namespace lean::cuda::ptx
