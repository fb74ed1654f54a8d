// The merge of few parts of a latent block, whose rows are long: a thread has the same four dims of several rows. Its code is short, since
// it runs once and its instructions come from afar: merges unrolled over parts and slices took 9 to 12 us of 2 or 3 parts of 16 rows, and
// of 4 parts of 64 (docs/notebook/chunks-prefill-append.md). The bits are those of fixup/ordered_merge.hpp.
#pragma once

#include <cstdint>

#include "backends/cuda/kernel/cta_memory.cuh"
#include "backends/cuda/kernel/output/row_slice.cuh"
#include "backends/cuda/kernel/output/rows.cuh"
#include "backends/cuda/kernel/segment_record.cuh"
#include "backends/cuda/ptx/special_registers.cuh"
#include "backends/cuda/ptx/warp.cuh"
#include "fixup/joint_merge.hpp"
#include "fixup/ordered_merge.hpp"

namespace lean::cuda {

template <KernelConfig kConfig>
class BlockMerge {
  static constexpr std::int32_t kThreadDims = kConfig.consumer_threads() * kLaneDims<kConfig>;  // of all consumer threads
  static constexpr std::int32_t kSideBySide = kThreadDims / kConfig.value_dim();                // rows

 public:
  static constexpr std::int32_t kMostParts = 8;
  static constexpr bool kServes = kConfig.latent() && kThreadDims % kConfig.value_dim() == 0;

  __device__ __forceinline__ BlockMerge(const CtaShared<kConfig>& shared, std::int32_t record_index, const MergeRun& run,
                                        const fixup::MergeShare& share)
      : shared_(shared), record_(shared.records[record_index]), run_(run) {
    const std::int32_t place = static_cast<std::int32_t>(ptx::thread_index()) * kLaneDims<kConfig>;
    dim_ = place % kConfig.value_dim();
    begin_ = share.begin(record_.rows) + place / kConfig.value_dim();
    end_ = share.end(record_.rows);
  }

  /// Called by all consumer threads: merges the rows that are the worker's share into the output.
  __device__ __forceinline__ void run() const {
#pragma unroll 1
    for (std::int32_t first = begin_; first < end_; first += kRows * kSideBySide) {
      const Weighed weighed = weigh(first);
      add_up(first, weighed);
    }
  }

 private:
  static constexpr int kRows = 8;   // that a thread adds up at once
  static constexpr int kParts = 2;  // whose elements of all these rows are under way at once
  static constexpr int kPartLanes = kWarpThreads / kRows;
  static constexpr int kLaneParts = kMostParts / kPartLanes;
  static_assert(kLaneParts == 2 && kPartLanes % kParts == 0);

  /// A lane's share of what a warp knows of its rows: lane r of every kRows ends row r, and has of it what every kPartLanes-th part weighs,
  /// from the lane's own on.
  struct Weighed {
    float weights[kLaneParts];
    RowEnd end;
  };

  [[nodiscard]] __device__ __forceinline__ Weighed weigh(std::int32_t first) const {
    const auto lane = static_cast<std::int32_t>(ptx::thread_index()) % kWarpThreads;
    const std::int32_t row = min(first + lane % kRows * kSideBySide, end_ - 1);
    softmax::State parts[kLaneParts];
    softmax::State whole;
#pragma unroll
    for (int i = 0; i < kLaneParts; ++i) {
      const std::int32_t part = lane / kRows + i * kPartLanes;
      if (part < run_.parts) {
        const float* const m = run_.at(part) + kConfig.q_rows * kConfig.value_dim() + row;  // fixup::PartialLayout
        parts[i] = {__ldcg(m), __ldcg(m + kConfig.q_rows)};
      }
      whole.m = fmaxf(whole.m, parts[i].m);
    }
#pragma unroll
    for (int lanes = kWarpThreads / 2; lanes >= kRows; lanes /= 2) whole.m = fmaxf(whole.m, ptx::across(whole.m, lanes));
    Weighed weighed;
#pragma unroll
    for (int i = 0; i < kLaneParts; ++i) {
      weighed.weights[i] = fixup::part_weight(parts[i].m, whole.m);
      const float weighs = __fmul_rn(parts[i].l, weighed.weights[i]);  // rounded, as where lanes have a part each
      whole.l = i == 0 ? weighs : whole.l + weighs;
    }
#pragma unroll
    for (int lanes = kWarpThreads / 2; lanes >= kRows; lanes /= 2) whole.l = whole.l + ptx::across(whole.l, lanes);
    const bool leads = dim_ == lane * kLaneDims<kConfig> && lane < kRows && first + lane * kSideBySide < end_;
    weighed.end = end_row<kConfig>(shared_.call, record_, row, whole, leads);
    return weighed;
  }

  __device__ __forceinline__ void add_up(std::int32_t first, const Weighed& weighed) const {
    LaneElements<kConfig> sums[kRows];
#pragma unroll 1
    for (std::int32_t part = 0; part < run_.parts; part += kParts) {
      LaneElements<kConfig> asked[kParts][kRows];
#pragma unroll
      for (int i = 0; i < kParts; ++i) {
        const float* const from = run_.at(min(part + i, run_.parts - 1)) + first * kConfig.value_dim() + dim_;
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          if (first + r * kSideBySide < end_) asked[i][r] = load_past_l1<kConfig>(from + r * kThreadDims);
        }
      }
      const float weights = part < kPartLanes ? weighed.weights[0] : weighed.weights[1];
#pragma unroll
      for (int i = 0; i < kParts; ++i) {
        if (part + i == run_.parts) break;
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          const float weight = __shfl_sync(ptx::kAllLanes, weights, (part + i) % kPartLanes * kRows + r);
#pragma unroll
          for (int j = 0; j < kLaneDims<kConfig>; ++j) sums[r].x[j] = fixup::add_part(sums[r].x[j], asked[i][r].x[j], weight);
        }
      }
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const std::int32_t row = first + r * kSideBySide;
      const auto to = __shfl_sync(ptx::kAllLanes, reinterpret_cast<unsigned long long>(weighed.end.to), r);
      RowEnd end{.to = reinterpret_cast<std::uint16_t*>(to), .scale = __shfl_sync(ptx::kAllLanes, weighed.end.scale, r)};
      if constexpr (kConfig.scaled()) end.value_scale = __shfl_sync(ptx::kAllLanes, weighed.end.value_scale, r);
      if (row < end_) store_elements<kConfig>(shared_.call, end, output_dim<kConfig>(row, dim_), sums[r]);
    }
  }

  const CtaShared<kConfig>& shared_;
  const SegmentRecord& record_;
  const MergeRun& run_;
  std::int32_t dim_;    // the thread's first
  std::int32_t begin_;  // its first row
  std::int32_t end_;
};

}  // namespace lean::cuda
