// The end of a segment, by all consumer warps together: the warps' results into one, that one into the output or a slot, and
// the merge of an output's slots by the worker that arrives last (docs/fixup.md).
#pragma once

#include <cuda/atomic>

#include <cstdint>

#include "backends/cuda/kernel/cta_shared.cuh"
#include "backends/cuda/kernel/lean_tile.cuh"
#include "backends/cuda/ptx/barrier.cuh"
#include "fixup/arrival.hpp"
#include "fixup/partial.hpp"
#include "output/rows.hpp"

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

/// Four neighbouring elements of O, the unit of every exchange.
struct Quad {
  float x[4] = {};
};

[[nodiscard]] __device__ __forceinline__ Quad to_quad(float4 v) { return {{v.x, v.y, v.z, v.w}}; }
[[nodiscard]] __device__ __forceinline__ float4 to_float4(const Quad& q) { return {q.x[0], q.x[1], q.x[2], q.x[3]}; }

template <KernelConfig kConfig>
class CtaFixup {
 public:
  __device__ CtaFixup(const DeviceCall& call, CtaShared<kConfig>& shared, float* exchange)
      : call_(call), shared_(shared), exchange_(exchange), thread_(static_cast<std::int32_t>(threadIdx.x)) {}

  /// Called by all consumer threads with the warps' results of a segment.
  template <bool kWhole>
  __device__ void end_segment(const SegmentRecord& record, const WarpTile<kConfig, kWhole>& tile) {
    share_states(tile);
    if (record.sole()) return combine(record, tile, {});
    combine(record, tile, call_.slots.partial(record.slots.slot(record.contributor)));
    if (call_.fixup == Fixup::kLastArriver) merge_if_last(record);
    if (call_.fixup == Fixup::kHostBlock) host_or_peer(record);
  }

  /// Fixup::kTwoKernels' second launch: the same merges as merge_if_last, by one worker.
  __device__ __noinline__ void merge_all(const SegmentRecord& record) {
    const fixup::Grouping grouping = fixup::grouping_of(record.contributors);
    for (std::int32_t group = 0; group < grouping.groups; ++group) {
      merge_group(record, grouping, group);
      sync();
    }
    if (grouping.groups > 1) merge_groups(record, grouping);
  }

 private:
  static constexpr std::int32_t kThreads = kConfig.consumer_threads();

  __device__ static void sync() { ptx::named_barrier(1, kThreads); }

  // ---- the warps of this worker -----------------------------------------------------------------------------------

