// The end of a segment: the (O, m, l) of the token warps merged into the output, or into the worker's slot where the output is
// shared.
#pragma once

#include <cstdint>

#include "backends/cuda/kernel/fixup/chunks.cuh"
#include "backends/cuda/kernel/fixup/merge.cuh"
#include "backends/cuda/kernel/fixup/parts.cuh"
#include "backends/cuda/kernel/tile/staged_parts.cuh"
#include "backends/cuda/ptx/arch.cuh"

namespace lean::cuda {

/// Merges what the warps staged.
template <KernelConfig kConfig>
__device__ __forceinline__ void merge_staged(std::int32_t record_index, const StagedRows<kConfig>& rows) {
  constexpr std::int32_t kSlices = kRowSlices<kConfig>;
  const CtaMemory<kConfig>& memory = cta_memory<kConfig>();
  const SegmentRecord& record = memory.shared.records[record_index];
  const WarpParts<kConfig> parts{memory};
  const std::int32_t count = rows.existing(record.rows) * kSlices;
  const auto place_of = [&](std::int32_t i) {
    const std::int32_t staged = i / kSlices;
    return MergedSlice{.row = rows.row(staged), .row_of_parts = staged, .slice = i % kSlices, .slot = record.slot};
  };
  if constexpr (kConfig.step() && kConfig.q_rows == kMmaRows) {
    merge_staged_by_twos<kConfig>(memory.shared, record, parts, count, place_of);
  } else {
    merge_slices<kConfig.token_warps()>(memory.shared, record, parts, count, place_of);
  }
}

/// merge_staged() as a function that is called: it is there once, and the loop over tiles keeps its registers.
template <KernelConfig kConfig>
__device__ LEAN_CUDA_CALLED void merge_staged_round(std::int32_t record_index, std::int32_t round) {
  merge_staged<kConfig>(record_index, {.round = round});
}

/// Merges what the warps staged of a chunk onto the worker's stack.
template <KernelConfig kConfig>
__device__ __noinline__ void push_staged(std::int32_t record_index) {
  push_chunk<kConfig>(cta_memory<kConfig>().shared.records[record_index], StagedNode<kConfig>(), StagedRows<kConfig>());
}

/// Called by all consumer threads with their warps' results of a segment. Rows that do not exist are left out.
template <KernelConfig kConfig, typename TTile>
__device__ __forceinline__ void combine_warps(CtaMemory<kConfig>& memory, std::int32_t record_index, const TTile& tile) {
  using Rows = StagedRows<kConfig>;
  static_assert(kConfig.consumer_warps * Rows::kOfWarp * kConfig.value_dim() <= kConfig.exchange_floats());
#pragma unroll
  for (int round = 0; round < Rows::kRounds; ++round) {
    const Rows rows{.round = round};
    const std::int32_t count = memory.shared.records[record_index].rows;
    if (rows.row(0) >= count) break;
    consumer_sync<kConfig>();  // what other warps use the area for is over
    tile.stage(memory, rows, count);
    consumer_sync<kConfig>();
    if constexpr (kConfig.chunks_only()) {
      push_staged<kConfig>(record_index);
    } else if constexpr (Rows::kRounds == 1) {
      merge_staged<kConfig>(record_index, rows);
    } else {
      merge_staged_round<kConfig>(record_index, round);
    }
  }
}

template <KernelConfig kConfig>
__device__ __noinline__ void hand_over_any(std::int32_t record_index) {
  const CtaShared<kConfig>& shared = cta_memory<kConfig>().shared;
  const Asked<kConfig> asked(shared.call);
  if (!asked.chunks()) return merge_shared<kConfig>(record_index);
  const SegmentRecord& record = shared.records[record_index];
  if (!asked.merge_only()) {
    consumer_sync<kConfig>();  // the chunk's own result is there
    const StoredNode<kConfig> own{shared.call.fixup.slots.partial(record.slots.slot(record.contributor), record.chunk.place)};
    push_chunk<kConfig>(record, own, BlockRows<kConfig>());
  }
  if (record.chunk.ends_shared) merge_shared_nodes<kConfig>(record_index);
}

/// Called by all consumer threads at the end of a segment, or a chunk, whose result went to a slot; in the merging pass, for each
/// shared output.
template <KernelConfig kConfig>
__device__ __forceinline__ void hand_over(std::int32_t record_index) {
  if constexpr (!kConfig.step()) {
    hand_over_any<kConfig>(record_index);
  } else if constexpr (kConfig.chunks_only()) {
    merge_shared_nodes<kConfig>(record_index);
  } else {
    merge_shared<kConfig>(record_index);
  }
}

}  // namespace lean::cuda
