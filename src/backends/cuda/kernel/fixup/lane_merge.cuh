// The merge of a block of 128 rows, 16 of them a warp's. First lanes are rows: each adds up the states of its row's parts, some lanes a
// row, works out where the row ends and what it is multiplied by. Then lanes are dims: slices of rows are loaded, as many at once as
// registers hold, added up and stored, and nothing else. All of it runs once, so that what it takes is trips to memory, and
// instructions, which come from afar too: with two parts of 128 rows, warps that reduced a row's state at a time took 14 us
// (docs/notebook/chunks-prefill-append.md). O is that of fixup/ordered_merge.hpp bit for bit; sums l are added in the order of lanes.
// Of the many parts of 64 rows of a latent call row_merge.cuh is faster.
#pragma once

#include <cstdint>

#include "backends/cuda/kernel/fixup/parts.cuh"
#include "backends/cuda/kernel/fixup/warp_rows.cuh"
#include "fixup/ordered_merge.hpp"

namespace lean::cuda {

template <KernelConfig kConfig>
class LaneMerge : WarpRows<kConfig> {
  using Rows = WarpRows<kConfig>;
  using Rows::begin_, Rows::exists, Rows::kWarpRows, Rows::lane_, Rows::place_of, Rows::state_;

 public:
  __device__ __forceinline__ LaneMerge(const CtaShared<kConfig>& shared, const SegmentRecord& record, const MergeRun& run,
                                       const fixup::MergeShare& share)
      : Rows(shared, record, run.slot, share), run_(run) {}

  /// Called by all consumer threads.
  __device__ __forceinline__ void run() {
    merge_states();
    if (own_part() == 0 && has_own_row()) Rows::end_own_row(own_row());
    if (run_.parts <= kRowLanes) {
      add_up<kAsked / kRowLanes, 1>();
    } else {
      add_up<2, kAsked / kRowLanes / 2>();
    }
  }

 private:
  static constexpr std::int32_t kRowLanes = kWarpThreads / kWarpRows;  // lanes of a row: one for every kRowLanes-th part
  static constexpr std::int32_t kAsked = 16;                           // slices that a lane asks for at once: 64 registers
  static_assert(kWarpRows * kRowLanes == kWarpThreads && kRowLanes > 1);

  /// Of the warp's rows the lane's, and which of the row's lanes it is.
  [[nodiscard]] __device__ __forceinline__ std::int32_t own_row() const { return lane_ % kWarpRows; }
  [[nodiscard]] __device__ __forceinline__ std::int32_t own_part() const { return lane_ / kWarpRows; }
  [[nodiscard]] __device__ __forceinline__ bool has_own_row() const {
    const std::int32_t first = own_row() * kRowSlices<kConfig>;
    return first + kRowSlices<kConfig> > begin_ && exists(max(first, begin_));
  }

  /// Where the states of a part's rows lie (fixup::PartialLayout), of the lane's row.
  [[nodiscard]] __device__ __forceinline__ const float* state_at(std::int32_t part) const {
    return run_.at(part) + kConfig.q_rows * kConfig.value_dim() + Rows::block_row(own_row());
  }

  __device__ __forceinline__ void merge_states() {
    const bool exists = has_own_row();
#pragma unroll 4
    for (std::int32_t part = own_part(); part < run_.parts; part += kRowLanes) {
      softmax::State other;
      if (exists) {
        const float* const m = state_at(part);
        other = {__ldcg(m), __ldcg(m + kConfig.q_rows)};
      }
      if (part < kRowLanes) first_m_ = other.m;
      state_ = softmax::merge(state_, other);
    }
#pragma unroll
    for (std::int32_t lanes = kWarpRows; lanes < kWarpThreads; lanes *= 2) {
      const softmax::State other{__shfl_xor_sync(ptx::kAllLanes, state_.m, lanes),
                                 __shfl_xor_sync(ptx::kAllLanes, state_.l, lanes)};
      state_ = softmax::merge(state_, other);
    }
  }

  /// Adds up kSlices slices at a time, kRounds times kRowLanes parts of them.
  template <int kSlices, int kRounds>
  __device__ __forceinline__ void add_up() {
    constexpr int kAhead = kRounds * kRowLanes;
#pragma unroll 1
    for (std::int32_t first = begin_; exists(first); first += kSlices) {
      LaneElements<kConfig> sum[kSlices];
#pragma unroll 1
      for (std::int32_t part = 0; part < run_.parts; part += kAhead) {
        LaneElements<kConfig> asked[kSlices][kAhead];
        float weight[kRounds];
#pragma unroll
        for (int round = 0; round < kRounds; ++round) {
          const std::int32_t own = part + round * kRowLanes + own_part();
          weight[round] = softmax::kNegInf;
          if (kRounds == 1) {
            weight[round] = first_m_;
          } else if (own < run_.parts && has_own_row()) {
            weight[round] = __ldcg(state_at(own));
          }
        }
#pragma unroll
        for (int p = 0; p < kAhead; ++p) {
          const float* const from = run_.at(part + p) + dim_of_lane<kConfig>(0);
#pragma unroll
          for (int i = 0; i < kSlices; ++i) {
            if (part + p < run_.parts && exists(first + i)) asked[i][p] = load_past_l1<kConfig>(from + place_of(first + i));
          }
        }
#pragma unroll
        for (int round = 0; round < kRounds; ++round) weight[round] = fixup::part_weight(weight[round], state_.m);
#pragma unroll
        for (int i = 0; i < kSlices; ++i) {
          const std::int32_t owner = (first + i) / kRowSlices<kConfig>;
#pragma unroll
          for (int p = 0; p < kAhead; ++p) {
            const float factor = __shfl_sync(ptx::kAllLanes, weight[p / kRowLanes], owner + p % kRowLanes * kWarpRows);
#pragma unroll
            for (int j = 0; j < kLaneDims<kConfig>; ++j) sum[i].x[j] = fixup::add_part(sum[i].x[j], asked[i][p].x[j], factor);
          }
        }
      }
#pragma unroll
      for (int i = 0; i < kSlices; ++i) {
        if (exists(first + i)) Rows::store(first + i, sum[i]);
      }
    }
  }

  const MergeRun& run_;
  float first_m_ = softmax::kNegInf;  // of the first part of the lane's row
};

}  // namespace lean::cuda
