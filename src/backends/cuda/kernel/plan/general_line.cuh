// The general work line and its plan from lengths in device memory: any policy, any rows, in 64 bits. Every CTA builds the same.
#pragma once

#include <cstdint>

#include "backends/cuda/kernel/cta_memory.cuh"
#include "backends/cuda/kernel/lines.cuh"
#include "backends/cuda/kernel/plan/line_sums.cuh"
#include "backends/cuda/kernel/plan/side_workers.cuh"
#include "backends/cuda/ptx/arch.cuh"
#include "backends/cuda/ptx/warp.cuh"

namespace lean::cuda {

/// Called by all threads. Rows of 32 strips are summed by a warp each.
template <KernelConfig kConfig>
__device__ LEAN_CUDA_CALLED void build_general_line() {
  CtaMemory<kConfig>& memory = cta_memory<kConfig>();
  const DeviceCall& call = memory.shared.call;
  CtaLine& built = memory.line();
  const schedule::Measure measure = schedule::measure_of(call.plan.policy.kind);
  const DeviceLine::Rules rules(DeviceLengths(call.problem, call.plan.queries, call.fixup.slots.header()), call.shape,
                                cost_model(kConfig), measure);
  const auto thread = static_cast<std::int32_t>(threadIdx.x);
  const auto warps = static_cast<std::int32_t>(blockDim.x) / kWarpThreads;
  const std::int64_t strip_sequences = ceil_div(call.shape.batch, DeviceLine::kStrips);
  // All strips that WorkLine::locate() looks at, sequences in them or not.
  const auto rows = static_cast<std::int32_t>(ceil_div(min_of(call.shape.batch, DeviceLine::kStrips), kWarpThreads));
  bool clamped = false;
  for (std::int32_t row = thread / kWarpThreads; row < rows; row += warps) {
    const std::int32_t strip = row * kWarpThreads + thread % kWarpThreads;
    const auto own = sum_sequences(rules, strip * strip_sequences, (strip + 1) * strip_sequences);
    clamped = clamped || own.clamped;
    built.line.set_strip_begin(strip, ptx::warp_sum_before(own.sums.in(measure)));
    const schedule::LineSums sums = sum_over_warp(own.sums);
    if (thread % kWarpThreads == 0) built.strip_rows[row] = sums;
  }
  __syncthreads();
  schedule::LineSums sums = built.strip_rows[0];
  for (std::int32_t row = 1; row < rows; ++row) {
    for (std::int32_t strip = row * kWarpThreads + thread; strip < (row + 1) * kWarpThreads; strip += warps * kWarpThreads) {
      built.line.set_strip_begin(strip, built.line.strip_begin(strip) + sums.in(measure));
    }
    sums = sums.plus(built.strip_rows[row]);
  }
  if (thread == 0) {
    static_cast<DeviceLine::Rules&>(built.line) = rules;
    built.line.set_sums(sums);
    built.plan =
        schedule::make_plan(sums, call.plan.policy, cost_model(kConfig), call.shape.tile_tokens, workers_of_launch<kConfig>(call));
  }
  if (clamped) rules.lengths().report();  // ahead of the barrier: who is done with the call looks (sticky.cuh)
  __syncthreads();
}

}  // namespace lean::cuda
