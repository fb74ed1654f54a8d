// Parts: results (O, m, l) of the same rows, and their merge. The warps of a CTA bring theirs at a segment's end, in shared memory;
// the workers that share an output bring theirs in slots. A warp merges up to 128 dims of a row: a lane knows a part's state, and
// every lane adds up its elements of all parts, which it asks for before it uses one.
#pragma once

#include <cstdint>

#include "backends/cuda/kernel/cta_memory.cuh"
#include "backends/cuda/kernel/output/exchange.cuh"
#include "backends/cuda/kernel/output/row_slice.cuh"
#include "backends/cuda/kernel/output/rows.cuh"
#include "backends/cuda/kernel/tile/staged_parts.cuh"
#include "backends/cuda/ptx/special_registers.cuh"
#include "backends/cuda/ptx/warp.cuh"
#include "fixup/ordered_merge.hpp"

namespace lean::cuda {

/// What the token warps staged.
template <KernelConfig kConfig>
struct WarpParts {
  static constexpr std::int32_t kRows = StagedRows<kConfig>::kCount;  // of a part
  /// What a part has of a row that sees no token of it is 0 x V of tokens that other rows of the block see, and V may hold NaN. So it
  /// is left out, whatever it is; what is merged of such parts is 0.
  static constexpr bool kMayBeNaN = true;
  static constexpr std::int32_t kMost = kConfig.token_warps();  // parts

  const CtaMemory<kConfig>& memory;

  [[nodiscard]] __device__ __forceinline__ static constexpr std::int32_t count() { return kConfig.token_warps(); }
  [[nodiscard]] __device__ __forceinline__ softmax::State state(std::int32_t part, std::int32_t row) const {
    return {memory.shared.parts.m[part * kRows + row], memory.shared.parts.l[part * kRows + row]};
  }
  /// Where the first part has elements of a row, and the part after `part`, which has them at `at`.
  [[nodiscard]] __device__ __forceinline__ const float* elements(std::int32_t row, std::int32_t dim) const {
    return memory.exchange + row * kConfig.value_dim() + dim;
  }
  [[nodiscard]] __device__ __forceinline__ const float* next(const float* at, std::int32_t) const {
    return at + kRows * kConfig.value_dim();
  }
  template <std::int32_t kDims>
  [[nodiscard]] __device__ __forceinline__ static LaneElements<kConfig, kDims> load(const float* at) {
    return *reinterpret_cast<const LaneElements<kConfig, kDims>*>(at);
  }
};

/// The partials of a run, past the L1: other workers stored them.
template <KernelConfig kConfig>
struct SlotParts {
  static constexpr bool kMayBeNaN = false;
  static constexpr std::int32_t kMost = fixup::kMaxOneLevel;

  const MergeRun& run;

  [[nodiscard]] __device__ __forceinline__ std::int32_t count() const { return run.parts; }
  [[nodiscard]] __device__ __forceinline__ softmax::State state(std::int32_t part, std::int32_t row) const {
    const float* m = run.at(part) + kConfig.q_rows * kConfig.value_dim() + row;  // fixup::PartialLayout
    return {__ldcg(m), __ldcg(m + kConfig.q_rows)};
  }
  [[nodiscard]] __device__ __forceinline__ const float* elements(std::int32_t row, std::int32_t dim) const {
    return run.first + row * kConfig.value_dim() + dim;
  }
  [[nodiscard]] __device__ __forceinline__ const float* next(const float* at, std::int32_t part) const {
    return at + (part == 0 ? run.second - run.first : run.pitch);
  }
  template <std::int32_t kDims>
  [[nodiscard]] __device__ __forceinline__ static LaneElements<kConfig, kDims> load(const float* at) {
    return load_past_l1<kConfig, kDims>(at);
  }
};

/// A slice of one row as bundles of a run have it, in the memory that parts of warps are staged in.
template <KernelConfig kConfig>
struct StagedBundles {
  static constexpr bool kMayBeNaN = false;
  static constexpr std::int32_t kMost = fixup::kMaxOneLevel;
  static_assert(fixup::kMaxOneLevel * kSliceDims<kConfig> <= kConfig.exchange_floats());
  static_assert(fixup::kMaxOneLevel <= CtaParts<kConfig>::kRows);

