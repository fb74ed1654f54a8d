// The merge of few parts of a block whose rows are as long as the consumers are many: a thread has the same four dims of every row. Its
// code is short, since it runs once and its instructions come from afar: merges unrolled over parts and slices took 9 to 12 us of 2 or 3
// parts of 16 rows (docs/notebook/chunks-prefill-append.md). The bits are those of fixup/ordered_merge.hpp.
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
 public:
  static constexpr std::int32_t kMostParts = 8;
  static constexpr bool kServes = kConfig.step() && kConfig.value_dim() == kConfig.consumer_threads() * kLaneDims<kConfig>;

  __device__ __forceinline__ BlockMerge(const MergeRun& run, std::int32_t record_index, const fixup::MergeShare& share)
      : memory_(cta_memory<kConfig>()), record_(memory_.shared.records[record_index]), run_(run) {
    begin_ = share.begin(record_.rows);
    end_ = share.end(record_.rows);
  }

  /// Called by all consumer threads: merges the rows that are the worker's share into the output.
  __device__ __forceinline__ void run() {
    constexpr std::int32_t kWeighed = kConfig.consumer_threads() / kMostParts;  // rows at once
#pragma unroll 1
    for (std::int32_t first = begin_; first < end_; first += kWeighed) {
      weigh(first + static_cast<std::int32_t>(ptx::thread_index()) / kMostParts);
    }
    consumer_sync<kConfig>();
#pragma unroll 1
    for (std::int32_t first = begin_; first < end_; first += kRows) add_up(first);
    consumer_sync<kConfig>();  // the next segment's weights may lie there
  }

 private:
  static constexpr int kRows = 8;  // that a thread adds up at once: as many loads are under way

  /// What lies in the exchange area meanwhile.
  struct Staged {
    float weights[kMostParts][kConfig.q_rows];
    RowEnd ends[kConfig.q_rows];
  };
  static_assert(sizeof(Staged) <= sizeof(CtaMemory<kConfig>::exchange));
  [[nodiscard]] __device__ __forceinline__ Staged& staged() const { return *reinterpret_cast<Staged*>(memory_.exchange); }

  /// Works out what a row's parts weigh and where it ends, by a lane for each part.
  __device__ __forceinline__ void weigh(std::int32_t row) {
    const auto part = static_cast<std::int32_t>(ptx::thread_index()) % kMostParts;
    softmax::State state;
    if (row < end_ && part < run_.parts) {
      const float* const m = run_.at(part) + kConfig.q_rows * kConfig.value_dim() + row;  // fixup::PartialLayout
      state = {__ldcg(m), __ldcg(m + kConfig.q_rows)};
    }
    softmax::State whole = state;
#pragma unroll
    for (int lanes = kMostParts / 2; lanes > 0; lanes /= 2) whole.m = fmaxf(whole.m, ptx::across(whole.m, lanes));
    const float weight = fixup::part_weight(state.m, whole.m);
    whole.l = state.l * weight;
#pragma unroll
    for (int lanes = kMostParts / 2; lanes > 0; lanes /= 2) whole.l = whole.l + ptx::across(whole.l, lanes);
    if (row >= end_) return;
    staged().weights[part][row] = weight;
    if (part == 0) staged().ends[row] = end_row<kConfig>(memory_.shared.call, record_, row, whole, true);
  }

  __device__ __forceinline__ void add_up(std::int32_t first) const {
    const auto dim = static_cast<std::int32_t>(ptx::thread_index()) * kLaneDims<kConfig>;
    LaneElements<kConfig> sums[kRows];
#pragma unroll 1
    for (std::int32_t part = 0; part < run_.parts; ++part) {
      const float* const from = run_.at(part) + first * kConfig.value_dim() + dim;
      LaneElements<kConfig> asked[kRows];
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        if (first + i < end_) asked[i] = load_past_l1<kConfig>(from + i * kConfig.value_dim());
      }
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const float weight = first + i < end_ ? staged().weights[part][first + i] : 0.0F;
#pragma unroll
        for (int j = 0; j < kLaneDims<kConfig>; ++j) sums[i].x[j] = fixup::add_part(sums[i].x[j], asked[i].x[j], weight);
      }
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const std::int32_t row = first + i;
      if (row < end_) store_elements<kConfig>(memory_.shared.call, staged().ends[row], output_dim<kConfig>(row, dim), sums[i]);
    }
  }

  CtaMemory<kConfig>& memory_;
  const SegmentRecord& record_;
  const MergeRun& run_;
  std::int32_t begin_;
  std::int32_t end_;
};

}  // namespace lean::cuda
