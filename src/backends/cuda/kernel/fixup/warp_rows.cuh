// WarpRows: the rows of a block that a warp merges where a worker merges a share of them, and how they end: what both merges of many rows
// have in common (row_merge.cuh, lane_merge.cuh).
#pragma once

#include <cstdint>

#include "backends/cuda/kernel/cta_memory.cuh"
#include "backends/cuda/kernel/output/row_slice.cuh"
#include "backends/cuda/kernel/output/rows.cuh"
#include "backends/cuda/ptx/special_registers.cuh"
#include "backends/cuda/ptx/warp.cuh"
#include "fixup/joint_merge.hpp"

namespace lean::cuda {

template <KernelConfig kConfig>
class WarpRows {
 protected:
  /// `slot`: where the merged rows go; null: to the output. `share`: which of the block's rows, or slices of them, are the worker's.
  __device__ __forceinline__ WarpRows(const CtaShared<kConfig>& shared, const SegmentRecord& record, float* slot,
                                      const fixup::MergeShare& share)
      : shared_(shared),
        record_(record),
        slot_(slot),
        warp_(static_cast<std::int32_t>(ptx::thread_index()) / kWarpThreads),
        lane_(static_cast<std::int32_t>(ptx::thread_index()) % kWarpThreads) {
    const std::int32_t slices = (record.rows + kConfig.consumer_warps - 1) / kConfig.consumer_warps * kRowSlices<kConfig>;
    begin_ = share.begin(slices);
    end_ = share.end(slices);
  }

  static constexpr std::int32_t kWarpRows = kConfig.q_rows / kConfig.consumer_warps;
  static_assert(kWarpRows * kConfig.consumer_warps == kConfig.q_rows && kWarpRows <= kWarpThreads);

  /// The row of the block that is the warp's `own`-th.
  [[nodiscard]] __device__ __forceinline__ std::int32_t block_row(std::int32_t own) const {
    return warp_ + own * kConfig.consumer_warps;
  }
  /// Of slice i of the warp's rows: the row, and which slice of it; and whether it is the worker's.
  [[nodiscard]] __device__ __forceinline__ std::int32_t row_of(std::int32_t i) const { return block_row(i / kRowSlices<kConfig>); }
  [[nodiscard]] __device__ __forceinline__ static std::int32_t slice_of(std::int32_t i) { return i % kRowSlices<kConfig>; }
  [[nodiscard]] __device__ __forceinline__ bool exists(std::int32_t i) const { return i < end_ && row_of(i) < record_.rows; }

  /// Where a slice begins in a part.
  [[nodiscard]] __device__ __forceinline__ std::int32_t place_of(std::int32_t i) const {
    return row_of(i) * kConfig.value_dim() + slice_of(i) * kSliceDims<kConfig>;
  }

  /// By the lane that has the state of the warp's `own`-th row: works out where the row ends, or stores its state.
  __device__ __forceinline__ void end_own_row(std::int32_t own) {
    const bool begins_row = own * kRowSlices<kConfig> >= begin_;  // else another worker stores what is the row's
    const std::int32_t row = block_row(own);
    if (slot_ == nullptr) {
      row_end_ = end_row<kConfig>(shared_.call, record_, row, state_, begins_row);
    } else if (begins_row) {
      const fixup::Partial to = shared_.call.fixup.slots.layout.partial.at(slot_);
      to.m[row] = state_.m;
      to.l[row] = state_.l;
    }
  }

  /// Stores a slice whose row lane i / kRowSlices has ended.
  __device__ __forceinline__ void store(std::int32_t i, const LaneElements<kConfig>& sum) const {
    const std::int32_t dim = dim_of_lane<kConfig>(slice_of(i));
    if (slot_ != nullptr) {
      *reinterpret_cast<LaneElements<kConfig>*>(slot_ + dim_of_lane<kConfig>(0) + place_of(i)) = sum;
      return;
    }
    const std::int32_t owner = i / kRowSlices<kConfig>;
    const auto to = __shfl_sync(ptx::kAllLanes, reinterpret_cast<unsigned long long>(row_end_.to), owner);
    RowEnd end{.to = reinterpret_cast<std::uint16_t*>(to), .scale = __shfl_sync(ptx::kAllLanes, row_end_.scale, owner)};
    if constexpr (kConfig.scaled()) end.value_scale = __shfl_sync(ptx::kAllLanes, row_end_.value_scale, owner);
    store_elements<kConfig>(shared_.call, end, output_dim<kConfig>(block_row(owner), dim), sum);
  }

  const CtaShared<kConfig>& shared_;
  const SegmentRecord& record_;
  float* slot_;
  std::int32_t warp_;
  std::int32_t lane_;
  std::int32_t begin_;  // slices of the warp's rows, [begin, end), which are the worker's
  std::int32_t end_;
  softmax::State state_;  // of the lane's row
  RowEnd row_end_;
};

}  // namespace lean::cuda
