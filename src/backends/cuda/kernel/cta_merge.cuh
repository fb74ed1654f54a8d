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
  __device__ __forceinline__ void merge(const Run& run, const fixup::Partial& to) {
    const Places places = places_of(run);
    const std::int32_t rows_at_once = most_rows_at_once(run.count);
#pragma unroll 1
    for (std::int32_t first_row = 0; first_row < record_.rows; first_row += rows_at_once) {
      const std::int32_t rows = min(record_.rows - first_row, rows_at_once);
      const std::int32_t quads = rows * kRowQuads;
      stage(places, run.count, first_row * kRowQuads, quads);
      weigh(places, run.count, first_row, rows);
      ptx::await_async_copies();
      consumer_sync<kConfig>();
#pragma unroll 1
      for (std::int32_t i = thread_; i < quads; i += kThreads) {
        if (!exists(i)) continue;
        const std::int32_t row = i / kRowQuads;
        Quad total;
#pragma unroll 4
        for (std::int32_t c = 0; c < run.count; ++c) {
          total.add(reinterpret_cast<const float4*>(staged_)[c * quads + i], shared_.weights[row * run.count + c]);
        }
        deliver<kConfig>(call_, record_, to, first_row + row, i % kRowQuads * kQuadDims, total,
                         {shared_.row_max[row], shared_.row_sum[row]});
      }
      consumer_sync<kConfig>();
    }
  }

  /// One at least: a run has kMaxOneLevel partials at most (kMaxWorkers, and FlashDecoding's limit of splits, see to that).
  [[nodiscard]] __device__ __forceinline__ std::int32_t most_rows_at_once(std::int32_t count) const {
    constexpr std::int32_t kWeights = sizeof(shared_.weights) / sizeof(float);
    static_assert(fixup::kMaxOneLevel <= kWeights && fixup::kMaxOneLevel * kConfig.head_dim <= kExchangeFloats);
    const std::int32_t staged = quotient(kExchangeFloats / kConfig.head_dim, count);
    return min(staged, quotient(kWeights, count));
  }

  /// O of every partial, `quads` quads from `first` on, to the staging area: all loads at once, past the L1.
  __device__ __forceinline__ void stage(const Places& places, std::int32_t count, std::int32_t first, std::int32_t quads) {
    const std::uint32_t to = ptx::shared_address(staged_);
#pragma unroll 1
    for (std::int32_t c = 0; c < count; ++c) {
      const float* from = places.at(c) + first * kQuadDims;
      for (std::int32_t i = thread_; i < quads; i += kThreads) {
        if (exists(i)) ptx::async_copy_16(to + static_cast<std::uint32_t>(c * quads + i) * sizeof(float4), from + i * kQuadDims);
      }
    }
  }

  /// A warp a row: the row's (m, l) over all partials, and each partial's weight, exp2(m - row's m). A lane has one partial, rarely
  /// more.
  __device__ __forceinline__ void weigh(const Places& places, std::int32_t count, std::int32_t first_row, std::int32_t rows) {
    const std::int32_t lane = thread_ % kWarpThreads;
    const std::int32_t m_offset = kConfig.q_rows * kConfig.head_dim + first_row;  // fixup::PartialLayout
#pragma unroll 1
    for (std::int32_t row = thread_ / kWarpThreads; row < rows; row += kThreads / kWarpThreads) {
      const auto state_at = [&](std::int32_t c) -> softmax::State {
        if (c >= count) return {};
        const float* m = places.at(c) + m_offset + row;
        return {__ldcg(m), __ldcg(m + kConfig.q_rows)};
      };
      const softmax::State own = state_at(lane);
      float largest = own.m;
      for (std::int32_t c = lane + kWarpThreads; c < count; c += kWarpThreads) largest = fmaxf(largest, state_at(c).m);
#pragma unroll
      for (int lanes = 1; lanes < kWarpThreads; lanes *= 2) largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFFU, largest, lanes));
      float sum = own.l * weigh_one(own, largest, row, lane, count);
      for (std::int32_t c = lane + kWarpThreads; c < count; c += kWarpThreads) {
        const softmax::State other = state_at(c);
        sum = fmaf(other.l, weigh_one(other, largest, row, c, count), sum);
      }
#pragma unroll
      for (int lanes = 1; lanes < kWarpThreads; lanes *= 2) sum += __shfl_xor_sync(0xFFFFFFFFU, sum, lanes);
      if (lane != 0) continue;
      shared_.row_max[row] = largest;
      shared_.row_sum[row] = sum;
    }
  }

  __device__ __forceinline__ float weigh_one(softmax::State state, float largest, std::int32_t row, std::int32_t c,
                                             std::int32_t count) {
    const float weight = softmax::rescale_factor(state.m, largest);
    if (c < count) shared_.weights[row * count + c] = weight;
    return weight;
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
