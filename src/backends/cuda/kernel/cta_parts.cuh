// Parts: results (O, m, l) of the same rows, and their merge. The warps of a CTA bring theirs at a segment's end, in shared memory;
// the workers that share an output bring theirs in slots. A warp merges 64 dims of a row: a lane knows a part's state, and every lane
// adds up its two elements of all parts, which it asks for before it uses one.
#pragma once

#include <cstdint>

#include "backends/cuda/kernel/cta_output.cuh"
#include "backends/cuda/ptx/warp.cuh"
#include "fixup/arrival.hpp"

namespace lean::cuda {

/// What a warp merges at once of a row.
inline constexpr std::int32_t kPairDims = 2;
inline constexpr std::int32_t kSliceDims = kWarpThreads * kPairDims;
template <KernelConfig kConfig>
inline constexpr std::int32_t kRowSlices = kConfig.head_dim / kSliceDims;

/// Where four elements of a row are kept among the row's, staged or in a slot. The twist keeps warps free of bank conflicts when
/// they stage theirs. Its own inverse.
[[nodiscard]] __device__ __forceinline__ std::int32_t twisted_quad(std::int32_t row, std::int32_t quad) {
  return quad ^ (2 * (row & 3));
}

/// Which rows of the block the warps stage at once: all, or in turn each half of a matrix product's.
template <KernelConfig kConfig>
struct StagedRows {
  static constexpr std::int32_t kOfWarp = kConfig.staged_rows();
  static constexpr std::int32_t kTurns = kMmaRows / kOfWarp;
  static constexpr std::int32_t kCount = kConfig.row_warps() * kOfWarp;

  std::int32_t turn = 0;

  /// Among the block's.
  [[nodiscard]] __device__ __forceinline__ std::int32_t row(std::int32_t staged) const {
    return turn * kOfWarp + staged + (kTurns - 1) * (staged & ~(kOfWarp - 1));
  }
};

/// What the token warps staged.
template <KernelConfig kConfig>
struct WarpParts {
  static constexpr std::int32_t kRows = StagedRows<kConfig>::kCount;  // of a part

  const CtaMemory<kConfig>& memory;

  [[nodiscard]] __device__ __forceinline__ static constexpr std::int32_t count() { return kConfig.token_warps(); }
  [[nodiscard]] __device__ __forceinline__ softmax::State state(std::int32_t part, std::int32_t row) const {
    return {memory.shared.parts.m[part * kRows + row], memory.shared.parts.l[part * kRows + row]};
  }
  /// Where the first part has elements of a row, and the part after `part`, which has them at `at`.
  [[nodiscard]] __device__ __forceinline__ const float* elements(std::int32_t row, std::int32_t dim) const {
    return memory.exchange + row * kConfig.head_dim + dim;
  }
  [[nodiscard]] __device__ __forceinline__ const float* next(const float* at, std::int32_t) const {
    return at + kRows * kConfig.head_dim;
  }
  [[nodiscard]] __device__ __forceinline__ static float2 load(const float* at) { return *reinterpret_cast<const float2*>(at); }
};

/// The partials of a run, past the L1: other workers stored them.
template <KernelConfig kConfig>
struct SlotParts {
  const MergeRun& run;

