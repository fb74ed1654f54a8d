// The end of a segment: the (O, m, l) of the token warps merged into the output, or into the worker's slot where the output is
// shared.
#pragma once

#include <cstdint>

#include "backends/cuda/kernel/cta_parts.cuh"
#include "backends/cuda/kernel/lean_tile.cuh"

namespace lean::cuda {

/// Called by all consumer threads with their warps' results of a segment. Half of a matrix product's rows at a time, which are
/// all there are of a decode step's; a half without rows is left out.
template <KernelConfig kConfig, bool kWhole>
__device__ __forceinline__ void combine_warps(CtaMemory<kConfig>& memory, std::int32_t record_place,
                                              const WarpTile<kConfig, kWhole>& tile) {
  constexpr std::int32_t kHalfRows = kMmaRows / 2;
  StagedRows rows{.parts = kConfig.token_warps(), .count = kConfig.row_warps() * kHalfRows, .of_sixteens = true};
  static_assert(kConfig.consumer_warps * kHalfRows * kConfig.head_dim <= kExchangeFloats);
  const SegmentRecord& record = memory.shared.records[record_place];
  consumer_sync<kConfig>();  // what other warps use the area for is over
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    rows.first = half * kHalfRows;
    if (rows.first >= record.rows) break;
    tile.stage(memory, rows, half);
    merge_parts<kConfig>(rows, record_place, record.slot);
  }
}

}  // namespace lean::cuda
