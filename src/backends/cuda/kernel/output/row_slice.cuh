// RowSlice: up to 128 dims of a row of results, one warp's at a time, a few neighbouring dims a lane: what is merged, stored and
// output.
#pragma once

#include <cstdint>

#include "backends/cuda/kernel/tile/staged_parts.cuh"
#include "backends/cuda/kernel_config.hpp"
#include "backends/cuda/ptx/barrier.cuh"
#include "backends/cuda/ptx/special_registers.cuh"
#include "softmax/state.hpp"

namespace lean::cuda {

/// Neighbouring dims of a slice that a lane merges.
template <KernelConfig kConfig>
inline constexpr std::int32_t kLaneDims = min_of(kVectorDims, kConfig.value_dim() / kWarpThreads);

template <KernelConfig kConfig, std::int32_t kDims = kLaneDims<kConfig>>
struct alignas(kDims * sizeof(float)) LaneElements {
  float x[kDims] = {};
};

/// Dims that a warp merges at once, and how many such slices a row has.
template <KernelConfig kConfig, std::int32_t kDims = kLaneDims<kConfig>>
inline constexpr std::int32_t kSliceDims = kWarpThreads * kDims;
template <KernelConfig kConfig, std::int32_t kDims = kLaneDims<kConfig>>
inline constexpr std::int32_t kRowSlices = kConfig.value_dim() / kSliceDims<kConfig, kDims>;

/// A slice of a row: a lane's elements, and the row's state, which all lanes know.
template <KernelConfig kConfig, std::int32_t kDims = kLaneDims<kConfig>>
struct RowSlice {
  LaneElements<kConfig, kDims> o;
  softmax::State state;
};

/// A lane's first dim of a slice, as rows are kept: swizzled.
template <KernelConfig kConfig, std::int32_t kDims = kLaneDims<kConfig>>
[[nodiscard]] __device__ __forceinline__ std::int32_t dim_of_lane(std::int32_t slice) {
  return slice * kSliceDims<kConfig, kDims> + static_cast<std::int32_t>(ptx::thread_index() % kWarpThreads) * kDims;
}

/// Loads what other workers stored.
template <KernelConfig kConfig, std::int32_t kDims = kLaneDims<kConfig>>
[[nodiscard]] __device__ __forceinline__ LaneElements<kConfig, kDims> load_past_l1(const float* at) {
  if constexpr (kDims == 2) {
    const float2 x = __ldcg(reinterpret_cast<const float2*>(at));
    return {{x.x, x.y}};
  } else {
    static_assert(kDims == 4);
    const float4 x = __ldcg(reinterpret_cast<const float4*>(at));
    return {{x.x, x.y, x.z, x.w}};
  }
}

}  // namespace lean::cuda