  const CtaMemory<kConfig>& memory;
  std::int32_t bundles;

  /// By a warp that has merged a bundle.
  __device__ __forceinline__ static void stage(CtaMemory<kConfig>& memory, std::int32_t bundle, const RowSlice<kConfig>& whole) {
    const std::int32_t dim = dim_of_lane<kConfig>(0);
    *reinterpret_cast<LaneElements<kConfig>*>(memory.exchange + bundle * kSliceDims<kConfig> + dim) = whole.o;
    if (dim != 0) return;
    memory.shared.parts.m[bundle] = whole.state.m;
    memory.shared.parts.l[bundle] = whole.state.l;
  }

  [[nodiscard]] __device__ __forceinline__ std::int32_t count() const { return bundles; }
  [[nodiscard]] __device__ __forceinline__ softmax::State state(std::int32_t part, std::int32_t) const {
    return {memory.shared.parts.m[part], memory.shared.parts.l[part]};
  }
  [[nodiscard]] __device__ __forceinline__ const float* elements(std::int32_t, std::int32_t dim) const {
    return memory.exchange + dim % kSliceDims<kConfig>;
  }
  [[nodiscard]] __device__ __forceinline__ const float* next(const float* at, std::int32_t) const {
    return at + kSliceDims<kConfig>;
  }
  template <std::int32_t kDims>
  [[nodiscard]] __device__ __forceinline__ static LaneElements<kConfig, kDims> load(const float* at) {
    return *reinterpret_cast<const LaneElements<kConfig, kDims>*>(at);
  }
};

/// Where a warp's merge goes: a slice of a row of the block.
struct MergedSlice {
  std::int32_t row = 0;
  std::int32_t row_of_parts = 0;  // the same, among those that the parts hold
  std::int32_t slice = 0;
  float* slot = nullptr;  // null: to the output
};

/// What a lane asks for of a slice: a part's state, and its own elements of the first kAhead parts.
template <int kAhead, KernelConfig kConfig, std::int32_t kDims = kLaneDims<kConfig>>
struct AskedSlice {
  softmax::State state;
  LaneElements<kConfig, kDims> elements[kAhead];
  const float* next = nullptr;  // of the part after those
};

/// Asks for a slice of a row. Called by a warp. Lane i knows the state of part i % kMost.
template <int kAhead, KernelConfig kConfig, std::int32_t kDims = kLaneDims<kConfig>, typename TParts>
[[nodiscard]] __device__ __forceinline__ AskedSlice<kAhead, kConfig, kDims> ask_for_slice(const TParts& parts, std::int32_t row,
                                                                                          std::int32_t slice) {
  static_assert(fixup::kMaxOneLevel == kWarpThreads && kConfig.token_warps() <= kWarpThreads && kWarpThreads % kAhead == 0);
  const auto lane = static_cast<std::int32_t>(ptx::thread_index()) % kWarpThreads;
  AskedSlice<kAhead, kConfig, kDims> asked;
  const std::int32_t part = lane % TParts::kMost;
  if (part < parts.count()) asked.state = parts.state(part, row);
  asked.next = parts.elements(row, dim_of_lane<kConfig, kDims>(slice));
#pragma unroll
  for (int i = 0; i < kAhead; ++i) {
    if (i < parts.count()) asked.elements[i] = parts.template load<kDims>(asked.next);
    asked.next = parts.next(asked.next, i);
  }
  return asked;
}

/// The state of a row of all parts, which each kMost neighbouring lanes have, one each, and what the lane's part weighs in it. By a warp.
struct MergedState {
  softmax::State whole;
  float weight = 0.0F;
};
template <std::int32_t kMost = fixup::kMaxOneLevel>
[[nodiscard]] __device__ __forceinline__ MergedState merge_states_of_lanes(softmax::State part) {
  MergedState merged;
  merged.whole.m = ptx::warp_max(part.m);
  merged.weight = fixup::part_weight(part.m, merged.whole.m);
  merged.whole.l = fixup::sum_over_lanes<kMost>(part.l * merged.weight, ptx::across);
  return merged;
}

/// A lane's elements of a slice of all parts, lane i knowing what part i weighs, less than 0 of one that is left out. By a warp, which
/// asked for them.
template <int kAhead, KernelConfig kConfig, std::int32_t kDims, typename TParts>
[[nodiscard]] __device__ __forceinline__ LaneElements<kConfig, kDims> add_slices(const TParts& parts,
                                                                                 AskedSlice<kAhead, kConfig, kDims> asked,
                                                                                 float weight) {
  LaneElements<kConfig, kDims> sum;
  for (std::int32_t first = 0;;) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {  // a part that is not there weighs 0: no branch
      const float factor = __shfl_sync(ptx::kAllLanes, weight, first + i);
      if (TParts::kMayBeNaN && factor < 0.0F) continue;
#pragma unroll
      for (int j = 0; j < kDims; ++j) sum.x[j] = fixup::add_part(sum.x[j], asked.elements[i].x[j], factor);
    }
    first += kAhead;
    if (first >= parts.count()) return sum;
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      asked.elements[i] = {};
      if (first + i < parts.count()) asked.elements[i] = parts.template load<kDims>(asked.next);
      asked.next = parts.next(asked.next, first + i);
    }
  }
}

