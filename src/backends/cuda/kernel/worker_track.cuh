// What a worker of the kernel writes on its track of the timeline: the first consumer thread's view, by the GPU's clock. Without
// LEAN_TIMELINE these functions are empty, and called from nowhere that would not be there without them.
#pragma once

#include <cstdint>

#include "backends/cuda/kernel/cta_memory.cuh"
#include "backends/cuda/ptx/special_registers.cuh"

namespace lean::cuda {

/// Called by all threads, before the call is copied into shared memory.
template <KernelConfig kConfig>
__device__ __forceinline__ void begin_track([[maybe_unused]] const DeviceCall& call) {
#ifdef LEAN_TIMELINE
  if (ptx::thread_index() != 0) return;
  timeline::Recorder& recorder = cta_memory<kConfig>().shared.recorder;
  recorder = {};
  recorder.begin(call.timeline, static_cast<std::int32_t>(blockIdx.x), static_cast<std::int32_t>(ptx::multiprocessor_id()));
  recorder.record(ptx::global_nanoseconds(), timeline::EventKind::kStart, {});
#endif
}

/// Called by consumer threads when something of a record's segment has happened. A record of chunks is one of a chunk.
template <KernelConfig kConfig>
__device__ __forceinline__ void note([[maybe_unused]] timeline::EventKind kind, [[maybe_unused]] std::int32_t record_index) {
#ifdef LEAN_TIMELINE
  if (ptx::thread_index() != 0) return;
  CtaShared<kConfig>& shared = cta_memory<kConfig>().shared;
  const SegmentRecord& record = shared.records[record_index];
  const std::int32_t tile_begin = (record.token_begin - record.lengths.kv_begin) / kConfig.tile_tokens;
  const std::int32_t tile_end = (record.token_end - record.lengths.kv_begin + kConfig.tile_tokens - 1) / kConfig.tile_tokens;
  shared.recorder.record(ptx::global_nanoseconds(), kind,
                         {.sequence = static_cast<std::int32_t>(record.sequence),
                          .kv_head = record.kv_head,
                          .row_block = record.row_block,
                          .tile_begin = tile_begin,
                          .tile_end = max(tile_end, tile_begin + 1)});  // an output without tokens has a tile, too
#endif
}

/// Called by consumer threads that have nothing left to do.
template <KernelConfig kConfig>
__device__ __forceinline__ void end_track() {
#ifdef LEAN_TIMELINE
  if (ptx::thread_index() != 0) return;
  timeline::Recorder& recorder = cta_memory<kConfig>().shared.recorder;
  recorder.record(ptx::global_nanoseconds(), timeline::EventKind::kEnd, {});
  recorder.end();
#endif
}

/// note() of a segment's result that is in its slot, or in its output.
template <KernelConfig kConfig>
__device__ __forceinline__ void note_stored([[maybe_unused]] std::int32_t record_index) {
#ifdef LEAN_TIMELINE
  const bool shared_output = cta_memory<kConfig>().shared.records[record_index].slot != nullptr;
  note<kConfig>(shared_output ? timeline::EventKind::kStored : timeline::EventKind::kWritten, record_index);
#endif
}

}  // namespace lean::cuda
