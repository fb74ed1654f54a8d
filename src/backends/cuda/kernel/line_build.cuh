// The work line and the plan, built by a whole CTA from lengths in device memory. Every CTA builds the same.
#pragma once

#include <cstdint>

#include "backends/cuda/kernel/cta_shared.cuh"

namespace lean::cuda {

inline constexpr std::int32_t kStripRows = DeviceLine::kStrips / kWarpThreads;

/// Sums of the strips of one row, by a warp; `before` is what lies before the lane's own strip in the row.
[[nodiscard]] __device__ inline schedule::LineSums sum_strip_row(schedule::LineSums own, schedule::Measure measure,
                                                                 std::int64_t& before) {
  constexpr unsigned kAll = 0xFFFFFFFFU;
  const int lane = static_cast<int>(threadIdx.x) % kWarpThreads;
  std::int64_t end = own.in(measure);
#pragma unroll
  for (int lanes = 1; lanes < kWarpThreads; lanes *= 2) {
    const std::int64_t left = __shfl_up_sync(kAll, end, lanes);
    if (lane >= lanes) end += left;
    own = own.plus({.cost = __shfl_xor_sync(kAll, own.cost, lanes),
                    .tiles = __shfl_xor_sync(kAll, own.tiles, lanes),
                    .outputs = __shfl_xor_sync(kAll, own.outputs, lanes),
                    .max_output_tiles = __shfl_xor_sync(kAll, own.max_output_tiles, lanes),
                    .max_tile_cost = __shfl_xor_sync(kAll, own.max_tile_cost, lanes),
                    .min_output_cost = __shfl_xor_sync(kAll, own.min_output_cost, lanes),
                    .max_output_cost = __shfl_xor_sync(kAll, own.max_output_cost, lanes)});
  }
  before = __shfl_up_sync(kAll, end, 1);
  if (lane == 0) before = 0;
  return own;
}

/// Called by all threads; ends with a __syncthreads().
template <KernelConfig kConfig>
__device__ void build_line(const DeviceCall& call, CtaShared<kConfig>& shared) {
  const schedule::Measure measure = schedule::measure_of(call.policy.kind);
  const schedule::LineRules<DeviceLengths> rules(DeviceLengths(call.problem, &call.slots.header()), call.shape, call.cost_model,
                                                 measure);
  DeviceLine& line = *reinterpret_cast<DeviceLine*>(shared.line);
  const auto thread = static_cast<std::int32_t>(threadIdx.x);
  const std::int64_t row_sequences = rules.sequences_per_strip() * kWarpThreads;
  for (std::int32_t row = thread / kWarpThreads; row < kStripRows; row += static_cast<std::int32_t>(blockDim.x) / kWarpThreads) {
    const std::int32_t strip = row * kWarpThreads + thread % kWarpThreads;
    std::int64_t before = 0;
    schedule::LineSums sums;
    if (row * row_sequences < call.shape.batch) sums = sum_strip_row(rules.sum_strip(strip), measure, before);
    line.set_strip_begin(strip, before);
    if (thread % kWarpThreads == 0) shared.strip_rows[row] = sums;
  }
  __syncthreads();
  schedule::LineSums sums;
  for (std::int32_t row = 0; row < kStripRows; ++row) {
    if (row > 0) {
      for (std::int32_t strip = row * kWarpThreads + thread; strip < (row + 1) * kWarpThreads;
           strip += static_cast<std::int32_t>(blockDim.x)) {
        line.set_strip_begin(strip, line.strip_begin(strip) + sums.in(measure));
      }
    }
    sums = sums.plus(shared.strip_rows[row]);
  }
  if (thread == 0) {
    static_cast<schedule::LineRules<DeviceLengths>&>(line) = rules;
    line.set_sums(sums);
    shared.plan =
        schedule::make_plan(sums, call.policy, call.cost_model, call.shape.tile_tokens, static_cast<std::int32_t>(gridDim.x));
  }
  __syncthreads();
}

}  // namespace lean::cuda