/// A slice of a row of all parts, merged as fixup/ordered_merge.hpp has it, part i's state by lane i. By a warp, which asked for it.
template <int kAhead, KernelConfig kConfig, std::int32_t kDims, typename TParts>
[[nodiscard]] __device__ __forceinline__ RowSlice<kConfig, kDims> gather_slice(const TParts& parts,
                                                                               const AskedSlice<kAhead, kConfig, kDims>& asked) {
  MergedState merged = merge_states_of_lanes<TParts::kMost>(asked.state);
  if (TParts::kMayBeNaN && asked.state.l == 0.0F) merged.weight = -1.0F;
  return {.o = add_slices(parts, asked, merged.weight), .state = merged.whole};
}

/// Stores a slice into a slot; the first slice brings the row's state along.
template <KernelConfig kConfig, std::int32_t kDims>
__device__ __forceinline__ void store_slice(const fixup::Partial& to, std::int32_t row, std::int32_t slice,
                                            const RowSlice<kConfig, kDims>& whole) {
  const std::int32_t dim = dim_of_lane<kConfig, kDims>(slice);
  *reinterpret_cast<LaneElements<kConfig, kDims>*>(to.o + row * kConfig.value_dim() + dim) = whole.o;
  if (dim != 0) return;
  to.m[row] = whole.state.m;
  to.l[row] = whole.state.l;
}

/// Stores a merged slice where it goes.
template <KernelConfig kConfig, std::int32_t kDims>
__device__ __forceinline__ void deliver_slice(const CtaShared<kConfig>& shared, const SegmentRecord& record, const MergedSlice& to,
                                              const RowSlice<kConfig, kDims>& whole) {
  if (to.slot != nullptr) {
    store_slice<kConfig>(shared.call.fixup.slots.layout.partial.at(to.slot), to.row, to.slice, whole);
  } else if constexpr (kConfig.exchanges()) {
    send_slice<kConfig>(shared, record, to.row, to.slice, whole);
  } else {
    output_slice<kConfig>(shared.call, record, to.row, to.slice, whole);
  }
}

