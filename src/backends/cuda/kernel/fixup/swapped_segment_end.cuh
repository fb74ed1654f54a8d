// The end of a segment of a swapped tile: every warp has some dims of all rows of the block, a lane few neighbours in either direction. So
// rows go to a slot eight dims at a time, which are a sector of memory, and to the output by way of where weights lie otherwise.
#pragma once

#include <cstdint>

#include "backends/cuda/kernel/cta_memory.cuh"
#include "backends/cuda/kernel/fixup/merge.cuh"
#include "backends/cuda/kernel/output/rows.cuh"
#include "backends/cuda/kernel/tile/staged_parts.cuh"
#include "backends/cuda/kernel/tile/swapped_tile.cuh"
#include "backends/cuda/kernel/worker_track.cuh"
#include "backends/cuda/ptx/mma.cuh"
#include "backends/cuda/ptx/shared.cuh"
#include "backends/cuda/ptx/special_registers.cuh"
#include "backends/cuda/ptx/warp.cuh"

namespace lean::cuda {

/// Stores what a lane has of its rows into the worker's slot, as rows of partials lie: swizzled among eight vectors, of which a block of
/// dims has twice as many.
template <KernelConfig kConfig>
__device__ __forceinline__ void store_rows(const DeviceCall& call, const SegmentRecord& record, const SwappedTile<kConfig>& tile) {
  using Tile = SwappedTile<kConfig>;
  static_assert(Tile::kBlockDims % (8 * kVectorDims) == 0);
  const fixup::Partial to = call.fixup.slots.layout.partial.at(record.slot);
#pragma unroll
  for (int own = 0; own < Tile::kOwnRows; ++own) {
    const std::int32_t row = tile.row_of(own);
    if (row >= record.rows) continue;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const std::int32_t dim = tile.dim_of(0, half);
      float* const first =
          to.o + row * kConfig.value_dim() + swizzled_vector<kConfig>(row, dim / kVectorDims) * kVectorDims + dim % kVectorDims;
#pragma unroll
      for (int block = 0; block < Tile::kBlocks; ++block) first[block * Tile::kBlockDims] = tile.element(block, own, half);
    }
  }
  const auto row = static_cast<std::int32_t>(ptx::thread_index());
  if (row >= record.rows) return;
  const softmax::State state = tile.state(row);
  to.m[row] = state.m;
  to.l[row] = state.l;
}

/// Writes a warp's dims of all rows to the output, 16 neighbours of a row at a time: a lane works out where a row or two end, of which it
/// stores half the neighbours.
template <KernelConfig kConfig>
__device__ __forceinline__ void output_rows(const DeviceCall& call, const SegmentRecord& record, const SwappedTile<kConfig>& tile) {
  using Tile = SwappedTile<kConfig>;
  constexpr int kEnds = kConfig.q_rows / kMmaRows;  // rows of a lane's
  const auto thread = static_cast<std::int32_t>(ptx::thread_index());
  const std::int32_t lane = thread % kWarpThreads;
  const auto row_at = [&](int i) { return lane / 2 + i * kMmaRows; };
  RowEnd ends[kEnds];
#pragma unroll
  for (int i = 0; i < kEnds; ++i) {
    const std::int32_t row = min(row_at(i), max(record.rows - 1, 0));
    ends[i] =
        end_row<kConfig>(call, record, row, tile.state(row), thread < kWarpThreads && lane % 2 == 0 && row_at(i) < record.rows);
  }
  float scale[Tile::kOwnRows];
  float value_scale[Tile::kOwnRows];
#pragma unroll
  for (int own = 0; own < Tile::kOwnRows; ++own) {
    const std::int32_t holder = tile.row_of(own) % kMmaRows * 2;
    scale[own] = __shfl_sync(ptx::kAllLanes, ends[own / 4].scale, holder);
    value_scale[own] = kConfig.scaled() ? __shfl_sync(ptx::kAllLanes, ends[own / 4].value_scale, holder) : 1.0F;
  }
#pragma unroll
  for (int block = 0; block < Tile::kBlocks; ++block) {
#pragma unroll
    for (int column = 0; column < Tile::kColumns; column += 2) {
      std::uint32_t matrices[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float pair[2];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const int own = 2 * (column + i / 2) + j;
          pair[j] = tile.element(block, own, i % 2) * scale[own];
          if constexpr (kConfig.scaled()) pair[j] *= value_scale[own];
        }
        matrices[i] = pack_output<kConfig>(call, pair[0], pair[1]);
      }
      ptx::store_matrices_transposed(tile.idle_share_at(column), matrices);
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kEnds; ++i) {
      const uint4 elements = ptx::load_shared_16(tile.idle_piece_at(row_at(i), lane % 2));
      if (row_at(i) >= record.rows) continue;
      std::uint16_t* const to =
          ends[i].to + block * Tile::kBlockDims + thread / kWarpThreads * kMmaRows + lane % 2 * (kMmaRows / 2);
      if (call.output.piece_output) {
        *reinterpret_cast<uint4*>(to) = elements;
      } else {
        store_four(call, to, {elements.x, elements.y});
        store_four(call, to + kVectorDims, {elements.z, elements.w});
      }
    }
    __syncwarp();
  }
}

/// Called by all consumer threads with what they hold of a segment. Rows that do not exist are left out.
template <KernelConfig kConfig>
__device__ __forceinline__ void deliver(const DeviceCall& call, std::int32_t record_index, const SwappedTile<kConfig>& tile) {
  const SegmentRecord& record = cta_memory<kConfig>().shared.records[record_index];
  if (record.slot != nullptr) {
    store_rows(call, record, tile);
  } else {
    output_rows(call, record, tile);
  }
  note_stored<kConfig>(record_index);
  if (record.slot != nullptr) merge_shared<kConfig>(record_index);
}

}  // namespace lean::cuda
