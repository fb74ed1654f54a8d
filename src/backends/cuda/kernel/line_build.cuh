// The work line and the plan, built by a whole CTA from lengths in device memory. Every CTA builds the same.
#pragma once

#include <cstdint>

#include "backends/cuda/kernel/cta_shared.cuh"

namespace lean::cuda {

[[nodiscard]] __device__ __forceinline__ std::int64_t shuffle_up(std::int64_t x, int lanes) {
  return __shfl_up_sync(0xFFFFFFFFU, x, static_cast<unsigned>(lanes));
}
[[nodiscard]] __device__ __forceinline__ std::int64_t shuffle_xor(std::int64_t x, int lanes) {
  return __shfl_xor_sync(0xFFFFFFFFU, x, lanes);
}

[[nodiscard]] __device__ inline schedule::LineSums sum_over_warp(schedule::LineSums sums) {
  for (int lanes = 1; lanes < kWarpThreads; lanes *= 2) {
    sums = sums.plus({.cost = shuffle_xor(sums.cost, lanes),
                      .tiles = shuffle_xor(sums.tiles, lanes),
                      .outputs = shuffle_xor(sums.outputs, lanes),
                      .max_output_tiles = shuffle_xor(sums.max_output_tiles, lanes),
                      .max_tile_cost = shuffle_xor(sums.max_tile_cost, lanes),
                      .min_output_cost = shuffle_xor(sums.min_output_cost, lanes),
                      .max_output_cost = shuffle_xor(sums.max_output_cost, lanes)});
  }
  return sums;
}

/// Called by all threads; ends with a __syncthreads(). `strip_sums` is scratch for DeviceLine::kStrips sums.
template <KernelConfig kConfig>
__device__ void build_line(const DeviceCall& call, CtaShared<kConfig>& shared, schedule::LineSums* strip_sums) {
  constexpr std::int32_t kStrips = DeviceLine::kStrips;
  DeviceLine& line = *reinterpret_cast<DeviceLine*>(shared.line);
  const DeviceLine unbuilt(DeviceLengths(call.problem, &call.slots.header()), call.shape, call.cost_model,
                           schedule::measure_of(call.policy.kind));
  const auto thread = static_cast<std::int32_t>(threadIdx.x);
  for (std::int32_t strip = thread; strip < kStrips; strip += static_cast<std::int32_t>(blockDim.x)) {
    strip_sums[strip] = unbuilt.sum_strip(strip);
  }
  if (thread == 0) line = unbuilt;
  __syncthreads();
  if (thread < kWarpThreads) {
    constexpr std::int32_t kLaneStrips = kStrips / kWarpThreads;
    schedule::LineSums own;
    for (std::int32_t i = 0; i < kLaneStrips; ++i) own = own.plus(strip_sums[thread * kLaneStrips + i]);
    const schedule::Measure measure = schedule::measure_of(call.policy.kind);
    std::int64_t end = own.in(measure);
    for (int lanes = 1; lanes < kWarpThreads; lanes *= 2) {
      const std::int64_t before = shuffle_up(end, lanes);
      if (thread >= lanes) end += before;
    }
    std::int64_t begin = end - own.in(measure);
    for (std::int32_t i = 0; i < kLaneStrips; ++i) {
      line.set_strip_begin(thread * kLaneStrips + i, begin);
      begin += strip_sums[thread * kLaneStrips + i].in(measure);
    }
    const schedule::LineSums sums = sum_over_warp(own);
    if (thread == 0) {
      line.set_sums(sums);
      shared.plan = schedule::make_plan(sums, call.policy, call.cost_model, call.shape.tile_tokens,
                                        static_cast<std::int32_t>(gridDim.x));
    }
  }
  __syncthreads();
}

}  // namespace lean::cuda
