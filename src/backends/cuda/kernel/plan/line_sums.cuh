// Sums of a line over the lanes of a warp.
#pragma once

#include <cstdint>

#include "backends/cuda/ptx/warp.cuh"
#include "schedule/work_line.hpp"

namespace lean::cuda {

template <typename TUnits>
[[nodiscard]] __device__ inline schedule::BasicLineSums<TUnits> sum_over_warp(const schedule::BasicLineSums<TUnits>& own) {
  return {.cost = ptx::warp_sum(own.cost),
          .tiles = ptx::warp_sum(own.tiles),
          .outputs = ptx::warp_sum(own.outputs),
          .max_output_tiles = ptx::warp_max(own.max_output_tiles),
          .max_tile_cost = ptx::warp_max(own.max_tile_cost),
          .min_output_cost = ptx::warp_min(own.min_output_cost),
          .max_output_cost = ptx::warp_max(own.max_output_cost)};
}

}  // namespace lean::cuda
