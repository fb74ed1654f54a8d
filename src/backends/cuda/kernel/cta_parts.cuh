// Parts: results of the same rows, staged side by side in the exchange area, and their merge. The warps of a CTA bring theirs at
// a segment's end, and the last arriver those of the workers it shares an output with. One function merges both: a worker that
// arrives last, which few do, has its code at hand.
#pragma once

#include <cstdint>

#include "backends/cuda/kernel/cta_output.cuh"
#include "backends/cuda/ptx/copy.cuh"
#include "backends/cuda/ptx/warp.cuh"
#include "fixup/arrival.hpp"

namespace lean::cuda {

/// Which rows of the block are staged, of each part.
struct StagedRows {
  std::int32_t parts = 1;
  std::int32_t count = 0;
  std::int32_t first = 0;    // row of the block
  bool of_sixteens = false;  // eight rows of each sixteen, as the halves of a matrix product hold them

  [[nodiscard]] __device__ __forceinline__ std::int32_t row(std::int32_t staged) const {
    return first + staged + (of_sixteens ? staged & ~7 : 0);
  }
};

template <KernelConfig kConfig>
inline constexpr std::int32_t kRowQuads = kConfig.head_dim / kQuadDims;

/// Where four elements of a staged row lie, in floats. The twist keeps warps free of bank conflicts when they stage theirs.
template <KernelConfig kConfig>
[[nodiscard]] __device__ __forceinline__ std::int32_t staged_place(const StagedRows& rows, std::int32_t part, std::int32_t staged,
                                                                   std::int32_t quad) {
  return ((part * rows.count + staged) * kRowQuads<kConfig> + (quad ^ (2 * (staged & 3)))) * kQuadDims;
}

/// The weight of each part of each row, and how the row ends: a warp a row, a lane a part.
template <KernelConfig kConfig>
__device__ __forceinline__ void weigh_parts(CtaShared<kConfig>& shared, const StagedRows& rows, const SegmentRecord& record,
                                            float* slot) {
  static_assert(fixup::kMaxOneLevel <= kWarpThreads && kConfig.token_warps() <= kWarpThreads);
  const auto thread = static_cast<std::int32_t>(ptx::thread_index());
  const std::int32_t lane = thread % kWarpThreads;
#pragma unroll 1
  for (std::int32_t staged = thread / kWarpThreads; staged < rows.count; staged += kConfig.consumer_warps) {
    const std::int32_t row = rows.row(staged);
    if (row >= record.rows) continue;
    const std::int32_t place = lane * rows.count + staged;
    softmax::State state = lane < rows.parts ? shared.parts.states[place] : softmax::State::empty();
    const float largest = ptx::warp_max(state.m);
    const float weight = softmax::rescale_factor(state.m, largest);
    const softmax::State whole{largest, ptx::warp_sum(state.l * weight)};
    if (lane < rows.parts) shared.parts.weights[place] = weight;
    if (lane == 0) shared.parts.ends[staged] = end_row<kConfig>(shared.call, record, slot, row, whole);
  }
}

/// The parts of all staged rows, each scaled to the row's largest maximum and added up in index order, into `slot`, or into the
/// output where that is null. By all consumer threads; what they staged or copied before is there, and may be overwritten after.
template <KernelConfig kConfig>
__device__ __noinline__ void merge_parts(StagedRows rows, std::int32_t record_place, float* slot) {
  CtaMemory<kConfig>& memory = cta_memory<kConfig>();
  CtaShared<kConfig>& shared = memory.shared;
  const SegmentRecord& record = shared.records[record_place];
  ptx::await_async_copies();
  consumer_sync<kConfig>();
  weigh_parts(shared, rows, record, slot);
  consumer_sync<kConfig>();
#pragma unroll 1
  for (auto i = static_cast<std::int32_t>(ptx::thread_index()); i < rows.count * kRowQuads<kConfig>;
       i += kConfig.consumer_threads()) {
    const std::int32_t staged = i / kRowQuads<kConfig>;
    const std::int32_t quad = i % kRowQuads<kConfig>;
    if (rows.row(staged) >= record.rows || quad * kQuadDims >= shared.call.problem.head_dim) continue;
    Quad total;
#pragma unroll 4
    for (std::int32_t part = 0; part < rows.parts; ++part) {
      const auto& four = *reinterpret_cast<const float4*>(memory.exchange + staged_place<kConfig>(rows, part, staged, quad));
      total.add(four, shared.parts.weights[part * rows.count + staged]);
    }
    store_quad<kConfig>(shared.call, shared.parts.ends[staged], slot == nullptr, quad * kQuadDims, total);
  }
  consumer_sync<kConfig>();
}

}  // namespace lean::cuda
