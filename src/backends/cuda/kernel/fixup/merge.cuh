// The merge of an output's slots (docs/fixup.md): by the worker that arrives last, by those that stayed together, or by the paper's host
// block. By all consumer threads together, once a segment at most; what short calls do not run is a function that is called.
#pragma once

#include <cstdint>

#include "backends/cuda/kernel/fixup/arrival.cuh"
#include "backends/cuda/kernel/fixup/block_merge.cuh"
#include "backends/cuda/kernel/fixup/lane_merge.cuh"
#include "backends/cuda/kernel/fixup/parts.cuh"
#include "backends/cuda/kernel/fixup/row_merge.cuh"
#include "backends/cuda/kernel/plan/merge_run.cuh"
#include "backends/cuda/kernel/worker_track.cuh"
#include "fixup/arrival.hpp"

namespace lean::cuda {

/// Where slice i of a run's rows goes.
template <KernelConfig kConfig, std::int32_t kDims = kLaneDims<kConfig>>
[[nodiscard]] __device__ __forceinline__ MergedSlice slice_of_run(const MergeRun& run, std::int32_t i) {
  const std::int32_t row = i / kRowSlices<kConfig, kDims>;
  return {.row = row, .row_of_parts = row, .slice = i % kRowSlices<kConfig, kDims>, .slot = run.slot};
}

/// All of a run by one worker, up to kMaxOneLevel partials: one trip to memory for up to kAhead of them.
template <KernelConfig kConfig>
__device__ __forceinline__ void merge_run(const MergeRun& run, std::int32_t record_index) {
  const CtaShared<kConfig>& shared = cta_memory<kConfig>().shared;
  const SegmentRecord& record = shared.records[record_index];
  constexpr int kAhead = kConfig.step() ? 32 / kLaneDims<kConfig> : 4;
  merge_slices<kAhead>(shared, record, SlotParts<kConfig>{run}, record.rows * kRowSlices<kConfig>,
                       [&run](std::int32_t i) { return slice_of_run<kConfig>(run, i); });
}

/// Elements of a slice, of all partials together, that a lane asks for at once where one slice or two are the worker's share.
inline constexpr std::int32_t kAskedOfShare = 64;

/// Partials of bundles that a worker asks for at once.
template <KernelConfig kConfig>
inline constexpr int kAheadOfShare = kAskedOfShare / kLaneDims<kConfig>;

/// A worker's share of a run of up to kMaxOneLevel partials. A decode step's slices are half as wide as others', so that they are as many as
/// workers mostly, and come in one trip to memory, all partials at once: 1 x 4k of 16/1 heads 9.6 -> 9.1 us (docs/notebook/merging.md).
template <KernelConfig kConfig>
__device__ __forceinline__ void merge_share(const MergeRun& run, std::int32_t record_index, const fixup::MergeShare& share) {
  const CtaShared<kConfig>& shared = cta_memory<kConfig>().shared;
  const SegmentRecord& record = shared.records[record_index];
  constexpr std::int32_t kDims = kConfig.step() ? 2 : kLaneDims<kConfig>;
  constexpr std::int32_t kAhead = kAskedOfShare / kDims;
  const std::int32_t slices = record.rows * kRowSlices<kConfig, kDims>;
  const std::int32_t end = share.end(slices);
#pragma unroll 1
  for (auto i = share.begin(slices) + static_cast<std::int32_t>(ptx::thread_index() / kWarpThreads); i < end;
       i += kConfig.consumer_warps) {
    const SlotParts<kConfig> parts{run};
    const MergedSlice to = slice_of_run<kConfig, kDims>(run, i);
    const auto asked = ask_for_slice<kAhead, kConfig, kDims>(parts, to.row_of_parts, to.slice);
    deliver_slice<kConfig>(shared, record, to, gather_slice(parts, asked));
  }
}

/// The same of a run of more partials: the warps merge a bundle each into shared memory, and one of them the bundles, so that what is
/// two levels for the arithmetic (fixup::bundling_of()) is one arrival.
template <KernelConfig kConfig>
__device__ __forceinline__ void merge_share_of_bundles(const MergeRun& run, std::int32_t record_index,
                                                       const fixup::MergeShare& share) {
  CtaMemory<kConfig>& memory = cta_memory<kConfig>();
  const SegmentRecord& record = memory.shared.records[record_index];
  const fixup::Bundling bundling = fixup::bundling_of(run.parts);
  const std::int32_t slices = record.rows * kRowSlices<kConfig>;
  const std::int32_t end = share.end(slices);
  const auto warp = static_cast<std::int32_t>(ptx::thread_index() / kWarpThreads);
#pragma unroll 1
  for (std::int32_t i = share.begin(slices); i < end; ++i) {
    const MergedSlice to = slice_of_run<kConfig>(run, i);
#pragma unroll 1
    for (std::int32_t bundle = warp; bundle < bundling.bundles; bundle += kConfig.consumer_warps) {
      const MergeRun part = run.of(bundling.begin(bundle), bundling.end(bundle, run.parts));
      const SlotParts<kConfig> parts{part};
      const auto asked = ask_for_slice<kAheadOfShare<kConfig>, kConfig>(parts, to.row_of_parts, to.slice);
      StagedBundles<kConfig>::stage(memory, bundle, gather_slice(parts, asked));
    }
    consumer_sync<kConfig>();
    if (warp == 0) {
      const StagedBundles<kConfig> parts{memory, bundling.bundles};
      const auto asked = ask_for_slice<kAheadOfShare<kConfig>, kConfig>(parts, to.row_of_parts, to.slice);
      deliver_slice<kConfig>(memory.shared, record, to, gather_slice(parts, asked));
    }
    consumer_sync<kConfig>();  // the bundles' room is free again
  }
}

/// The fix-ups in which one worker merges all bundles: the paper's host, who waits for its peers, and the second of two kernels.
template <KernelConfig kConfig>
__device__ __noinline__ void merge_alone(std::int32_t record_index) {
  const CtaShared<kConfig>& shared = cta_memory<kConfig>().shared;
  const SegmentRecord& record = shared.records[record_index];
  const fixup::Slots& slots = shared.call.fixup.slots;
  if (shared.call.fixup.kind == Fixup::kTwoKernels && shared.call.fixup.pass == Pass::kWhole) return;
  if (shared.call.fixup.kind == Fixup::kHostBlock && !await_peers<kConfig>(slots, record)) return;
  const fixup::Bundling bundling = fixup::bundling_of(record.contributors);
  const std::int32_t runs = bundling.bundles + (bundling.bundles > 1 ? 1 : 0);
  note<kConfig>(timeline::EventKind::kMergeBegin, record_index);
#pragma unroll 1
  for (std::int32_t i = 0; i < runs; ++i) {
    const MergeRun run = i < bundling.bundles ? run_of_bundle(slots, record.slots, record.contributors, bundling, i)
                                              : run_of_bundles(slots, record.slots, bundling);
    merge_run<kConfig>(run, record_index);
    consumer_sync<kConfig>();  // the bundles' results are there
  }
  note<kConfig>(timeline::EventKind::kMergeEnd, record_index);
}

/// So many parts of a chunk are merged row by row (merge_rows()): of 8 parts 64 tokens of 8k take 36.4 us on an H100, and side by side 41.6;
/// of 4 parts 512 tokens of 8 heads of 8k 48.0, and 53.0; of 2 parts 256 tokens of 2k 37.3, and 32.8.
inline constexpr std::int32_t kFewestPartsByRow = 4;

/// A worker's share of a run of a chunk's rows. Where many parts are merged by as many workers a warp has a row or two, and brings a row's
/// states and elements in one trip; of few parts it has more, whose states it merges side by side first. Which of the two it is the parts
/// alone say, so that bits do not depend on who merges. As a function that is called, it is not in the way of calls that merge nothing.
template <KernelConfig kConfig>
__device__ __noinline__ void merge_rows(const MergeRun& run, std::int32_t record_index, fixup::MergeShare share) {
  const CtaShared<kConfig>& shared = cta_memory<kConfig>().shared;
  if (run.parts >= kFewestPartsByRow) {
    merge_share<kConfig>(run, record_index, share);
  } else {
    LaneMerge<kConfig>(shared, shared.records[record_index], run, share).run();
  }
}

/// Of many rows: by as many of the contributors as have nothing else to do.
template <KernelConfig kConfig>
__device__ __forceinline__ void merge_rows_jointly(std::int32_t record_index) {
  CtaShared<kConfig>& shared = cta_memory<kConfig>().shared;
  SegmentRecord& record = shared.records[record_index];
  const MergeRun& run = record.run;
#pragma unroll 1
  for (;;) {
    const fixup::MergeShare share = join<kConfig>(run, record.stays);
    if (share.sharers == 0) return;
    note<kConfig>(timeline::EventKind::kMergeBegin, record_index);
    // Of the last merge nobody waits for what the counter says, which comes while it is done.
    const bool resets = run.slot == nullptr && ptx::thread_index() == 0;
    const fixup::Counter left = resets ? fixup::leave_last_merge<DeviceAtomic>(*run.counter, share) : 0;
    if constexpr (kConfig.latent()) {
      const MergeRun in_registers = run;
      if (record.contributors <= BlockMerge<kConfig>::kMostParts) {
        BlockMerge<kConfig>(shared, record_index, in_registers, share).run();
      } else {
        RowMerge<kConfig>(shared, record, in_registers, share).run();
      }
    } else {
      merge_rows<kConfig>(run, record_index, share);
    }
    note<kConfig>(timeline::EventKind::kMergeEnd, record_index);
    if (resets && fixup::is_last(left, share)) DeviceAtomic::store_relaxed(*run.counter, 0);
    if (run.slot == nullptr || !leave<kConfig>(run, share)) return;
    if (ptx::thread_index() == 0) {
      const fixup::Bundling bundling = fixup::bundling_of(record.contributors);
      record.run = run_of_bundles(shared.call.fixup.slots, record.slots, bundling, record.contributor / bundling.size);
    }
    consumer_sync<kConfig>();
  }
}

/// A worker's share of a decode step's joint merge, as what it has of it is best read.
template <KernelConfig kConfig>
__device__ __forceinline__ void merge_step_share(const MergeRun& run, std::int32_t record_index, const fixup::MergeShare& share) {
  if constexpr (BlockMerge<kConfig>::kServes) {
    if (run.parts <= BlockMerge<kConfig>::kMostParts)
      return BlockMerge<kConfig>(cta_memory<kConfig>().shared, record_index, run, share).run();
  }
  if (kConfig.fewest_joint_parts() <= fixup::kMaxOneLevel && run.parts <= fixup::kMaxOneLevel) {
    merge_share<kConfig>(run, record_index, share);
  } else {
    merge_share_of_bundles<kConfig>(run, record_index, share);
  }
}

/// Of a decode step's output of many contributors, who all meet at one counter: by those that have nothing else to do.
template <KernelConfig kConfig>
__device__ __forceinline__ void merge_step_jointly(std::int32_t record_index) {
  const SegmentRecord& record = cta_memory<kConfig>().shared.records[record_index];
  const MergeRun& run = record.run;
  const fixup::MergeShare share = join<kConfig>(run, record.stays);
  if (share.sharers == 0) return;
  note<kConfig>(timeline::EventKind::kMergeBegin, record_index);
  const fixup::Counter left = ptx::thread_index() == 0 ? fixup::leave_last_merge<DeviceAtomic>(*run.counter, share) : 0;
  merge_step_share<kConfig>(run, record_index, share);
  note<kConfig>(timeline::EventKind::kMergeEnd, record_index);
  if (ptx::thread_index() == 0 && fixup::is_last(left, share)) DeviceAtomic::store_relaxed(*run.counter, 0);
}

/// As a function that is called. Of 16 rows and more it is in line (1 x 4k of 16/1 heads takes 10.6 us, and called 11.2); in the way of
/// the merges of 8 rows, which are of so many parts in long calls alone, it would cost short ones 0.2 us.
template <KernelConfig kConfig>
__device__ __noinline__ void merge_step_jointly_called(std::int32_t record_index) {
  merge_step_jointly<kConfig>(record_index);
}

/// Called by all consumer threads at the end of a segment whose output is shared, its own partial stored.
template <KernelConfig kConfig>
__device__ __forceinline__ void merge_shared(std::int32_t record_index) {
  const CtaShared<kConfig>& shared = cta_memory<kConfig>().shared;
  if constexpr (kConfig.stairs()) return merge_rows_jointly<kConfig>(record_index);
  if (!Asked<kConfig>(shared.call).last_arriver()) return merge_alone<kConfig>(record_index);
  const SegmentRecord& record = shared.records[record_index];
  if constexpr (kConfig.step_merges_jointly()) {
    if (record.run.parts >= kConfig.fewest_joint_parts()) {
      return kConfig.narrow() ? merge_step_jointly_called<kConfig>(record_index) : merge_step_jointly<kConfig>(record_index);
    }
  }
#pragma unroll 1
  for (MergeRun run = record.run; arrive<kConfig>(*run.counter, run.parts);) {
    note<kConfig>(timeline::EventKind::kMergeBegin, record_index);
    merge_run<kConfig>(run, record_index);
    note<kConfig>(timeline::EventKind::kMergeEnd, record_index);
    if (kConfig.step_merges_jointly() || run.slot == nullptr) return;
    run = run_of_bundles(shared.call.fixup.slots, record.slots, fixup::bundling_of(record.contributors));
  }
}

}  // namespace lean::cuda