  /// Every warp's (m, l) to the others.
  template <bool kWhole>
  __device__ void share_states(const WarpTile<kConfig, kWhole>& tile) {
    if (tile.quad() == 0) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        shared_.warp_max[tile.token_warp()][tile.row_of(half)] = tile.max_of_row(half);
        shared_.warp_sum[tile.token_warp()][tile.row_of(half)] = tile.sum_of_row(half);
      }
    }
    sync();
    for (std::int32_t row = thread_; row < kConfig.q_rows; row += kThreads) {
      softmax::State state;
      for (int w = 0; w < kConfig.token_warps(); ++w) {
        state = softmax::merge(state, {shared_.warp_max[w][row], shared_.warp_sum[w][row]});
      }
      shared_.row_max[row] = state.m;
      shared_.row_sum[row] = state.l;
    }
    // combine() waits before row_max is read by others
  }

  /// Sums O over the token warps, each scaled to the rows' common maximum, into `to`, or the output where that is empty.
  template <bool kWhole>
  __device__ void combine(const SegmentRecord& record, const WarpTile<kConfig, kWhole>& tile, const fixup::Partial& to) {
    const std::int32_t rows = record.rows;
    const std::int32_t dims = call_.problem.head_dim;
    const std::int32_t capacity = kExchangeBytes / static_cast<std::int32_t>(sizeof(float)) / (kConfig.token_warps() * rows);
    const std::int32_t pass_dims = min(capacity / kPieceDims * kPieceDims, dims);
    float factor[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float largest = softmax::kNegInf;
#pragma unroll
      for (int w = 0; w < kConfig.token_warps(); ++w) largest = fmaxf(largest, shared_.warp_max[w][tile.row_of(half)]);
      factor[half] = softmax::rescale_factor(tile.max_of_row(half), largest);
    }
    for (std::int32_t first = 0; first < dims; first += pass_dims) {
      const std::int32_t width = min(pass_dims, dims - first);
      const std::int32_t pitch = width;
      if (first > 0) sync();
#pragma unroll
      for (int piece = 0; piece < kConfig.head_dim / kPieceDims; ++piece) {
        if (piece * kPieceDims < first || piece * kPieceDims >= first + width) continue;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const std::int32_t row = tile.row_of(half);
          if (row >= rows) continue;
          const float2 o = tile.output(piece, half);
          auto* to = exchange_ + (tile.token_warp() * rows + row) * pitch + piece * kPieceDims - first + 2 * tile.quad();
          *reinterpret_cast<float2*>(to) = {o.x * factor[half], o.y * factor[half]};
        }
      }
      sync();
      const std::int32_t row_quads = width / 4;
      for (std::int32_t i = thread_; i < rows * row_quads; i += kThreads) {
        const std::int32_t row = i / row_quads;
        const std::int32_t dim = (i - row * row_quads) * 4;
        Quad total;
#pragma unroll
        for (int w = 0; w < kConfig.token_warps(); ++w) {
          const Quad part = to_quad(*reinterpret_cast<const float4*>(exchange_ + (w * rows + row) * pitch + dim));
#pragma unroll
          for (int e = 0; e < 4; ++e) total.x[e] += part.x[e];
        }
        deliver(record, to, row, first + dim, total, {shared_.row_max[row], shared_.row_sum[row]});
      }
    }
    sync();
  }

  // ---- slots ------------------------------------------------------------------------------------------------------

  /// Four elements and their row's state to where they go.
  __device__ void deliver(const SegmentRecord& record, const fixup::Partial& to, std::int32_t row, std::int32_t dim, const Quad& o,
                          softmax::State state) const {
    if (to.o == nullptr) return write_output(record, row, dim, o, state);
    *reinterpret_cast<float4*>(to.o_row(row) + dim) = to_float4(o);
    if (dim != 0) return;
    to.m[row] = state.m;
    to.l[row] = state.l;
  }

  __device__ __noinline__ void merge_if_last(const SegmentRecord& record) {
    const fixup::Grouping grouping = fixup::grouping_of(record.contributors);
    const std::int32_t group = record.contributor / grouping.size;
    const std::int32_t members = grouping.end(group, record.contributors) - grouping.begin(group);
    if (!arrive(call_.slots.counter(record.slots.slot(grouping.begin(group))), members)) return;
    merge_group(record, grouping, group);
    if (grouping.groups == 1) return;
    sync();
    if (!arrive(call_.slots.second_counter(record.slots.slot(0)), grouping.groups)) return;
    merge_groups(record, grouping);
  }

  /// The paper's fix-up: peers raise a flag; the host takes their partials in, in order, as they come. Its own is in slot 0.
  __device__ __noinline__ void host_or_peer(const SegmentRecord& record) {
    if (record.contributor != 0) {
      if (thread_ == 0) fixup::signal<DeviceAtomic>(call_.slots.counter(record.slots.slot(record.contributor)));
      return;
    }
    for (std::int32_t c = 1 + thread_; c < record.contributors; c += kThreads) {
      fixup::wait_for<DeviceAtomic>(call_.slots.counter(record.slots.slot(c)));
    }
    sync();
    merge_all(record);
  }

  /// Counts the worker in; true for all its threads when it is the last. Their stores come before, by the barrier in front.
  __device__ bool arrive(fixup::Counter& counter, std::int32_t contributors) {
    if (thread_ == 0) shared_.arrived_last = fixup::arrive_last<DeviceAtomic>(counter, contributors) ? 1 : 0;
    sync();
    return shared_.arrived_last != 0;
  }

  /// Partials to merge: those of contributors begin, begin + step, ...; of the second bank where groups were merged.
  struct MergeRun {
    std::int32_t begin = 0;
    std::int32_t step = 1;
    std::int32_t count = 0;
    bool of_groups = false;
  };

  /// Contributors of one group, in index order, into the output, or into the group's place when there are several groups.
  __device__ void merge_group(const SegmentRecord& record, const fixup::Grouping& grouping, std::int32_t group) {
    const std::int32_t begin = grouping.begin(group);
    const std::int32_t count = grouping.end(group, record.contributors) - begin;
    fixup::Partial to;
    if (grouping.groups > 1) to = call_.slots.group_partial(record.slots.slot(begin));
    merge(record, {.begin = begin, .count = count}, to);
  }

  __device__ void merge_groups(const SegmentRecord& record, const fixup::Grouping& grouping) {
    merge(record, {.step = grouping.size, .count = grouping.groups, .of_groups = true}, {});
  }

  /// Partials in index order; loads go ahead of the merges, kAhead at a time, past the L1.
  __device__ __noinline__ void merge(const SegmentRecord& record, const MergeRun& run, const fixup::Partial& to) {
    constexpr int kAhead = 8;
    const schedule::SlotMap slots = record.slots;
    const std::int64_t slot_bytes = call_.slots.layout.slot_bytes();
    const std::byte* bank = call_.slots.scratch + (run.of_groups ? call_.slots.layout.slots * slot_bytes : 0);
    const std::int32_t row_quads = call_.problem.head_dim / 4;
    for (std::int32_t i = thread_; i < record.rows * row_quads; i += kThreads) {
      const std::int32_t row = i / row_quads;
      const std::int32_t dim = (i - row * row_quads) * 4;
      softmax::State state;
      Quad total;
#pragma unroll 1
      for (std::int32_t c0 = 0; c0 < run.count; c0 += kAhead) {
        Quad part[kAhead];
        softmax::State part_state[kAhead];
#pragma unroll
        for (int c = 0; c < kAhead; ++c) {
          if (c0 + c >= run.count) continue;
          const std::byte* slot = bank + slots.slot(run.begin + (c0 + c) * run.step) * slot_bytes;
          const fixup::Partial from = call_.slots.layout.partial.at(const_cast<float*>(reinterpret_cast<const float*>(slot)));
          part[c] = to_quad(__ldcg(reinterpret_cast<const float4*>(from.o_row(row) + dim)));
          part_state[c] = {__ldcg(from.m + row), __ldcg(from.l + row)};
        }
#pragma unroll
        for (int c = 0; c < kAhead; ++c) {
          if (c0 + c >= run.count) continue;
          const softmax::MergeStep step = softmax::merge_step(state, part_state[c]);
          state = step.merged;
#pragma unroll
          for (int e = 0; e < 4; ++e) total.x[e] = softmax::merge_element(step, total.x[e], part[c].x[e]);
        }
      }
      deliver(record, to, row, dim, total, state);
    }
  }

  // ---- output -----------------------------------------------------------------------------------------------------

  __device__ __noinline__ void write_output(const SegmentRecord& record, std::int32_t row, std::int32_t dim, const Quad& o,
                                            softmax::State state) const {
    const Problem& problem = call_.problem;
    const HeadPosition kv_head{record.sequence, record.kv_head};
    const std::int64_t packed = std::int64_t{record.row_block} * kConfig.q_rows + row;
    const softmax::Finished finished = softmax::finalize(state);
    auto* to = static_cast<std::uint16_t*>(problem.o.data) + output::row_offset(problem, record.lengths, kv_head, packed) + dim;
    const std::uint32_t low = ptx::pack<kConfig.dtype>(o.x[0] * finished.scale, o.x[1] * finished.scale);
    const std::uint32_t high = ptx::pack<kConfig.dtype>(o.x[2] * finished.scale, o.x[3] * finished.scale);
    if (call_.vector_output) {
      *reinterpret_cast<uint2*>(to) = {low, high};
    } else {
      to[0] = static_cast<std::uint16_t>(low);
      to[1] = static_cast<std::uint16_t>(low >> 16);
      to[2] = static_cast<std::uint16_t>(high);
      to[3] = static_cast<std::uint16_t>(high >> 16);
    }
    if (dim == 0) output::write_lse(problem, record.lengths, kv_head, packed, finished.lse);
  }

  const DeviceCall& call_;
  CtaShared<kConfig>& shared_;
  float* exchange_;
  std::int32_t thread_;
};

}  // namespace lean::cuda
