// The merge of an output's slots by the worker that arrives last, or the paper's host block (docs/fixup.md). By all consumer
// threads together, once a segment at most: a function that is called, so that the loop over tiles keeps its registers.
#pragma once

#include <cuda/atomic>

#include <cstdint>

#include "backends/cuda/kernel/cta_parts.cuh"
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

template <KernelConfig kConfig>
class CtaMerge {
 public:
  __device__ CtaMerge(CtaMemory<kConfig>& memory, std::int32_t record_place)
      : memory_(memory),
        shared_(memory.shared),
        call_(memory.shared.call),
        record_place_(record_place),
        record_(memory.shared.records[record_place]),
        thread_(static_cast<std::int32_t>(threadIdx.x)) {}

  /// Everything this worker has to merge of the record's output, once its own partial is stored. One loop over groups and levels,
  /// so that the merge itself is there once.
  __device__ __forceinline__ void run() {
    if (call_.fixup == Fixup::kTwoKernels && call_.pass == Pass::kWhole) return;
    if (call_.fixup == Fixup::kHostBlock && !await_peers()) return;
    const bool alone = call_.fixup != Fixup::kLastArriver;  // one worker merges all groups
    const fixup::Grouping grouping = fixup::grouping_of(record_.contributors);
    std::int32_t group = alone || grouping.groups == 1 ? 0 : record_.contributor / grouping.size;
    bool of_groups = false;
    while (true) {
      Run run{.begin = grouping.begin(group), .count = grouping.end(group, record_.contributors) - grouping.begin(group)};
      if (of_groups) run = {.step = grouping.size, .count = grouping.groups, .of_groups = true};
      const std::int64_t slot = record_.slots.slot(run.begin);
      if (!alone && !arrive(of_groups ? call_.slots.second_counter(slot) : call_.slots.counter(slot), run.count)) return;
      const bool ends = of_groups || grouping.groups == 1;
      merge(run, ends ? nullptr : call_.slots.group_partial(slot).o);
      if (ends) return;
      of_groups = !alone || ++group == grouping.groups;
    }
  }

 private:
  static constexpr std::int32_t kThreads = kConfig.consumer_threads();

  /// Partials to merge: those of contributors begin, begin + step, ...; of the second bank where groups were merged.
  struct Run {
    std::int32_t begin = 0;
    std::int32_t step = 1;
    std::int32_t count = 0;
    bool of_groups = false;
  };

  /// Where the partials of a run lie: all after the first are a pitch apart.
  struct Places {
    const float* first;
    const float* second;
    std::int64_t pitch;  // floats

    [[nodiscard]] __device__ __forceinline__ const float* at(std::int32_t c) const {
      return c == 0 ? first : second + (c - 1) * pitch;
    }
  };

  /// The paper's fix-up: peers raise a flag; the host, for whom this returns true, waits for all of them.
  __device__ __forceinline__ bool await_peers() {
    if (record_.contributor != 0) {
      if (thread_ == 0) fixup::signal<DeviceAtomic>(call_.slots.counter(record_.slots.slot(record_.contributor)));
      return false;
    }
    for (std::int32_t c = 1 + thread_; c < record_.contributors; c += kThreads) {
      fixup::wait_for<DeviceAtomic>(call_.slots.counter(record_.slots.slot(c)));
    }
    consumer_sync<kConfig>();
    return true;
  }

  /// Counts the worker in; true for all its threads when it is the last. Their stores come before, by the barrier in front.
  __device__ __forceinline__ bool arrive(fixup::Counter& counter, std::int32_t contributors) {
    if (thread_ == 0) shared_.arrived_last = fixup::arrive_last<DeviceAtomic>(counter, contributors) ? 1 : 0;
    consumer_sync<kConfig>();
    return shared_.arrived_last != 0;
  }

  [[nodiscard]] __device__ __forceinline__ Places places_of(const Run& run) const {
    const std::int64_t slot_floats = call_.slots.layout.slot_bytes() / static_cast<std::int64_t>(sizeof(float));
    const auto* bank = reinterpret_cast<const float*>(call_.slots.scratch);
    if (run.of_groups) bank += call_.slots.layout.slots * slot_floats;
    return {.first = bank + record_.slots.slot(run.begin) * slot_floats,
            .second = bank + record_.slots.slot(run.begin + run.step) * slot_floats,
            .pitch = run.step * record_.slots.stride * slot_floats};
  }

  /// As many rows at a time as the exchange area takes. One trip to memory: all of the partials is asked for before any is used.
  __device__ __forceinline__ void merge(const Run& run, float* slot) {
    const Places places = places_of(run);
    StagedRows rows{.parts = run.count, .count = most_rows_at_once(run.count)};
    const std::int32_t rows_at_once = rows.count;
#pragma unroll 1
    for (; rows.first < record_.rows; rows.first += rows_at_once) {
      rows.count = min(record_.rows - rows.first, rows_at_once);
      stage_accumulators(places, rows);
      stage_states(places, rows);
      merge_parts<kConfig>(rows, record_place_, slot);
    }
  }

  /// One at least: a run has kMaxOneLevel partials at most (kMaxWorkers, and FlashDecoding's limit of splits, see to that).
  [[nodiscard]] __device__ __forceinline__ static std::int32_t most_rows_at_once(std::int32_t count) {
    static_assert(fixup::kMaxOneLevel <= CtaShared<kConfig>::kStates && fixup::kMaxOneLevel * kConfig.head_dim <= kExchangeFloats);
    return quotient(min(kExchangeFloats / kConfig.head_dim, CtaShared<kConfig>::kStates), count);
  }

  /// O of the rows of every partial, past the L1.
  __device__ __forceinline__ void stage_accumulators(const Places& places, const StagedRows& rows) {
    const std::uint32_t to = ptx::shared_address(memory_.exchange);
    for (std::int32_t i = thread_; i < rows.count * kRowQuads<kConfig>; i += kThreads) {
      const std::int32_t staged = i / kRowQuads<kConfig>;
      const std::int32_t quad = i % kRowQuads<kConfig>;
      if (quad * kQuadDims >= call_.problem.head_dim) continue;
#pragma unroll 4
      for (std::int32_t part = 0; part < rows.parts; ++part) {
        const auto place = static_cast<std::uint32_t>(staged_place<kConfig>(rows, part, staged, quad));
        ptx::async_copy_16(to + place * sizeof(float), places.at(part) + rows.first * kConfig.head_dim + i * kQuadDims, true);
      }
    }
  }

  /// (m, l) of the rows of every partial, a pair a thread.
  __device__ __forceinline__ void stage_states(const Places& places, const StagedRows& rows) {
#pragma unroll 1
    for (std::int32_t i = thread_; i < rows.parts * rows.count; i += kThreads) {
      const std::int32_t part = quotient(i, rows.count);
      const std::int32_t row = rows.first + i - part * rows.count;
      const float* m = places.at(part) + kConfig.q_rows * kConfig.head_dim + row;  // fixup::PartialLayout
      shared_.states[i] = {__ldcg(m), __ldcg(m + kConfig.q_rows)};
    }
  }

  CtaMemory<kConfig>& memory_;
  CtaShared<kConfig>& shared_;
  const DeviceCall& call_;
  std::int32_t record_place_;
  const SegmentRecord& record_;
  std::int32_t thread_;
};

/// Called by all consumer threads at the end of a segment whose output is shared.
template <KernelConfig kConfig>
__device__ __noinline__ void merge_shared(std::int32_t record_place) {
  CtaMerge<kConfig>(cta_memory<kConfig>(), record_place).run();
}

}  // namespace lean::cuda
