// The end of a segment: the (O, m, l) of the token warps, each scaled to the rows' common maximum, summed through shared memory
// into the output, or the worker's slot where the output is shared.
#pragma once

#include <cstdint>

#include "backends/cuda/kernel/cta_output.cuh"
#include "backends/cuda/kernel/lean_tile.cuh"

namespace lean::cuda {

/// Where token warp w has its row of the dims that are exchanged.
template <KernelConfig kConfig>
[[nodiscard]] __device__ __forceinline__ float* exchanged(CtaMemory<kConfig>& memory, std::int32_t token_warp, std::int32_t row) {
  return memory.exchange + (token_warp * kConfig.q_rows + row) * kGroupDims;
}

/// One group of dims of this warp's O to the exchange area.
template <KernelConfig kConfig, bool kWhole>
__device__ __forceinline__ void exchange_group(CtaMemory<kConfig>& memory, const WarpTile<kConfig, kWhole>& tile, int group,
                                               const float (&factor)[2], std::int32_t rows) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (tile.row_of(half) >= rows) continue;
    float* to = exchanged(memory, tile.token_warp(), tile.row_of(half)) + 2 * tile.quad();
#pragma unroll
    for (int piece = 0; piece < kGroupPieces; ++piece) {
      const float2 o = tile.output(group * kGroupPieces + piece, half);
      *reinterpret_cast<float2*>(to + piece * kPieceDims) = {o.x * factor[half], o.y * factor[half]};
    }
  }
}

/// The group's sums over the token warps to where they go.
template <KernelConfig kConfig>
__device__ __forceinline__ void deliver_group(CtaMemory<kConfig>& memory, const SegmentRecord& record, int group,
                                              const fixup::Partial& to) {
  static_assert(kConfig.token_warps() * kConfig.q_rows * kGroupDims <= kExchangeFloats);
  constexpr std::int32_t kRowQuads = kGroupDims / kQuadDims;
  const CtaShared<kConfig>& shared = memory.shared;
  for (auto i = static_cast<std::int32_t>(ptx::thread_index()); i < record.rows * kRowQuads; i += kConfig.consumer_threads()) {
    const std::int32_t row = i / kRowQuads;
    const std::int32_t dim = i % kRowQuads * kQuadDims;
    if (group * kGroupDims + dim >= shared.call.problem.head_dim) continue;
    Quad total;
    float sum = 0.0F;
#pragma unroll
    for (int w = 0; w < kConfig.token_warps(); ++w) {
      total.add(*reinterpret_cast<const float4*>(exchanged(memory, w, row) + dim));
      sum += shared.warp_sum[w][row];
    }
    deliver<kConfig>(shared.call, record, to, row, group * kGroupDims + dim, total, {shared.row_max[row], sum});
  }
}

/// Called by all consumer threads with their warps' results of a segment.
template <KernelConfig kConfig, bool kWhole>
__device__ __forceinline__ void end_segment(CtaMemory<kConfig>& memory, const SegmentRecord& record,
                                            const WarpTile<kConfig, kWhole>& tile) {
  CtaShared<kConfig>& shared = memory.shared;
  const bool leads_row = tile.quad() == 0;
  if (leads_row) {
#pragma unroll
    for (int half = 0; half < 2; ++half) shared.warp_max[tile.token_warp()][tile.row_of(half)] = tile.max_of_row(half);
  }
  consumer_sync<kConfig>();
  float factor[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const std::int32_t row = tile.row_of(half);
    float largest = softmax::kNegInf;
#pragma unroll
    for (int w = 0; w < kConfig.token_warps(); ++w) largest = fmaxf(largest, shared.warp_max[w][row]);
    factor[half] = softmax::rescale_factor(tile.max_of_row(half), largest);
    if (!leads_row) continue;
    shared.warp_sum[tile.token_warp()][row] = tile.sum_of_row(half) * factor[half];
    if (tile.token_warp() == 0) shared.row_max[row] = largest;
  }
  fixup::Partial to;  // nowhere: the output
  if (!record.sole()) to = shared.call.slots.partial(record.slots.slot(record.contributor));
#pragma unroll 1
  for (int group = 0; group * kGroupDims < shared.call.problem.head_dim; ++group) {
    if (group > 0) consumer_sync<kConfig>();
#pragma unroll
    for (int g = 0; g < kConfig.head_dim / kGroupDims; ++g) {
      if (g == group) exchange_group(memory, tile, g, factor, record.rows);
    }
    consumer_sync<kConfig>();
    deliver_group(memory, record, group, to);
  }
}

}  // namespace lean::cuda
