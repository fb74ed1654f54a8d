// The merge of many parts of 64 rows of a latent call, 8 of them a warp's: a row's state, its place in the output and what it is multiplied
// by are worked out once, and those of all the warp's rows side by side, a row a lane; then slices are loaded, added up and stored, and
// nothing else. With 128 rows and two parts, merging slice by slice (parts.cuh) took 17 to 20 us, all of it instructions
// (docs/notebook/chunks-prefill-append.md). The bits are the same. Of the few parts of 128 rows of a chunk lane_merge.cuh is faster.
#pragma once

#include <cstdint>

#include "backends/cuda/kernel/fixup/parts.cuh"
#include "backends/cuda/kernel/fixup/warp_rows.cuh"
#include "backends/cuda/ptx/warp.cuh"
#include "fixup/ordered_merge.hpp"

namespace lean::cuda {

template <KernelConfig kConfig>
class RowMerge : WarpRows<kConfig> {
  using Rows = WarpRows<kConfig>;
  using Rows::begin_, Rows::block_row, Rows::end_, Rows::exists, Rows::lane_, Rows::record_, Rows::row_of, Rows::slice_of,
      Rows::state_;

 public:
  __device__ __forceinline__ RowMerge(const CtaShared<kConfig>& shared, const SegmentRecord& record, const MergeRun& run,
                                      const fixup::MergeShare& share)
      : Rows(shared, record, run.slot, share), parts_{run} {}

  /// Called by all consumer threads.
  __device__ __forceinline__ void run() {
    merge_states();
    if (has_own_row()) Rows::end_own_row(lane_);
#pragma unroll 1
    for (std::int32_t first = begin_; exists(first); first += kAtOnce) {
      AskedSlice<kAhead, kConfig> asked[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (exists(first + i)) asked[i] = ask_for_slice<kAhead, kConfig>(parts_, row_of(first + i), slice_of(first + i));
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (!exists(first + i)) continue;
        const std::int32_t owner = (first + i) / kRowSlices<kConfig>;
        const float weight = fixup::part_weight(asked[i].state.m, __shfl_sync(ptx::kAllLanes, state_.m, owner));
        Rows::store(first + i, add_slices(parts_, asked[i], weight));
      }
    }
  }

 private:
  static constexpr int kAhead = 8;             // parts of a slice
  static constexpr int kAtOnce = 16 / kAhead;  // slices: 64 registers of what is under way

  /// Lane j keeps the state of the warp's row j.
  __device__ __forceinline__ void merge_states() {
#pragma unroll 4
    for (std::int32_t j = begin_ / kRowSlices<kConfig>; j * kRowSlices<kConfig> < end_; ++j) {
      softmax::State part;
      if (block_row(j) < record_.rows && lane_ < parts_.count()) part = parts_.state(lane_, block_row(j));
      const MergedState merged = merge_states_of_lanes(part);
      if (lane_ == j) state_ = merged.whole;
    }
  }

  [[nodiscard]] __device__ __forceinline__ bool has_own_row() const {
    const std::int32_t first = lane_ * kRowSlices<kConfig>;  // slice of the row
    return first + kRowSlices<kConfig> > begin_ && first < end_ && block_row(lane_) < record_.rows;
  }

  SlotParts<kConfig> parts_;
};

}  // namespace lean::cuda
