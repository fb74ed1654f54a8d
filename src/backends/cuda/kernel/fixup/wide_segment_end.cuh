// The end of a segment of many rows: a warp holds all tokens of its rows, so nothing is merged among warps, and rows go from
// registers to the worker's slot where the output is shared, and else to the output by way of shared memory. Every instruction of it
// counts, since there are as many again before it runs the next time and it comes from afar anew: unrolled for both rows of a lane,
// an end took 3.6 us (bench/results/experiments/h200-wide-timeline.jsonl).
#pragma once

#include <cstdint>

#include "backends/cuda/kernel/cta_memory.cuh"
#include "backends/cuda/kernel/fixup/merge.cuh"
#include "backends/cuda/kernel/output/rows.cuh"
#include "backends/cuda/kernel/staged_queries.cuh"
#include "backends/cuda/kernel/tile/staged_parts.cuh"
#include "backends/cuda/kernel/tile/wide_tile.cuh"
#include "backends/cuda/kernel/worker_track.cuh"
#include "backends/cuda/ptx/barrier.cuh"
#include "backends/cuda/ptx/mma.cuh"
#include "backends/cuda/ptx/shared.cuh"
#include "backends/cuda/ptx/special_registers.cuh"
#include "backends/cuda/ptx/warp.cuh"
#include "backends/cuda/ptx/warpgroup.cuh"
#include "backends/cuda/wide_layout.hpp"
#include "problem/preconditions.hpp"

