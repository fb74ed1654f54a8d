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

/// Where four elements of a row are kept among the row's, staged or in a slot. The twist keeps warps free of bank conflicts when
/// they stage theirs. Its own inverse.
[[nodiscard]] __device__ __forceinline__ std::int32_t twisted_quad(std::int32_t row, std::int32_t quad) {
  return quad ^ (2 * (row & 3));
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
    softmax::State state;
    if (lane < rows.parts) state = {shared.parts.m[place], shared.parts.l[place]};
    const float largest = ptx::warp_max(state.m);
    const float weight = softmax::rescale_factor(state.m, largest);
    if (lane < rows.parts) shared.parts.weights[place] = weight;
    const softmax::State whole{largest, ptx::warp_sum(state.l * weight)};
    if (lane != 0) continue;
    if (slot != nullptr) {
      const fixup::Partial to = shared.call.slots.layout.partial.at(slot);
      to.m[row] = whole.m;
      to.l[row] = whole.l;
    } else {
      shared.parts.ends[staged] = end_row<kConfig>(shared.call, record, row, whole);
    }
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
  const std::int32_t quads = rows.count * kRowQuads<kConfig>;  // of a part
#pragma unroll 1
  for (auto i = static_cast<std::int32_t>(ptx::thread_index()); i < quads; i += kConfig.consumer_threads()) {
    const std::int32_t staged = i / kRowQuads<kConfig>;
    const std::int32_t row = rows.row(staged);
    if (row >= record.rows) continue;
    const auto* four = reinterpret_cast<const float4*>(memory.exchange) + i;
    const float* weight = shared.parts.weights + staged;
    Quad total;
#pragma unroll 4
    for (std::int32_t part = 0; part < rows.parts; ++part) {
      total.add(*four, *weight);
      four += quads;
      weight += rows.count;
    }
    const std::int32_t quad = i % kRowQuads<kConfig>;
    if (slot != nullptr) {
      reinterpret_cast<float4*>(slot)[row * kRowQuads<kConfig> + quad] = {total.x[0], total.x[1], total.x[2], total.x[3]};
    } else {
      store_quad<kConfig>(shared.call, shared.parts.ends[staged], twisted_quad(row, quad) * kQuadDims, total);
    }
  }
  consumer_sync<kConfig>();
}

}  // namespace lean::cuda
