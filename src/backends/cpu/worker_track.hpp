// WorkerTrack: what a worker of a CPU call writes on its track of the timeline. Without LEAN_TIMELINE it is empty, and so are its
// functions.
#pragma once

#include <cstdint>

#include "schedule/segments.hpp"
#include "timeline/hook.hpp"

#ifdef LEAN_TIMELINE
#include <sched.h>

#include <chrono>
#endif

namespace lean::cpu {

#ifdef LEAN_TIMELINE

class WorkerTrack {
 public:
  explicit WorkerTrack(std::int32_t worker) noexcept {
    recorder_.begin(timeline::target(), worker, sched_getcpu());
    note(timeline::EventKind::kStart, {});
  }
  ~WorkerTrack() {
    note(timeline::EventKind::kEnd, {});
    recorder_.end();
  }
  WorkerTrack(const WorkerTrack&) = delete;
  WorkerTrack& operator=(const WorkerTrack&) = delete;

  void note(timeline::EventKind kind, const schedule::Segment& segment) noexcept {
    const schedule::Output& output = segment.output;
    recorder_.record(std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1), kind,
                     {.sequence = static_cast<std::int32_t>(output.sequence),
                      .kv_head = output.kv_head,
                      .row_block = output.row_block,
                      .tile_begin = output.first_tile + segment.tile_begin,
                      .tile_end = output.first_tile + segment.tile_end});
  }

 private:
  timeline::Recorder recorder_;
};

#else

class WorkerTrack {
 public:
  constexpr explicit WorkerTrack(std::int32_t /*worker*/) noexcept {}
  constexpr void note(timeline::EventKind /*kind*/, const schedule::Segment& /*segment*/) const noexcept {}
};

#endif

}  // namespace lean::cpu
