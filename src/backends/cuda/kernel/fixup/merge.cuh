// The merge of an output's slots by the worker that arrives last, or the paper's host block (docs/fixup.md). By all consumer
// threads together, once a segment at most: a function that is called, so that the loop over tiles keeps its registers.
#pragma once

#include <cstdint>
#include <type_traits>

#include "backends/cuda/kernel/fixup/arrival.cuh"
#include "backends/cuda/kernel/fixup/lane_merge.cuh"
#include "backends/cuda/kernel/fixup/parts.cuh"
#include "backends/cuda/kernel/fixup/row_merge.cuh"
#include "backends/cuda/kernel/plan/merge_run.cuh"
#include "backends/cuda/kernel/worker_track.cuh"
#include "fixup/arrival.hpp"

namespace lean::cuda {

/// One trip to memory for up to kAhead partials, and a run has kMaxOneLevel at most (kMaxWorkers, and FlashDecoding's limit of
/// splits, see to that).
template <KernelConfig kConfig>
__device__ __forceinline__ void merge_run(const MergeRun& run, std::int32_t record_index) {
  const CtaShared<kConfig>& shared = cta_memory<kConfig>().shared;
  const SegmentRecord& record = shared.records[record_index];
  constexpr int kAhead = kConfig.step() ? 32 / kLaneDims<kConfig> : 4;
  constexpr std::int32_t kSlices = kRowSlices<kConfig>;
  merge_slices<kAhead>(shared, record, SlotParts<kConfig>{run}, record.rows * kSlices, [&run](std::int32_t i) {
    return MergedSlice{.row = i / kSlices, .row_of_parts = i / kSlices, .slice = i % kSlices, .slot = run.slot};
  });
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

/// The same of many rows, by as many of the contributors as have nothing else to do.
template <KernelConfig kConfig>
__device__ __forceinline__ void merge_jointly(std::int32_t record_index) {
  const CtaShared<kConfig>& shared = cta_memory<kConfig>().shared;
  const SegmentRecord& record = shared.records[record_index];
#pragma unroll 1
  for (MergeRun run = record.run;;) {
    const fixup::MergeShare share = join<kConfig>(run, record.ends_share);
    if (share.sharers == 0) return;
    note<kConfig>(timeline::EventKind::kMergeBegin, record_index);
    // Of the last merge nobody waits for what the counter says, which comes while it is done.
    const bool resets = run.slot == nullptr && ptx::thread_index() == 0;
    const fixup::Counter left = resets ? fixup::leave_last_merge<DeviceAtomic>(*run.counter, share) : 0;
    using Merge = std::conditional_t<kConfig.latent(), RowMerge<kConfig>, LaneMerge<kConfig>>;
    Merge(shared, record, run, share).run();
    note<kConfig>(timeline::EventKind::kMergeEnd, record_index);
    if (resets && fixup::is_last(left, share)) DeviceAtomic::store_relaxed(*run.counter, 0);
    if (run.slot == nullptr || !leave<kConfig>(run, share)) return;
    const fixup::Bundling bundling = fixup::bundling_of(record.contributors);
    run = run_of_bundles(shared.call.fixup.slots, record.slots, bundling, record.contributor / bundling.size);
  }
}

/// Called by all consumer threads at the end of a segment whose output is shared, its own partial stored.
template <KernelConfig kConfig>
__device__ __forceinline__ void merge_shared(std::int32_t record_index) {
  const CtaShared<kConfig>& shared = cta_memory<kConfig>().shared;
  if constexpr (kConfig.wide()) return merge_jointly<kConfig>(record_index);
  if (!Asked<kConfig>(shared.call).last_arriver()) return merge_alone<kConfig>(record_index);
  const SegmentRecord& record = shared.records[record_index];
#pragma unroll 1
  for (MergeRun run = record.run; arrive<kConfig>(*run.counter, run.parts);) {
    note<kConfig>(timeline::EventKind::kMergeBegin, record_index);
    merge_run<kConfig>(run, record_index);
    note<kConfig>(timeline::EventKind::kMergeEnd, record_index);
    if (run.slot == nullptr) return;
    run = run_of_bundles(shared.call.fixup.slots, record.slots, fixup::bundling_of(record.contributors));
  }
}

}  // namespace lean::cuda