namespace lean::cuda {

/// Stores what a lane has of its two rows into the worker's slot, as rows of partials lie: swizzled among eight vectors, so that the
/// places of four columns are those of all, some of these on.
template <KernelConfig kConfig>
__device__ __forceinline__ void store_rows(const DeviceCall& call, const SegmentRecord& record, const WideTile<kConfig>& tile) {
  static_assert(kAccumulatorDims == 2 * kVectorDims && WideTile<kConfig>::kColumns % 4 == 0 && kMmaRows / 2 % 4 == 0);
  const std::int32_t row = tile.row_of(0);  // and half a product's rows below it
  const fixup::Partial to = call.fixup.slots.layout.partial.at(record.slot);
  float* near[4];
#pragma unroll
  for (int column = 0; column < 4; ++column) {
    const std::int32_t dim = tile.dim_of(column);
    near[column] =
        to.o + row * kConfig.value_dim() + swizzled_vector<kConfig>(row, dim / kVectorDims) * kVectorDims + dim % kVectorDims;
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (row + half * kMmaRows / 2 >= record.rows) continue;
#pragma unroll
    for (int column = 0; column < tile.kColumns; ++column) {
      float* const there = near[column % 4] + (column / 4 * 4) * kAccumulatorDims + half * (kMmaRows / 2) * kConfig.value_dim();
      *reinterpret_cast<float2*>(there) = tile.pair(column, half);
    }
    if (!tile.leads_row()) continue;
    to.m[row + half * kMmaRows / 2] = tile.state(half).m;
    to.l[row + half * kMmaRows / 2] = tile.state(half).l;
  }
}

/// Writes a warp's rows to the output by way of the place of their queries, which nobody reads any more: a lane works out where one of
/// the 16 ends, all lanes store its neighbouring elements, and there is one copy of either.
template <KernelConfig kConfig>
__device__ __forceinline__ void output_rows(const DeviceCall& call, const SegmentRecord& record, const WideTile<kConfig>& tile,
                                            std::uint32_t staged) {
  static_assert(kConfig.summed_dims() <= kConfig.head_dim && WideTile<kConfig>::kColumns % 2 == 0);
  const auto thread = static_cast<std::int32_t>(ptx::thread_index());
  const std::int32_t lane = thread % kWarpThreads;
  const std::int32_t warp_row = thread / kWarpThreads * kMmaRows;  // the first of the warp's
  const std::int32_t own = lane % kMmaRows;
  const bool lower = own >= kMmaRows / 2;  // its state is one of half 1, which its quad's lanes hold
  const std::int32_t holder = own % (kMmaRows / 2) * 4;
  softmax::State state[2] = {tile.state(0), tile.state(1)};
#pragma unroll
  for (softmax::State& of_half : state) {
    of_half.m = __shfl_sync(ptx::kAllLanes, of_half.m, holder);
    of_half.l = __shfl_sync(ptx::kAllLanes, of_half.l, holder);
  }
  const std::int32_t rows = record.rows - warp_row;  // of this warp, that exist; 0 and fewer: none
  const RowEnd end = end_row<kConfig>(call, record, warp_row + min(own, max(rows - 1, 0)), lower ? state[1] : state[0],
                                      lane < min(rows, kMmaRows));
  const float scale[2] = {__shfl_sync(ptx::kAllLanes, end.scale, lane / 4),
                          __shfl_sync(ptx::kAllLanes, end.scale, lane / 4 + kMmaRows / 2)};
  float value_scale[2];  // by itself (RowEnd)
  if constexpr (kConfig.scaled()) {
    value_scale[0] = __shfl_sync(ptx::kAllLanes, end.value_scale, lane / 4);
    value_scale[1] = __shfl_sync(ptx::kAllLanes, end.value_scale, lane / 4 + kMmaRows / 2);
  }
  ptx::named_barrier(kGroupBarrier + static_cast<std::uint32_t>(thread) / ptx::kWarpgroupThreads, ptx::kWarpgroupThreads);
#pragma unroll
  for (int column = 0; column < tile.kColumns; column += 2) {
    std::uint32_t matrices[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float2 pair = tile.pair(column + i / 2, i % 2);
      pair = {pair.x * scale[i % 2], pair.y * scale[i % 2]};
      if constexpr (kConfig.scaled()) pair = {pair.x * value_scale[i % 2], pair.y * value_scale[i % 2]};
      matrices[i] = pack_output<kConfig>(call, pair.x, pair.y);
    }
    ptx::store_matrices(query_address<kConfig>(staged, warp_row + own, column + lane / kMmaRows), matrices);
  }
  __syncwarp();
  // Neighbouring lanes take neighbouring pieces of a row. Of numbers that are not negative quotients are shifts.
  constexpr std::uint32_t kPieces = kConfig.summed_dims() / kQueryPieceDims;  // of a row
  static_assert(kMmaRows * kPieces % kWarpThreads == 0);
  const std::uint32_t own_piece = ptx::thread_index() % kWarpThreads;
  static_assert(kMmaRows % wide::kAtomRows == 0);
  const std::uint32_t staged_here = staged + static_cast<std::uint32_t>(warp_row * wide::kColumnBytes);  // the warp's rows
  const auto store_pieces = [&](const auto& store) {
#pragma unroll
    for (std::uint32_t first = 0; first < kMmaRows * kPieces; first += kWarpThreads) {
      const auto row = static_cast<std::int32_t>((first + own_piece) / kPieces);
      const auto piece = static_cast<std::int32_t>((first + own_piece) % kPieces);
      auto* const to =
          reinterpret_cast<std::uint16_t*>(__shfl_sync(ptx::kAllLanes, reinterpret_cast<unsigned long long>(end.to), row));
      const uint4 elements = ptx::load_shared_16(query_address<kConfig>(staged_here, row, piece));
      if (row < rows && piece * kQueryPieceDims < value_dim_of(call.problem)) store(to + piece * kQueryPieceDims, elements);
    }
  };
  if (call.output.piece_output) {
    store_pieces([](std::uint16_t* to, const uint4& elements) { *reinterpret_cast<uint4*>(to) = elements; });
  } else {
    store_pieces([&](std::uint16_t* to, const uint4& elements) {
      store_four(call, to, {elements.x, elements.y});
      store_four(call, to + kVectorDims, {elements.z, elements.w});
    });
  }
}

/// What a lane has of 8 dims of a row, as the output has it.
template <KernelConfig kConfig>
[[nodiscard]] __device__ __forceinline__ std::uint32_t output_pair(const DeviceCall& call, const RowEnd& end,
                                                                   const WideTile<kConfig>& tile, int column, int half) {
  float2 pair = tile.pair(column, half);
  pair = {pair.x * end.scale, pair.y * end.scale};
  if constexpr (kConfig.scaled()) pair = {pair.x * end.value_scale, pair.y * end.value_scale};
  return pack_output<kConfig>(call, pair.x, pair.y);
}

/// Stores a row of the output from registers, 16 bytes a lane. Of every 8 dims each lane of a quad has two neighbouring elements; of four
/// times as many it gets 8 neighbouring ones from the others', by two exchanges with one of them. `stores`: the row exists.
template <KernelConfig kConfig>
__device__ __forceinline__ void output_row_in_pieces(const DeviceCall& call, const RowEnd& end, const WideTile<kConfig>& tile,
                                                     int half, bool stores) {
  static_assert(WideTile<kConfig>::kColumns % 4 == 0 && kAccumulatorDims == kPieceBytes / sizeof(std::uint16_t));
  const auto in_quad = static_cast<std::int32_t>(ptx::thread_index()) % 4;
  const bool odd = in_quad % 2 != 0;
  const bool upper = in_quad >= 2;
  std::uint16_t* const to = end.to + tile.dim_of(in_quad) - 2 * in_quad;  // of the lane's column among four
#pragma unroll
  for (int column = 0; column < tile.kColumns; column += 4) {
    std::uint32_t own[4];  // of four columns
#pragma unroll
    for (int i = 0; i < 4; ++i) own[i] = output_pair(call, end, tile, column + i, half);
    std::uint32_t of_two[2][2];  // of the two lanes' half of a quad, in order: of column 0 or 1, and of column 2 or 3
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const std::uint32_t other = __shfl_xor_sync(ptx::kAllLanes, odd ? own[2 * i] : own[2 * i + 1], 1);
      of_two[i][0] = odd ? other : own[2 * i];
      of_two[i][1] = odd ? own[2 * i + 1] : other;
    }
    std::uint32_t others[2];  // of the other half, of this lane's column
#pragma unroll
    for (int i = 0; i < 2; ++i) others[i] = __shfl_xor_sync(ptx::kAllLanes, upper ? of_two[0][i] : of_two[1][i], 2);
    const uint4 piece =
        upper ? uint4{others[0], others[1], of_two[1][0], of_two[1][1]} : uint4{of_two[0][0], of_two[0][1], others[0], others[1]};
    if (stores) *reinterpret_cast<uint4*>(to + column * kAccumulatorDims) = piece;
  }
}

