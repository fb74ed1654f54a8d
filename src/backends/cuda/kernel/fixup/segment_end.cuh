// The end of a segment: the (O, m, l) of the token warps merged into the output, or into the worker's slot where the output is
// shared.
#pragma once

#include <cstdint>

#include "backends/cuda/kernel/fixup/chunks.cuh"
#include "backends/cuda/kernel/fixup/merge.cuh"
#include "backends/cuda/kernel/fixup/parts.cuh"
#include "backends/cuda/kernel/tile/staged_parts.cuh"

namespace lean::cuda {

/// What the warps staged, merged.
template <KernelConfig kConfig>
__device__ __forceinline__ void merge_staged(std::int32_t record_place, const StagedRows<kConfig>& rows) {
  constexpr std::int32_t kSlices = kRowSlices<kConfig>;
  const CtaMemory<kConfig>& memory = cta_memory<kConfig>();
  const SegmentRecord& record = memory.shared.records[record_place];
  merge_slices<kConfig.token_warps()>(
      memory.shared, record, WarpParts<kConfig>{memory}, rows.existing(record.rows) * kSlices, [&](std::int32_t i) {
        const std::int32_t staged = i / kSlices;
        return MergedSlice{.row = rows.row(staged), .row_of_parts = staged, .slice = i % kSlices, .slot = record.slot};
      });
}

/// Likewise, by a call: it is there once, and the loop over tiles keeps its registers.
template <KernelConfig kConfig>
__device__ __noinline__ void merge_staged_turn(std::int32_t record_place, std::int32_t turn) {
  merge_staged<kConfig>(record_place, {.turn = turn});
}

/// Likewise, of a chunk: onto the worker's stack.
template <KernelConfig kConfig>
__device__ __noinline__ void push_staged(std::int32_t record_place) {
  push_chunk<kConfig>(cta_memory<kConfig>().shared.records[record_place], StagedNode<kConfig>(), StagedRows<kConfig>());
}

/// Called by all consumer threads with their warps' results of a segment. Rows that do not exist are left out.
template <KernelConfig kConfig, typename TTile>
__device__ __forceinline__ void combine_warps(CtaMemory<kConfig>& memory, std::int32_t record_place, const TTile& tile) {
  using Rows = StagedRows<kConfig>;
  static_assert(kConfig.consumer_warps * Rows::kOfWarp * kConfig.head_dim <= kConfig.exchange_floats());
#pragma unroll
  for (int turn = 0; turn < Rows::kTurns; ++turn) {
    const Rows rows{.turn = turn};
    const std::int32_t count = memory.shared.records[record_place].rows;
    if (rows.row(0) >= count) break;
    consumer_sync<kConfig>();  // what other warps use the area for is over
    tile.stage(memory, rows, count);
    consumer_sync<kConfig>();
    if constexpr (kConfig.scope == Scope::kChunkStep) {
      push_staged<kConfig>(record_place);
    } else if constexpr (Rows::kTurns == 1) {
      merge_staged<kConfig>(record_place, rows);
    } else {
      merge_staged_turn<kConfig>(record_place, turn);
    }
  }
}

template <KernelConfig kConfig>
__device__ __noinline__ void hand_over_any(std::int32_t record_place) {
  const CtaShared<kConfig>& shared = cta_memory<kConfig>().shared;
  const Asked<kConfig> asked(shared.call);
  if (!asked.chunks()) return merge_shared<kConfig>(record_place);
  const SegmentRecord& record = shared.records[record_place];
  if (!asked.merge_only()) {
    consumer_sync<kConfig>();  // the chunk's own result is there
    const StoredNode<kConfig> own{shared.call.fixup.slots.partial(record.slots.slot(record.contributor), record.chunk.place)};
    push_chunk<kConfig>(record, own, BlockRows<kConfig>());
  }
  if (record.chunk.ends_shared) merge_shared_nodes<kConfig>(record_place);
}

/// Called by all consumer threads at the end of a segment, or a chunk, whose result went to a slot; in the merging pass, for each shared
/// output.
template <KernelConfig kConfig>
__device__ __forceinline__ void hand_over(std::int32_t record_place) {
  if constexpr (!kConfig.step()) {
    hand_over_any<kConfig>(record_place);
  } else if constexpr (kConfig.scope == Scope::kChunkStep) {
    merge_shared_nodes<kConfig>(record_place);
  } else {
    merge_shared<kConfig>(record_place);
  }
}

}  // namespace lean::cuda
