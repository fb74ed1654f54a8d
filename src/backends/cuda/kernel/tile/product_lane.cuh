// ProductLane: where the calling thread stands among those that hold a product of warpgroups: its warp, and its lane as 4 quad + in_quad.
#pragma once

#include <cstdint>

#include "backends/cuda/kernel_config.hpp"
#include "backends/cuda/ptx/special_registers.cuh"

namespace lean::cuda {

struct ProductLane {
  [[nodiscard]] __device__ __forceinline__ static std::int32_t lane() {
    return static_cast<std::int32_t>(ptx::thread_index()) % kWarpThreads;
  }
  [[nodiscard]] __device__ __forceinline__ static std::int32_t warp() {
    return static_cast<std::int32_t>(ptx::thread_index()) / kWarpThreads;
  }
  [[nodiscard]] __device__ __forceinline__ static std::int32_t quad() { return lane() / 4; }
  [[nodiscard]] __device__ __forceinline__ static std::int32_t in_quad() { return lane() % 4; }
};

}  // namespace lean::cuda
