// The end of a segment of many rows: a warp holds all tokens of its rows, so nothing is merged among warps, and rows go from
// registers to the output, or to the worker's slot where the output is shared.
#pragma once

#include <cstdint>

#include "backends/cuda/kernel/cta_memory.cuh"
#include "backends/cuda/kernel/fixup/merge.cuh"
#include "backends/cuda/kernel/output/rows.cuh"
#include "backends/cuda/kernel/tile/staged_parts.cuh"
#include "backends/cuda/kernel/tile/wide_tile.cuh"
#include "backends/cuda/kernel/worker_track.cuh"
#include "backends/cuda/ptx/mma.cuh"
#include "problem/preconditions.hpp"

namespace lean::cuda {

/// Stores a lane's part of a row into the worker's slot, as rows of partials lie.
template <KernelConfig kConfig>
__device__ __forceinline__ void store_row(const DeviceCall& call, const SegmentRecord& record, const WideTile<kConfig>& tile,
                                          int half) {
  const std::int32_t row = tile.row_of(half);
  const fixup::Partial to = call.fixup.slots.layout.partial.at(record.slot);
#pragma unroll
  for (int column = 0; column < tile.kColumns; ++column) {
    const std::int32_t dim = tile.dim_of(column);
    const std::int32_t place = swizzled_vector<kConfig>(row, dim / kVectorDims) * kVectorDims + dim % kVectorDims;
    *reinterpret_cast<float2*>(to.o + row * kConfig.value_dim() + place) = tile.pair(column, half);
  }
  if (!tile.leads_row()) return;
  to.m[row] = tile.state(half).m;
  to.l[row] = tile.state(half).l;
}

template <KernelConfig kConfig>
__device__ __forceinline__ void output_row(const DeviceCall& call, const SegmentRecord& record, const WideTile<kConfig>& tile,
                                           int half) {
  const RowEnd end = end_row<kConfig>(call, record, tile.row_of(half), tile.state(half), tile.leads_row());
#pragma unroll
  for (int column = 0; column < tile.kColumns; ++column) {
    if (kConfig.fills_rows() && column * kAccumulatorDims >= value_dim_of(call.problem)) break;
    std::uint16_t* const to = end.to + tile.dim_of(column);
    const float2 pair = tile.pair(column, half);
    const std::uint32_t bits = ptx::pack<kConfig.dtype>(pair.x * end.scale, pair.y * end.scale);
    if (call.output.vector_output) {
      *reinterpret_cast<std::uint32_t*>(to) = bits;
    } else {
      to[0] = static_cast<std::uint16_t>(bits);
      to[1] = static_cast<std::uint16_t>(bits >> 16);
    }
  }
}

/// Called by all consumer threads with what they hold of a segment. Rows that do not exist are left out.
template <KernelConfig kConfig>
__device__ __forceinline__ void deliver(const DeviceCall& call, std::int32_t record_index, const WideTile<kConfig>& tile) {
  const SegmentRecord& record = cta_memory<kConfig>().shared.records[record_index];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (tile.row_of(half) >= record.rows) continue;
    record.slot != nullptr ? store_row(call, record, tile, half) : output_row(call, record, tile, half);
  }
  note_stored<kConfig>(record_index);
  if (record.slot != nullptr) merge_shared<kConfig>(record_index);
}

}  // namespace lean::cuda