/// `count` slices of what the warps staged, two at once by a warp, half of whose lanes know the states of either: what is waited for is
/// waited for once. One after the other two rows of 16/1 heads took 0.25 us more (docs/notebook/merging.md).
template <KernelConfig kConfig, typename TPlaceOf>
__device__ __forceinline__ void merge_staged_by_twos(const CtaShared<kConfig>& shared, const SegmentRecord& record,
                                                     const WarpParts<kConfig>& parts, std::int32_t count,
                                                     const TPlaceOf& place_of) {
  constexpr std::int32_t kParts = kConfig.token_warps();
  static_assert(2 * kParts <= kWarpThreads, "lanes for the states of two rows");
  const auto thread = static_cast<std::int32_t>(ptx::thread_index());
  const std::int32_t part = thread % kParts;
  const bool of_second = thread / kParts % 2 != 0;
#pragma unroll 1
  for (std::int32_t i = thread / kWarpThreads; i < count; i += 2 * kConfig.consumer_warps) {
    const bool has_second = i + kConfig.consumer_warps < count;
    const MergedSlice to[2] = {place_of(i), place_of(has_second ? i + kConfig.consumer_warps : i)};
    const softmax::State own = parts.state(part, of_second ? to[1].row_of_parts : to[0].row_of_parts);
    LaneElements<kConfig> asked[2][kParts];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const float* at = parts.elements(to[j].row_of_parts, dim_of_lane<kConfig>(to[j].slice));
#pragma unroll
      for (int p = 0; p < kParts; ++p) {
        asked[j][p] = parts.template load<kLaneDims<kConfig>>(at);
        at = parts.next(at, p);
      }
    }
    softmax::State whole{.m = own.m};
#pragma unroll
    for (int lanes = kParts / 2; lanes > 0; lanes /= 2) whole.m = fmaxf(whole.m, ptx::across(whole.m, lanes));
    float weight = fixup::part_weight(own.m, whole.m);
    whole.l = fixup::sum_over_lanes<kParts>(own.l * weight, ptx::across);
    if (own.l == 0.0F) weight = -1.0F;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      RowSlice<kConfig> slice;
      slice.state = {__shfl_sync(ptx::kAllLanes, whole.m, j * kParts), __shfl_sync(ptx::kAllLanes, whole.l, j * kParts)};
#pragma unroll
      for (int p = 0; p < kParts; ++p) {
        const float factor = __shfl_sync(ptx::kAllLanes, weight, j * kParts + p);
        if (factor < 0.0F) continue;
#pragma unroll
        for (int x = 0; x < kLaneDims<kConfig>; ++x) slice.o.x[x] = fixup::add_part(slice.o.x[x], asked[j][p].x[x], factor);
      }
      if (j == 0 || has_second) deliver_slice<kConfig>(shared, record, to[j], slice);
    }
  }
}

/// `count` slices merged by the consumer warps, one after the other: `place_of` says where one goes. A warp asks for its next
/// before it stores one.
template <int kAhead, KernelConfig kConfig, typename TParts, typename TPlaceOf>
__device__ __forceinline__ void merge_slices(const CtaShared<kConfig>& shared, const SegmentRecord& record, const TParts& parts,
                                             std::int32_t count, const TPlaceOf& place_of) {
  AskedSlice<kAhead, kConfig> asked;
  if constexpr (kConfig.q_rows * kRowSlices<kConfig> <= kConfig.consumer_warps) {  // one a warp at most
    const auto i = static_cast<std::int32_t>(ptx::thread_index() / kWarpThreads);
    if (i >= count) return;
    const MergedSlice to = place_of(i);
    asked = ask_for_slice<kAhead, kConfig>(parts, to.row_of_parts, to.slice);
    deliver_slice<kConfig>(shared, record, to, gather_slice(parts, asked));
  } else {
#pragma unroll 1
    for (std::int32_t i = static_cast<std::int32_t>(ptx::thread_index() / kWarpThreads), before = -1;;
         i += kConfig.consumer_warps) {
      RowSlice<kConfig> whole;
      if (before >= 0) whole = gather_slice(parts, asked);
      if (i < count) {
        const MergedSlice from = place_of(i);
        asked = ask_for_slice<kAhead, kConfig>(parts, from.row_of_parts, from.slice);
      }
      if (before >= 0) deliver_slice<kConfig>(shared, record, place_of(before), whole);
      if (i >= count) return;
      before = i;
    }
  }
}

}  // namespace lean::cuda
