// Timeline: what the workers of one recorded call did, and what part of the call's time they streamed, stored, merged and idled. The
// events are those of timeline/timeline.hpp; `lean timeline` records them.
#pragma once

#include <cstdint>
#include <vector>

#include "cli/problem_json.hpp"
#include "timeline/timeline.hpp"

namespace lean::cli {

struct WorkerTimeline {
  std::int32_t processor = 0;
  std::int32_t lost = 0;                // events that did not fit
  std::vector<timeline::Event> events;  // ns: since the call's first event; empty: a worker without a share
};

/// Nanoseconds of all workers together; together they are workers x the call's time.
struct TimeParts {
  std::int64_t streaming = 0;
  std::int64_t storing = 0;  // partials into slots, or outputs that nobody shares
  std::int64_t merging = 0;
  std::int64_t idle = 0;  // before a worker's start, behind its end, and between the rest

  [[nodiscard]] std::int64_t busy() const { return streaming + storing + merging; }
  [[nodiscard]] std::int64_t whole() const { return busy() + idle; }
  bool operator==(const TimeParts&) const = default;
};

struct Timeline {
  std::vector<WorkerTimeline> workers;  // all that were asked for
  std::int64_t ns = 0;                  // from the first event to the last

  [[nodiscard]] TimeParts parts() const;
  /// Workers that are busy / all, mean over the call; 0 of an empty one.
  [[nodiscard]] double occupancy() const;
  [[nodiscard]] std::int64_t lost() const;
};

/// Of memory that a call has recorded to: `workers` tracks of `capacity` events each.
[[nodiscard]] Timeline read_timeline(const timeline::Track* tracks, const timeline::Event* events, std::int32_t workers,
                                     std::int32_t capacity);

[[nodiscard]] const char* name_of(timeline::EventKind kind);

/// [{"worker": 0, "processor": 1, "events": [["stream_begin", ns, sequence, kv head, row block, tile begin, tile end], ...]}, ...];
/// "start" and "end" have their ns alone.
[[nodiscard]] Json to_json(const Timeline& timeline);

}  // namespace lean::cli
