// Arrival on the device: whoever comes last of an output's contributors merges, or the paper's host waits for its peers
// (docs/fixup.md). Called by all consumer threads together.
#pragma once

#include <cstdint>

#include "backends/cuda/device_atomic.cuh"
#include "backends/cuda/kernel/cta_memory.cuh"
#include "backends/cuda/kernel/segment_record.cuh"
#include "backends/cuda/ptx/barrier.cuh"
#include "backends/cuda/ptx/special_registers.cuh"
#include "fixup/arrival.hpp"
#include "fixup/joint_merge.hpp"
#include "fixup/workspace.hpp"

namespace lean::cuda {

/// Counts the worker in; true for all consumer threads when it is the last. What they stored comes before.
template <KernelConfig kConfig>
[[nodiscard]] __device__ __forceinline__ bool arrive(fixup::Counter& counter, std::int32_t contributors) {
  CtaShared<kConfig>& shared = cta_memory<kConfig>().shared;
  consumer_sync<kConfig>();
  if (ptx::thread_index() == 0) shared.arrival.last = fixup::arrive_last<DeviceAtomic>(counter, contributors) ? 1 : 0;
  consumer_sync<kConfig>();
  return shared.arrival.last != 0;
}

/// Cycles of a multiprocessor's clock that a worker with nothing else to do waits for an output's other contributors, some 17 us: then
/// the multiprocessor is another kernel's. Workers of a share each arrive within a few us of each other.
inline constexpr std::uint32_t kStayCycles = 1 << 15;

/// The same of a joint merge: what of it is the worker's (fixup/joint_merge.hpp).
template <KernelConfig kConfig>
[[nodiscard]] __device__ __forceinline__ fixup::MergeShare join(const MergeRun& run, bool stays) {
  CtaShared<kConfig>& shared = cta_memory<kConfig>().shared;
  consumer_sync<kConfig>();
  if (ptx::thread_index() == 0) {
    const std::uint32_t since = ptx::clock_cycles();
    shared.arrival.share = fixup::join_merge<DeviceAtomic>(*run.counter, run.parts, run.index, stays,
                                                           [since] { return ptx::clock_cycles() - since < kStayCycles; });
  }
  consumer_sync<kConfig>();
  return shared.arrival.share;
}

/// After a share of a bundle's merge: true for all consumer threads of the worker that leaves last, and sees all of it.
template <KernelConfig kConfig>
[[nodiscard]] __device__ __forceinline__ bool leave(const MergeRun& run, const fixup::MergeShare& share) {
  CtaShared<kConfig>& shared = cta_memory<kConfig>().shared;
  consumer_sync<kConfig>();
  if (ptx::thread_index() == 0) {
    const bool last = fixup::is_last(fixup::leave_merge<DeviceAtomic>(*run.counter, share), share);
    if (last) DeviceAtomic::store_relaxed(*run.counter, 0);
    shared.arrival.last = last ? 1 : 0;
  }
  consumer_sync<kConfig>();
  return shared.arrival.last != 0;
}

/// The paper's fix-up: peers raise a flag; the host, for whom this returns true, waits for all of them.
template <KernelConfig kConfig>
[[nodiscard]] __device__ __forceinline__ bool await_peers(const fixup::Slots& slots, const SegmentRecord& record) {
  const auto thread = static_cast<std::int32_t>(ptx::thread_index());
  if (record.contributor != 0) {
    consumer_sync<kConfig>();
    if (thread == 0) fixup::signal<DeviceAtomic>(slots.counter(record.slots.slot(record.contributor)));
    return false;
  }
  for (std::int32_t c = 1 + thread; c < record.contributors; c += kConfig.consumer_threads()) {
    fixup::wait_for<DeviceAtomic>(slots.counter(record.slots.slot(c)));
  }
  consumer_sync<kConfig>();
  return true;
}

}  // namespace lean::cuda
