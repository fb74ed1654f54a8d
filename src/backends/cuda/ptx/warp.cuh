// What all lanes of a warp have together: every lane takes part, and gets the same but for warp_sum_before().
#pragma once

#include <cstdint>

#include "base/int_math.hpp"

namespace lean::cuda::ptx {

inline constexpr int kLanes = 32;
inline constexpr std::uint32_t kAllLanes = 0xFFFFFFFFU;

[[nodiscard]] __device__ __forceinline__ std::int32_t warp_sum(std::int32_t x) { return __reduce_add_sync(kAllLanes, x); }
[[nodiscard]] __device__ __forceinline__ std::int32_t warp_min(std::int32_t x) { return __reduce_min_sync(kAllLanes, x); }
[[nodiscard]] __device__ __forceinline__ std::int32_t warp_max(std::int32_t x) { return __reduce_max_sync(kAllLanes, x); }

template <typename TReduce>
[[nodiscard]] __device__ inline std::int64_t warp_reduce(std::int64_t x, const TReduce& reduce) {
#pragma unroll 1
  for (int lanes = 1; lanes < kLanes; lanes *= 2) x = reduce(x, std::int64_t{__shfl_xor_sync(kAllLanes, x, lanes)});
  return x;
}
[[nodiscard]] __device__ inline std::int64_t warp_sum(std::int64_t x) {
  return warp_reduce(x, [](std::int64_t a, std::int64_t b) { return a + b; });
}
[[nodiscard]] __device__ inline std::int64_t warp_min(std::int64_t x) {
  return warp_reduce(x, [](std::int64_t a, std::int64_t b) { return min_of(a, b); });
}
[[nodiscard]] __device__ inline std::int64_t warp_max(std::int64_t x) {
  return warp_reduce(x, [](std::int64_t a, std::int64_t b) { return max_of(a, b); });
}

/// The sum over the lanes before the caller's.
template <typename TUnits>
[[nodiscard]] __device__ inline TUnits warp_sum_before(TUnits own) {
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  TUnits end = own;
#pragma unroll
  for (int lanes = 1; lanes < kLanes; lanes *= 2) {
    const TUnits left = __shfl_up_sync(kAllLanes, end, static_cast<unsigned>(lanes));
    if (lane >= lanes) end += left;
  }
  return end - own;
}

/// The largest; not for NaN. As integers of the same order: one instruction.
[[nodiscard]] __device__ __forceinline__ float warp_max(float x) {
  const auto ordered = [](std::int32_t bits) { return bits ^ ((bits >> 31) & 0x7FFFFFFF); };  // its own inverse
  return __int_as_float(ordered(warp_max(ordered(__float_as_int(x)))));
}

/// The same number of every lane, known as such to the compiler: what is made of it takes uniform registers.
[[nodiscard]] __device__ __forceinline__ std::uint32_t uniform(std::uint32_t x) { return __shfl_sync(kAllLanes, x, 0); }

/// What lane XOR `step` has.
[[nodiscard]] __device__ __forceinline__ float across(float x, int step) { return __shfl_xor_sync(kAllLanes, x, step); }

}  // namespace lean::cuda::ptx
