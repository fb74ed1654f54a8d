// The merge of an output's slots by the worker that arrives last, or the paper's host block (docs/fixup.md). By all consumer
// threads together, once a segment at most: a function that is called, so that the loop over tiles keeps its registers.
#pragma once

#include <cuda/atomic>

#include <cstdint>

#include "backends/cuda/kernel/cta_parts.cuh"
#include "backends/cuda/kernel/merge_run.cuh"
#include "fixup/arrival.hpp"

namespace lean::cuda {

/// fixup::arrive_last's atomic on device memory.
struct DeviceAtomic {
  using Ref = ::cuda::atomic_ref<fixup::Counter, ::cuda::thread_scope_device>;
  __device__ static fixup::Counter fetch_add_acq_rel(fixup::Counter& counter, fixup::Counter amount) {
    return Ref(counter).fetch_add(amount, ::cuda::memory_order_acq_rel);
  }
  __device__ static void store_relaxed(fixup::Counter& counter, fixup::Counter value) {
    Ref(counter).store(value, ::cuda::memory_order_relaxed);
  }
  __device__ static void store_release(fixup::Counter& counter, fixup::Counter value) {
    Ref(counter).store(value, ::cuda::memory_order_release);
  }
  __device__ static fixup::Counter load_acquire(fixup::Counter& counter) { return Ref(counter).load(::cuda::memory_order_acquire); }
  __device__ static void relax() { __nanosleep(20); }
};

/// Counts the worker in; true for all consumer threads when it is the last. Their stores come before, by the barrier in front.
template <KernelConfig kConfig>
[[nodiscard]] __device__ __forceinline__ bool arrive(const MergeRun& run) {
  CtaShared<kConfig>& shared = cta_memory<kConfig>().shared;
  if (threadIdx.x == 0) shared.arrived_last = fixup::arrive_last<DeviceAtomic>(*run.counter, run.parts) ? 1 : 0;
  consumer_sync<kConfig>();
  return shared.arrived_last != 0;
}

/// O and (m, l) of the rows of every partial to the exchange area: a row of a partial a warp. What other workers stored is not in
/// this multiprocessor's L1, which the acquire of their arrivals emptied.
template <KernelConfig kConfig>
__device__ __forceinline__ void stage_partials(CtaMemory<kConfig>& memory, const MergeRun& run, const StagedRows& rows) {
  const auto thread = static_cast<std::int32_t>(threadIdx.x);
  const std::int32_t lane = thread % kWarpThreads;
  const std::int32_t head_dim = memory.shared.call.problem.head_dim;
  const std::uint32_t exchange = ptx::shared_address(memory.exchange);
  const std::uint32_t states = ptx::shared_address(memory.shared.parts.states);
  std::int32_t part = 0;
  std::int32_t staged = thread / kWarpThreads;
#pragma unroll 1
  while (true) {
    for (; staged >= rows.count; staged -= rows.count) ++part;
    if (part >= rows.parts) return;
    const std::int32_t row = rows.first + staged;
    const float* partial = run.at(part);
#pragma unroll
    for (std::int32_t quad = lane; quad < kRowQuads<kConfig>; quad += kWarpThreads) {
      const auto place = static_cast<std::uint32_t>(staged_place<kConfig>(rows, part, staged, quad));
      if (quad * kQuadDims < head_dim) {
        ptx::async_copy_16(exchange + place * sizeof(float), partial + row * kConfig.head_dim + quad * kQuadDims, true);
      }
    }
    if (lane < 2) {  // fixup::PartialLayout: m and l lie behind O
      const auto place = static_cast<std::uint32_t>(2 * (part * rows.count + staged) + lane);
      ptx::async_copy_4(states + place * sizeof(float), partial + kConfig.q_rows * (kConfig.head_dim + lane) + row);
    }
    staged += kConfig.consumer_warps;
  }
}

/// As many rows at a time as the exchange area takes: one at least, since a run has kMaxOneLevel partials at most (kMaxWorkers, and
/// FlashDecoding's limit of splits, see to that). One trip to memory: all of the partials is asked for before any is used.
template <KernelConfig kConfig>
__device__ __noinline__ void merge_run(const MergeRun& run, std::int32_t record_place) {
  constexpr std::int32_t kStagedRows = CtaParts<kConfig>::kRows;
  static_assert(fixup::kMaxOneLevel <= kStagedRows && kStagedRows * kConfig.head_dim <= kExchangeFloats);
  CtaMemory<kConfig>& memory = cta_memory<kConfig>();
  const std::int32_t all_rows = memory.shared.records[record_place].rows;
  const std::int32_t rows_at_once = all_rows * run.parts <= kStagedRows ? all_rows : quotient(kStagedRows, run.parts);
#pragma unroll 1
  for (StagedRows rows{.parts = run.parts}; rows.first < all_rows; rows.first += rows_at_once) {
    rows.count = min(all_rows - rows.first, rows_at_once);
    stage_partials<kConfig>(memory, run, rows);
    merge_parts<kConfig>(rows, record_place, run.slot);
  }
}

/// The fix-ups in which one worker merges all groups: the paper's host, who waits for its peers, and the second of two kernels.
template <KernelConfig kConfig>
__device__ __noinline__ void merge_alone(std::int32_t record_place) {
  const CtaShared<kConfig>& shared = cta_memory<kConfig>().shared;
  const SegmentRecord& record = shared.records[record_place];
  const fixup::Slots& slots = shared.call.slots;
  if (shared.call.fixup == Fixup::kTwoKernels && shared.call.pass == Pass::kWhole) return;
  if (shared.call.fixup == Fixup::kHostBlock) {
    const auto thread = static_cast<std::int32_t>(threadIdx.x);
    if (record.contributor != 0) {
      if (thread == 0) fixup::signal<DeviceAtomic>(slots.counter(record.slots.slot(record.contributor)));
      return;
    }
    for (std::int32_t c = 1 + thread; c < record.contributors; c += kConfig.consumer_threads()) {
      fixup::wait_for<DeviceAtomic>(slots.counter(record.slots.slot(c)));
    }
    consumer_sync<kConfig>();
  }
  const fixup::Grouping grouping = fixup::grouping_of(record.contributors);
  for (std::int32_t group = 0; group < grouping.groups; ++group) {
    merge_run<kConfig>(run_of_group(slots, record.slots, record.contributors, grouping, group), record_place);
  }
  if (grouping.groups > 1) merge_run<kConfig>(run_of_groups(slots, record.slots, grouping), record_place);
}

/// Called by all consumer threads at the end of a segment whose output is shared, its own partial stored.
template <KernelConfig kConfig>
__device__ __noinline__ void merge_shared(std::int32_t record_place) {
  const CtaShared<kConfig>& shared = cta_memory<kConfig>().shared;
  if (shared.call.fixup != Fixup::kLastArriver) return merge_alone<kConfig>(record_place);
  const SegmentRecord& record = shared.records[record_place];
  if (!arrive<kConfig>(record.run)) return;
  merge_run<kConfig>(record.run, record_place);
  if (record.run.slot == nullptr) return;
  const MergeRun run = run_of_groups(shared.call.slots, record.slots, fixup::grouping_of(record.contributors));
  if (arrive<kConfig>(run)) merge_run<kConfig>(run, record_place);
}

}  // namespace lean::cuda