  [[nodiscard]] __device__ __forceinline__ std::int32_t count() const { return run.parts; }
  [[nodiscard]] __device__ __forceinline__ softmax::State state(std::int32_t part, std::int32_t row) const {
    const float* m = run.at(part) + kConfig.q_rows * kConfig.head_dim + row;  // fixup::PartialLayout
    return {__ldcg(m), __ldcg(m + kConfig.q_rows)};
  }
  [[nodiscard]] __device__ __forceinline__ const float* elements(std::int32_t row, std::int32_t dim) const {
    return run.first + row * kConfig.head_dim + dim;
  }
  [[nodiscard]] __device__ __forceinline__ const float* next(const float* at, std::int32_t part) const {
    return at + (part == 0 ? run.second - run.first : run.pitch);
  }
  [[nodiscard]] __device__ __forceinline__ static float2 load(const float* at) {
    return __ldcg(reinterpret_cast<const float2*>(at));
  }
};

/// Where a warp's merge goes: a slice of a row of the block.
struct MergedSlice {
  std::int32_t row = 0;
  std::int32_t row_of_parts = 0;  // the same, among those that the parts hold
  std::int32_t slice = 0;
  float* slot = nullptr;  // null: to the output
};

/// A slice of a row: a lane's two elements, and the row's state, which all lanes know.
struct RowSlice {
  float2 o = {0.0F, 0.0F};
  softmax::State state;
};

/// A lane's first dim of a slice, as rows are kept: twisted.
[[nodiscard]] __device__ __forceinline__ std::int32_t dim_of_lane(std::int32_t slice) {
  return slice * kSliceDims + static_cast<std::int32_t>(ptx::thread_index() % kWarpThreads) * kPairDims;
}

/// A slice of a row of all parts, each scaled to the row's largest maximum and added up in order. By a warp; kAhead: parts asked for
/// at once.
template <int kAhead, KernelConfig kConfig, typename TParts>
[[nodiscard]] __device__ __forceinline__ RowSlice gather_slice(const TParts& parts, std::int32_t row, std::int32_t slice) {
  static_assert(fixup::kMaxOneLevel <= kWarpThreads && kConfig.token_warps() <= kWarpThreads && kWarpThreads % kAhead == 0);
  const auto lane = static_cast<std::int32_t>(ptx::thread_index()) % kWarpThreads;
  softmax::State own;
  if (lane < parts.count()) own = parts.state(lane, row);
  RowSlice whole;
  float weight = 0.0F;
  const float* at = parts.elements(row, dim_of_lane(slice));
#pragma unroll 1
  for (std::int32_t first = 0; first < parts.count(); first += kAhead) {
    float2 ahead[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      ahead[i] = first + i < parts.count() ? parts.load(at) : float2{0.0F, 0.0F};
      at = parts.next(at, first + i);
    }
    if (first == 0) {
      whole.state.m = ptx::warp_max(own.m);
      weight = softmax::rescale_factor(own.m, whole.state.m);
      whole.state.l = ptx::warp_sum(own.l * weight);
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {  // a part that is not there weighs 0: no branch
      const float factor = __shfl_sync(ptx::kAllLanes, weight, first + i);
      whole.o.x = fmaf(ahead[i].x, factor, whole.o.x);
      whole.o.y = fmaf(ahead[i].y, factor, whole.o.y);
    }
  }
  return whole;
}

/// Into a slot; the first slice brings the row's state along.
template <KernelConfig kConfig>
__device__ __forceinline__ void store_slice(const fixup::Partial& to, std::int32_t row, std::int32_t slice, const RowSlice& whole) {
  const std::int32_t dim = dim_of_lane(slice);
  *reinterpret_cast<float2*>(to.o + row * kConfig.head_dim + dim) = whole.o;
  if (dim != 0) return;
  to.m[row] = whole.state.m;
  to.l[row] = whole.state.l;
}

/// Into the output.
template <KernelConfig kConfig>
__device__ __forceinline__ void output_slice(const CtaShared<kConfig>& shared, const SegmentRecord& record, std::int32_t row,
                                             std::int32_t slice, const RowSlice& whole) {
  const std::int32_t dim = dim_of_lane(slice);
  const RowEnd end = end_row<kConfig>(shared.call, record, row, whole.state, dim == 0);
  store_pair<kConfig>(shared.call, end, twisted_quad(row, dim / kQuadDims) * kQuadDims + dim % kQuadDims, whole.o);
}

template <int kAhead, KernelConfig kConfig, typename TParts>
__device__ __forceinline__ void merge_slice(const CtaShared<kConfig>& shared, const SegmentRecord& record, const TParts& parts,
                                            const MergedSlice& to) {
  const RowSlice whole = gather_slice<kAhead, kConfig>(parts, to.row_of_parts, to.slice);
  if (to.slot != nullptr) {
    store_slice<kConfig>(shared.call.slots.layout.partial.at(to.slot), to.row, to.slice, whole);
  } else {
    output_slice<kConfig>(shared, record, to.row, to.slice, whole);
  }
}

}  // namespace lean::cuda
