// The merge of an output's slots by the worker that arrives last, or the paper's host block (docs/fixup.md). By all consumer
// threads together, once a segment at most: a function that is called, so that the loop over tiles keeps its registers.
#pragma once

#include <cuda/atomic>

#include <cstdint>

#include "backends/cuda/kernel/cta_output.cuh"
#include "backends/cuda/ptx/copy.cuh"
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
  __device__ CtaMerge(CtaMemory<kConfig>& memory, const SegmentRecord& record)
      : shared_(memory.shared),
        call_(memory.shared.call),
        record_(record),
        staged_(memory.exchange),
        thread_(static_cast<std::int32_t>(threadIdx.x)) {}

  /// Everything this worker has to merge of the record's output, once its own partial is stored. One loop over groups and levels,
  /// so that the merge itself is there once.
  __device__ __forceinline__ void run() {
    consumer_sync<kConfig>();
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
      merge(run, ends ? fixup::Partial{} : call_.slots.group_partial(slot));
      if (ends) return;
      consumer_sync<kConfig>();
      of_groups = !alone || ++group == grouping.groups;
    }
  }

 private:
  static constexpr std::int32_t kThreads = kConfig.consumer_threads();
  static constexpr std::int32_t kRowQuads = kConfig.head_dim / kQuadDims;  // of a slot's row, which is as wide as the variant

  [[nodiscard]] __device__ __forceinline__ bool exists(std::int32_t quad) const {
    return quad % kRowQuads * kQuadDims < call_.problem.head_dim;
  }

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

  /// Each partial scaled to the rows' common maximum, added up in index order, as many rows at a time as the exchange area takes.
  /// One trip to memory: all of the partials is asked for before any of it is used.
  __device__ __forceinline__ void merge(const Run& run, const fixup::Partial& to) {
    const Places places = places_of(run);
    const std::int32_t rows_at_once = most_rows_at_once(run.count);
#pragma unroll 1
    for (std::int32_t first_row = 0; first_row < record_.rows; first_row += rows_at_once) {
      const std::int32_t rows = min(record_.rows - first_row, rows_at_once);
      stage_accumulators(places, run.count, first_row, rows);
      stage_states(places, run.count, first_row, rows);
      ptx::await_async_copies();
      consumer_sync<kConfig>();
#pragma unroll 1
      for (std::int32_t i = thread_; i < rows * kRowQuads; i += kThreads) {
        if (exists(i)) merge_quad(i, run.count, first_row, rows, to);
      }
      consumer_sync<kConfig>();
    }
  }

  /// One at least: a run has kMaxOneLevel partials at most (kMaxWorkers, and FlashDecoding's limit of splits, see to that).
  [[nodiscard]] __device__ __forceinline__ static std::int32_t most_rows_at_once(std::int32_t count) {
    static_assert(fixup::kMaxOneLevel <= CtaShared<kConfig>::kStates && fixup::kMaxOneLevel * kConfig.head_dim <= kExchangeFloats);
    return quotient(min(kExchangeFloats / kConfig.head_dim, CtaShared<kConfig>::kStates), count);
  }

  /// O of the rows of every partial to the staging area, past the L1.
  __device__ __forceinline__ void stage_accumulators(const Places& places, std::int32_t count, std::int32_t first_row,
                                                     std::int32_t rows) {
    const std::uint32_t to = ptx::shared_address(staged_);
    const std::int32_t quads = rows * kRowQuads;
#pragma unroll 1
    for (std::int32_t c = 0; c < count; ++c) {
      const float* from = places.at(c) + first_row * kConfig.head_dim;
      for (std::int32_t i = thread_; i < quads; i += kThreads) {
        if (exists(i))
          ptx::async_copy_16(to + static_cast<std::uint32_t>(c * quads + i) * sizeof(float4), from + i * kQuadDims, true);
      }
    }
  }

  /// (m, l) of the rows of every partial, a pair a thread.
  __device__ __forceinline__ void stage_states(const Places& places, std::int32_t count, std::int32_t first_row,
                                               std::int32_t rows) {
#pragma unroll 1
    for (std::int32_t i = thread_; i < count * rows; i += kThreads) {
      const std::int32_t c = quotient(i, rows);
      const float* m = places.at(c) + kConfig.q_rows * kConfig.head_dim + first_row + (i - c * rows);  // fixup::PartialLayout
      shared_.states[i] = {__ldcg(m), __ldcg(m + kConfig.q_rows)};
    }
  }

  __device__ __forceinline__ void merge_quad(std::int32_t i, std::int32_t count, std::int32_t first_row, std::int32_t rows,
                                             const fixup::Partial& to) {
    const std::int32_t row = i / kRowQuads;
    softmax::State whole;
#pragma unroll 4
    for (std::int32_t c = 0; c < count; ++c) whole.m = fmaxf(whole.m, shared_.states[c * rows + row].m);
    Quad total;
#pragma unroll 4
    for (std::int32_t c = 0; c < count; ++c) {
      const softmax::State part = shared_.states[c * rows + row];
      const float weight = softmax::rescale_factor(part.m, whole.m);
      whole.l = fmaf(part.l, weight, whole.l);
      total.add(reinterpret_cast<const float4*>(staged_)[c * rows * kRowQuads + i], weight);
    }
    deliver<kConfig>(call_, record_, to, first_row + row, i % kRowQuads * kQuadDims, total, whole);
  }

  CtaShared<kConfig>& shared_;
  const DeviceCall& call_;
  const SegmentRecord& record_;
  float* staged_;  // O of the partials, [partial][row][dim]
  std::int32_t thread_;
};

/// Called by all consumer threads at the end of a segment whose output is shared.
template <KernelConfig kConfig>
__device__ __noinline__ void merge_shared(std::int32_t record) {
  CtaMemory<kConfig>& memory = cta_memory<kConfig>();
  CtaMerge<kConfig>(memory, memory.shared.records[record]).run();
}

}  // namespace lean::cuda
