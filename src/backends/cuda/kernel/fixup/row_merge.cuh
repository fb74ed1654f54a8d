// The merge of a block of 64 rows of a latent call, 8 of them a warp's: a row's state, its place in the output and what it is multiplied
// by are worked out once, and those of all the warp's rows side by side, a row a lane; then slices are loaded, added up and stored, and
// nothing else. With 128 rows and two parts, merging slice by slice (parts.cuh) took 17 to 20 us, all of it instructions
// (docs/notebook/chunks-prefill-append.md). The bits are the same. Of the few parts of 128 rows of a chunk lane_merge.cuh is faster.
#pragma once

#include <cstdint>

#include "backends/cuda/kernel/cta_memory.cuh"
#include "backends/cuda/kernel/fixup/parts.cuh"
#include "backends/cuda/kernel/output/rows.cuh"
#include "backends/cuda/ptx/special_registers.cuh"
#include "backends/cuda/ptx/warp.cuh"

namespace lean::cuda {

template <KernelConfig kConfig>
class RowMerge {
 public:
  __device__ __forceinline__ RowMerge(const CtaShared<kConfig>& shared, const SegmentRecord& record, const MergeRun& run,
                                      const fixup::MergeShare& share)
      : shared_(shared),
        record_(record),
        parts_{run},
        slot_(run.slot),
        warp_(static_cast<std::int32_t>(ptx::thread_index()) / kWarpThreads),
        lane_(static_cast<std::int32_t>(ptx::thread_index()) % kWarpThreads) {
    const std::int32_t slices = (record.rows + kConfig.consumer_warps - 1) / kConfig.consumer_warps * kRowSlices<kConfig>;
    begin_ = share.begin(slices);
    end_ = share.end(slices);
  }

  /// Called by all consumer threads.
  __device__ __forceinline__ void run() {
    merge_states();
    end_own_row();
#pragma unroll 1
    for (std::int32_t first = begin_; exists(first); first += kAtOnce) {
      AskedSlice<kAhead, kConfig> asked[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (exists(first + i)) asked[i] = ask_for_slice<kAhead, kConfig>(parts_, row_of(first + i), slice_of(first + i));
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (exists(first + i)) finish(first + i, asked[i]);
      }
    }
  }

 private:
  static constexpr std::int32_t kWarpRows = kConfig.q_rows / kConfig.consumer_warps;
  static constexpr int kAhead = 8;             // parts of a slice
  static constexpr int kAtOnce = 16 / kAhead;  // slices: 64 registers of what is under way
  static_assert(kConfig.q_rows % kConfig.consumer_warps == 0 && kWarpRows <= kWarpThreads);

  /// The row of the block that lane `of` of the warp has, and those of the warp's slices.
  [[nodiscard]] __device__ __forceinline__ std::int32_t lane_row(std::int32_t of) const {
    return warp_ + of * kConfig.consumer_warps;
  }
  [[nodiscard]] __device__ __forceinline__ std::int32_t row_of(std::int32_t i) const { return lane_row(i / kRowSlices<kConfig>); }
  [[nodiscard]] __device__ __forceinline__ static std::int32_t slice_of(std::int32_t i) { return i % kRowSlices<kConfig>; }
  [[nodiscard]] __device__ __forceinline__ bool exists(std::int32_t i) const { return i < end_ && row_of(i) < record_.rows; }

  /// Lane j keeps the state of the warp's row j.
  __device__ __forceinline__ void merge_states() {
#pragma unroll 4
    for (std::int32_t j = begin_ / kRowSlices<kConfig>; j * kRowSlices<kConfig> < end_; ++j) {
      softmax::State part;
      if (lane_row(j) < record_.rows && lane_ < parts_.count()) part = parts_.state(lane_, lane_row(j));
      const MergedState merged = merge_states_of_lanes(part);
      if (lane_ == j) state_ = merged.whole;
    }
  }

  __device__ __forceinline__ void end_own_row() {
    const std::int32_t row = lane_row(lane_);
    const std::int32_t first = lane_ * kRowSlices<kConfig>;  // slice of the row
    if (first + kRowSlices<kConfig> <= begin_ || first >= end_ || row >= record_.rows) return;
    const bool begins_row = first >= begin_;  // else another worker stores what is the row's
    if (slot_ == nullptr) {
      row_end_ = end_row<kConfig>(shared_.call, record_, row, state_, begins_row);
      return;
    }
    if (!begins_row) return;
    const fixup::Partial to = shared_.call.fixup.slots.layout.partial.at(slot_);
    to.m[row] = state_.m;
    to.l[row] = state_.l;
  }

  /// Adds up a slice of all parts and stores it.
  __device__ __forceinline__ void finish(std::int32_t i, const AskedSlice<kAhead, kConfig>& asked) {
    const std::int32_t row = row_of(i);
    const std::int32_t dim = dim_of_lane<kConfig>(slice_of(i));
    const std::int32_t owner = i / kRowSlices<kConfig>;
    const float weight = fixup::part_weight(asked.state.m, __shfl_sync(ptx::kAllLanes, state_.m, owner));
    const LaneElements<kConfig> sum = add_slices<kAhead, kConfig>(parts_, asked, weight);
    if (slot_ != nullptr) {
      *reinterpret_cast<LaneElements<kConfig>*>(slot_ + row * kConfig.value_dim() + dim) = sum;
      return;
    }
    const auto to = __shfl_sync(ptx::kAllLanes, reinterpret_cast<unsigned long long>(row_end_.to), owner);
    const RowEnd end{.to = reinterpret_cast<std::uint16_t*>(to),
                     .scale = __shfl_sync(ptx::kAllLanes, row_end_.scale, owner),
                     .value_scale = __shfl_sync(ptx::kAllLanes, row_end_.value_scale, owner)};
    store_elements<kConfig>(shared_.call, end, output_dim<kConfig>(row, dim), sum);
  }

  const CtaShared<kConfig>& shared_;
  const SegmentRecord& record_;
  SlotParts<kConfig> parts_;
  float* slot_;
  std::int32_t warp_;
  std::int32_t lane_;
  std::int32_t begin_;  // slices of the warp's rows, [begin, end), which are the worker's
  std::int32_t end_;
  softmax::State state_;  // of the lane's row
  RowEnd row_end_;
};

}  // namespace lean::cuda