template <KernelConfig kConfig>
__device__ __forceinline__ void output_row(const DeviceCall& call, const RowEnd& end, const WideTile<kConfig>& tile, int half) {
#pragma unroll
  for (int column = 0; column < tile.kColumns; ++column) {
    if (kConfig.fills_rows() && column * kAccumulatorDims >= value_dim_of(call.problem)) break;
    std::uint16_t* const to = end.to + tile.dim_of(column);
    const std::uint32_t bits = output_pair(call, end, tile, column, half);
    if (call.output.vector_output) {
      *reinterpret_cast<std::uint32_t*>(to) = bits;
    } else {
      to[0] = static_cast<std::uint16_t>(bits);
      to[1] = static_cast<std::uint16_t>(bits >> 16);
    }
  }
}

/// Called by all consumer threads with what they hold of a segment. Rows that do not exist are left out. Where queries have one place
/// they have made room for others already, so rows go straight from registers.
template <KernelConfig kConfig>
__device__ __forceinline__ void deliver(const DeviceCall& call, std::int32_t record_index, const WideTile<kConfig>& tile) {
  CtaMemory<kConfig>& memory = cta_memory<kConfig>();
  const SegmentRecord& record = memory.shared.records[record_index];
  if (record.slot != nullptr) {
    store_rows(call, record, tile);
  } else if constexpr (kConfig.query_places() == 1) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const bool exists = tile.row_of(half) < record.rows;
      const RowEnd end =
          end_row<kConfig>(call, record, min(tile.row_of(half), record.rows - 1), tile.state(half), exists && tile.leads_row());
      if (call.output.piece_output && !kConfig.fills_rows()) {
        output_row_in_pieces(call, end, tile, half, exists);
      } else if (exists) {
        output_row(call, end, tile, half);
      }
    }
  } else {
    output_rows(call, record, tile, ptx::shared_address(memory.queries_of(record_index)));
  }
  note_stored<kConfig>(record_index);
  if (record.slot != nullptr) merge_shared<kConfig>(record_index);
}

}  // namespace lean::cuda
