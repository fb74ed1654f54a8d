// Timeline: when each worker of a call did what, by a clock that the worker itself reads. A build with LEAN_TIMELINE records; in any
// other a Target and a Recorder are empty, the CUDA backend's structs have no member of these types, and what is asked of them is nothing.
//
// A worker has one track: a fixed number of events, in the order in which they happened. What does not fit is counted, and written
// nowhere. Host and device share this header; src/timeline/hook.hpp says how the memory is handed in.
//
// Two launches of a GPU's call that run side by side (schedule/side_by_side.hpp) have workers of the same numbers, which write the same
// tracks at one time: what is recorded of such a call is not to be relied on.
#pragma once

#include <cstdint>

#include "base/hd.hpp"

namespace lean::timeline {

#ifdef LEAN_TIMELINE
inline constexpr bool kBuilt = true;
#else
inline constexpr bool kBuilt = false;
#endif

enum class EventKind : std::int32_t {
  kStart,        // the worker begins
  kStreamBegin,  // a segment's first tile is waited for
  kStreamEnd,    // its last tile is computed
  kStored,       // its partial lies in a slot, where others find it
  kWritten,      // or its output is written, which nobody shares
  kMergeBegin,   // all partials of a merge are there
  kMergeEnd,     // and are merged; where that ends the output, it is written
  kEnd,          // the worker has nothing left to do
};
inline constexpr std::int32_t kEventKinds = 8;

/// The run of LeanTiles of one output that an event is about; zeros for kStart and kEnd.
struct Run {
  std::int32_t sequence = 0;
  std::int32_t kv_head = 0;
  std::int32_t row_block = 0;
  std::int32_t tile_begin = 0;  // tiles of the sequence, [begin, end)
  std::int32_t tile_end = 0;

  bool operator==(const Run&) const = default;
};

struct Event {
  std::int64_t ns = 0;  // of a steady clock that all workers of the call share
  EventKind kind{};
  Run run;
};

struct Track {
  std::int32_t events = 0;     // that happened: more than a track holds if some were lost
  std::int32_t processor = 0;  // multiprocessor, or logical processor, on which the worker began
};

/// Events of a worker that has so many segments: two passes (Fixup::kTwoKernels) begin and end twice; a segment is streamed, stored
/// or written, and merged at two levels at most. Under fixed_chunk the CUDA kernel counts each chunk as a segment.
[[nodiscard]] constexpr std::int32_t events_of_segments(std::int32_t segments) noexcept { return 4 + 7 * segments; }

#ifdef LEAN_TIMELINE

/// Where a call records; without tracks nowhere. Workers beyond `workers` are not recorded.
struct Target {
  Track* tracks = nullptr;  // [workers], zeroed before a call
  Event* events = nullptr;  // [workers][capacity]
  std::int32_t workers = 0;
  std::int32_t capacity = 0;

  bool operator==(const Target&) const = default;
};

/// One worker's pen, used by one thread of it.
struct Recorder {
  Track* track = nullptr;
  Event* events = nullptr;
  std::int32_t capacity = 0;
  std::int32_t count = 0;  // kept here, not in the track, which may be far away

  /// Goes on behind what an earlier pass of the same call has recorded.
  LEAN_HD void begin(const Target& target, std::int32_t worker, std::int32_t processor) noexcept {
    track = worker < target.workers ? target.tracks + worker : nullptr;
    if (track == nullptr) return;
    events = target.events + static_cast<std::int64_t>(worker) * target.capacity;
    capacity = target.capacity;
    count = track->events;
    track->processor = processor;
  }

  LEAN_HD void record(std::int64_t ns, EventKind kind, const Run& run) noexcept {
    if (track == nullptr) return;
    if (count < capacity) events[count] = {.ns = ns, .kind = kind, .run = run};
    ++count;
  }

  LEAN_HD void end() const noexcept {
    if (track != nullptr) track->events = count;
  }
};

#else

struct Target {
  bool operator==(const Target&) const = default;
};

struct Recorder {
  LEAN_HD constexpr void begin(const Target& /*target*/, std::int32_t /*worker*/, std::int32_t /*processor*/) noexcept {}
  LEAN_HD constexpr void record(std::int64_t /*ns*/, EventKind /*kind*/, const Run& /*run*/) noexcept {}
  LEAN_HD constexpr void end() const noexcept {}
};

#endif

}  // namespace lean::timeline
