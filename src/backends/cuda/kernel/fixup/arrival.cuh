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
