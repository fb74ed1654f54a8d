// The work line and the plan, built by a whole CTA from lengths in device memory. Every CTA builds the same.
#pragma once

#include <cstdint>

#include "backends/cuda/kernel/cta_shared.cuh"

namespace lean::cuda {

[[nodiscard]] __device__ __forceinline__ std::int32_t warp_sum(std::int32_t x) { return __reduce_add_sync(0xFFFFFFFFU, x); }
[[nodiscard]] __device__ __forceinline__ std::int32_t warp_min(std::int32_t x) { return __reduce_min_sync(0xFFFFFFFFU, x); }
[[nodiscard]] __device__ __forceinline__ std::int32_t warp_max(std::int32_t x) { return __reduce_max_sync(0xFFFFFFFFU, x); }

template <typename TReduce>
[[nodiscard]] __device__ inline std::int64_t warp_reduce(std::int64_t x, const TReduce& reduce) {
  for (int lanes = 1; lanes < kWarpThreads; lanes *= 2) x = reduce(x, std::int64_t{__shfl_xor_sync(0xFFFFFFFFU, x, lanes)});
  return x;
}
[[nodiscard]] __device__ inline std::int64_t warp_sum(std::int64_t x) {
  return warp_reduce(x, [](std::int64_t a, std::int64_t b) { return a + b; });
}
[[nodiscard]] __device__ inline std::int64_t warp_min(std::int64_t x) { return warp_reduce(x, min_of); }
[[nodiscard]] __device__ inline std::int64_t warp_max(std::int64_t x) { return warp_reduce(x, max_of); }

/// What lies before the lane's own measure in its warp.
template <typename TUnits>
[[nodiscard]] __device__ inline TUnits warp_before(TUnits own) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpThreads;
  TUnits end = own;
#pragma unroll
  for (int lanes = 1; lanes < kWarpThreads; lanes *= 2) {
    const TUnits left = __shfl_up_sync(0xFFFFFFFFU, end, static_cast<unsigned>(lanes));
    if (lane >= lanes) end += left;
  }
  return end - own;
}

template <typename TUnits>
[[nodiscard]] __device__ inline schedule::BasicLineSums<TUnits> sum_over_warp(const schedule::BasicLineSums<TUnits>& own) {
  return {.cost = warp_sum(own.cost),
          .tiles = warp_sum(own.tiles),
          .outputs = warp_sum(own.outputs),
          .max_output_tiles = warp_max(own.max_output_tiles),
          .max_tile_cost = warp_max(own.max_tile_cost),
          .min_output_cost = warp_min(own.min_output_cost),
          .max_output_cost = warp_max(own.max_output_cost)};
}

/// Called by all threads; returns the workers that have work. Rows of 32 strips are summed by a warp each.
template <typename TUnits>
__device__ std::int32_t build_schedule(const DeviceCall& call, CtaSchedule<TUnits>& built) {
  const schedule::Measure measure = schedule::measure_of(call.policy.kind);
  const DeviceRules<TUnits> rules(DeviceLengths(call.problem, &call.slots.header()), call.shape, call.cost_model, measure);
  const auto thread = static_cast<std::int32_t>(threadIdx.x);
  const auto warps = static_cast<std::int32_t>(blockDim.x) / kWarpThreads;
  const std::int64_t row_sequences = rules.sequences_per_strip() * kWarpThreads;
  const auto rows = static_cast<std::int32_t>(call.shape.batch > row_sequences ? ceil_div(call.shape.batch, row_sequences) : 1);
  for (std::int32_t row = thread / kWarpThreads; row < rows; row += warps) {
    const std::int32_t strip = row * kWarpThreads + thread % kWarpThreads;
    const schedule::BasicLineSums<TUnits> own = rules.sum_strip(strip);
    built.line.set_strip_begin(strip, warp_before(own.in(measure)));
    const schedule::BasicLineSums<TUnits> sums = sum_over_warp(own);
    if (thread % kWarpThreads == 0) built.strip_rows[row] = sums;
  }
  __syncthreads();
  schedule::BasicLineSums<TUnits> sums = built.strip_rows[0];
  for (std::int32_t row = 1; row < rows; ++row) {
    for (std::int32_t strip = row * kWarpThreads + thread; strip < (row + 1) * kWarpThreads; strip += warps * kWarpThreads) {
      built.line.set_strip_begin(strip, built.line.strip_begin(strip) + sums.in(measure));
    }
    sums = sums.plus(built.strip_rows[row]);
  }
  if (thread == 0) {
    static_cast<DeviceRules<TUnits>&>(built.line) = rules;
    built.line.set_sums(sums);
    built.plan =
        schedule::make_plan(sums, call.policy, call.cost_model, call.shape.tile_tokens, static_cast<std::int32_t>(gridDim.x));
  }
  __syncthreads();
  return built.plan.workers;
}

}  // namespace lean::cuda
