// How many of the workers are this launch's, where another of the call runs beside it (schedule/side_by_side.hpp).
#pragma once

#include <cstdint>

#include "backends/cuda/kernel/cta_memory.cuh"
#include "backends/cuda/ptx/arch.cuh"
#include "backends/cuda/ptx/grid.cuh"
#include "backends/cuda/ptx/warp.cuh"
#include "problem/sequence.hpp"
#include "schedule/side_by_side.hpp"

namespace lean::cuda {

/// By a warp, which reads the lengths of all sequences. Called where it can be: calls of one launch do without it.
template <KernelConfig kConfig>
[[nodiscard]] __device__ LEAN_CUDA_CALLED std::int32_t count_side_workers(const DeviceCall& call) {
  const schedule::SideBySide& sides = call.sides;
  const BasicLengthSource<true> lengths(call.problem);
  schedule::SideSums sums;
#pragma unroll 4
  for (std::int32_t i = lane(); i < static_cast<std::int32_t>(call.shape.batch); i += kWarpThreads) {
    sums = sums.plus(sides.sums_of(schedule::work_of(lengths(i)), call.shape.group, call.shape.reach));
  }
#pragma unroll 1
  for (int step = 1; step < ptx::kLanes; step *= 2) {
    sums = sums.plus({ptx::across(sums.blocks, step), ptx::across(sums.block_tokens, step), ptx::across(sums.chunk_keys, step),
                      ptx::across(sums.steps, step), ptx::across(sums.step_tokens, step)});
  }
  sums = sums.times(static_cast<float>(call.shape.kv_heads));
  schedule::SideChoice best;
  if (sides.has_both(sums)) {
    static_assert(schedule::SideBySide::kLooks == ptx::kLanes);
#pragma unroll 1
    for (std::int32_t look = sides.even_look(lane()), again = 0; again < 2; ++again) {
      best = best.better(sides.choice_of(sums, look));
#pragma unroll 1
      for (int step = 1; step < ptx::kLanes; step *= 2) {
        best = best.better({ptx::across(best.time, step), __shfl_xor_sync(ptx::kAllLanes, best.of_chunks, step)});
      }
      look = sides.near_look(lane(), best.of_chunks);
    }
  }
  const schedule::SideWorkers shares = sides.shares(sums, best);
  return kConfig.wide() ? shares.chunks : min_of(shares.steps, static_cast<std::int32_t>(gridDim.x));
}

/// Whether another launch of the call runs beside this one.
template <KernelConfig kConfig>
[[nodiscard]] __device__ __forceinline__ bool runs_beside(const DeviceCall& call) {
  return kConfig.may_run_beside() && (!kConfig.wide() || call.launch.beside);
}

/// Called by all threads ahead of all else where that is so. True: the CTA is one of this launch's workers.
///
/// The steps' launch reads lengths, queries, K and V without waiting for anything. It may, since a dependent starts no sooner than every
/// CTA of the kernel ahead has let it or has ended, and the chunks' CTAs, workers or not, do either only once all kernels ahead of both
/// have ended: they wait for these, or start when nothing is left to wait for. So the wait must stay ahead of start_dependents() and of
/// every return.
template <KernelConfig kConfig>
[[nodiscard]] __device__ __forceinline__ bool begin_beside(const DeviceCall& call) {
  if constexpr (kConfig.wide()) {
    if (call.launch.dependent || call.launch.follows_append) ptx::await_earlier_kernels();
    if (threadIdx.x == 0) {
      __threadfence();  // so that what those kernels wrote is seen by the steps
      ptx::start_dependents();
    }
  } else if (call.launch.dependent) {
    ptx::start_dependents();
  }
  const std::int32_t workers = count_side_workers<kConfig>(call);
  cta_memory<kConfig>().shared.workers = workers;  // all warps find the same: they run the same code
  __syncwarp();
  return static_cast<std::int32_t>(blockIdx.x) < workers;
}

/// The launch's workers, for whoever makes its plan.
template <KernelConfig kConfig>
[[nodiscard]] __device__ __forceinline__ std::int32_t workers_of_launch(const DeviceCall& call) {
  if constexpr (kConfig.may_run_beside()) {
    if (runs_beside<kConfig>(call)) return cta_memory<kConfig>().shared.workers;
  }
  return static_cast<std::int32_t>(gridDim.x);
}

/// Called by all threads at the end: the steps' launch ends no sooner than the chunks', so that whoever waits for it waits for both.
template <KernelConfig kConfig>
__device__ __forceinline__ void end_beside(const DeviceCall& call) {
  if constexpr (kConfig.may_run_beside() && !kConfig.wide()) {
    if (runs_beside<kConfig>(call) && blockIdx.x == 0 && threadIdx.x == 0) ptx::await_earlier_kernels();
  }
}

}  // namespace lean::cuda
