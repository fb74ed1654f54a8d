#include "cli/timeline.hpp"

#include <algorithm>

namespace lean::cli {
namespace {

using timeline::Event;
using timeline::EventKind;

constexpr const char* kNames[] = {"start", "stream_begin", "stream_end", "stored", "written", "merge_begin", "merge_end", "end"};
static_assert(std::size(kNames) == timeline::kEventKinds);

bool of_worker(EventKind kind) { return kind == EventKind::kStart || kind == EventKind::kEnd; }

/// The time up to an event belongs to what the event ends; whatever ends nothing ends idleness.
std::int64_t TimeParts::* part_ended_by(EventKind kind) {
  switch (kind) {
    case EventKind::kStreamEnd: return &TimeParts::streaming;
    case EventKind::kStored:
    case EventKind::kWritten: return &TimeParts::storing;
    case EventKind::kMergeEnd: return &TimeParts::merging;
    case EventKind::kStart:
    case EventKind::kStreamBegin:
    case EventKind::kMergeBegin:
    case EventKind::kEnd: break;
  }
  return &TimeParts::idle;
}

}  // namespace

const char* name_of(EventKind kind) { return kNames[static_cast<std::size_t>(kind)]; }

TimeParts Timeline::parts() const {
  TimeParts parts;
  for (const WorkerTimeline& worker : workers) {
    std::int64_t last = 0;
    for (const Event& event : worker.events) {
      parts.*part_ended_by(event.kind) += event.ns - last;
      last = event.ns;
    }
    parts.idle += ns - last;
  }
  return parts;
}

double Timeline::occupancy() const {
  const TimeParts of = parts();
  return of.whole() == 0 ? 0.0 : static_cast<double>(of.busy()) / static_cast<double>(of.whole());
}

std::int64_t Timeline::lost() const {
  std::int64_t lost = 0;
  for (const WorkerTimeline& worker : workers) lost += worker.lost;
  return lost;
}

Timeline read_timeline(const timeline::Track* tracks, const Event* events, std::int32_t workers, std::int32_t capacity) {
  Timeline timeline;
  std::int64_t first = INT64_MAX;
  std::int64_t last = INT64_MIN;
  for (std::int32_t w = 0; w < workers; ++w) {
    const Event* const begin = events + static_cast<std::int64_t>(w) * capacity;
    const std::int32_t kept = std::min(tracks[w].events, capacity);
    timeline.workers.push_back(
        {.processor = tracks[w].processor, .lost = tracks[w].events - kept, .events = {begin, begin + kept}});
    for (const Event& event : timeline.workers.back().events) {
      first = std::min(first, event.ns);
      last = std::max(last, event.ns);
    }
  }
  for (WorkerTimeline& worker : timeline.workers) {
    for (Event& event : worker.events) event.ns -= first;
  }
  timeline.ns = first <= last ? last - first : 0;
  return timeline;
}

Json to_json(const Timeline& timeline) {
  Json tracks = Json::array();
  for (std::size_t w = 0; w < timeline.workers.size(); ++w) {
    const WorkerTimeline& worker = timeline.workers[w];
    Json events = Json::array();
    for (const Event& event : worker.events) {
      Json item{name_of(event.kind), event.ns};
      const timeline::Run& run = event.run;
      if (!of_worker(event.kind)) {
        for (const std::int32_t number : {run.sequence, run.kv_head, run.row_block, run.tile_begin, run.tile_end}) {
          item.push_back(number);
        }
      }
      events.push_back(std::move(item));
    }
    tracks.push_back({{"worker", w}, {"processor", worker.processor}, {"events", std::move(events)}});
  }
  return tracks;
}

}  // namespace lean::cli
