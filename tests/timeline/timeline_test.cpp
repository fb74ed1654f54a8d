// The timeline of calls on the CPU: each worker's events are those of its share as explain shows it, in the order in which they can
// happen; and what becomes of them in `lean timeline`. Compiled with LEAN_TIMELINE, beside a worker that is.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <tuple>
#include <vector>

#include "cli/bench_settings.hpp"
#include "cli/decode_problem.hpp"
#include "cli/prepared_call.hpp"
#include "cli/timeline.hpp"
#include "fixup/arrival.hpp"
#include "timeline/hook.hpp"

namespace lean::cli {
namespace {

using timeline::Event;
using timeline::EventKind;
using timeline::Run;
using timeline::Track;

static_assert(timeline::kBuilt);

/// Ragged, one request empty; 33 tokens and more a tile, so that shares cut requests.
const ProblemSpec kRagged{.kv_lens = {1037, 0, 31, 6007, 211},
                          .q_heads = 4,
                          .kv_heads = 2,
                          .head_dim = 16,
                          .dtype = DType::kFloat32,
                          .layout = natural_layout({1037, 0, 31, 6007, 211})};

struct Recorded {
  explain::ScheduleMap map;
  std::vector<Track> tracks;
  std::vector<Event> events;
  Timeline timeline;
};

class Recorder {
 public:
  Recorder(const ProblemSpec& spec, const Options& options)
      : pool_(spec.kv_type(), spec.stored_elements(), 1), problem_(spec, pool_, 1), call_(problem_, options) {
    recorded_.map = map_of(problem_.shape(), options);
    std::size_t most = 0;
    for (const explain::WorkerShare& share : recorded_.map.workers) most = std::max(most, share.segments.size());
    capacity_ = timeline::events_of_segments(static_cast<std::int32_t>(most));
  }

  /// One track and a bit of memory more than is handed in, for a test to look at.
  const Recorded& record(std::int32_t capacity, std::int32_t workers) {
    Recorded& r = recorded_;
    const Event untouched{.ns = -1, .kind = {}, .run = {}};
    r.tracks.assign(static_cast<std::size_t>(r.map.workers_asked) + 1, {});
    r.events.assign(static_cast<std::size_t>(capacity) * r.tracks.size(), untouched);
    {
      const timeline::Installed installed(
          {.tracks = r.tracks.data(), .events = r.events.data(), .workers = workers, .capacity = capacity});
      call_.run();
    }
    r.timeline = read_timeline(r.tracks.data(), r.events.data(), workers, capacity);
    return r;
  }
  const Recorded& record() { return record(capacity_, recorded_.map.workers_asked); }

  [[nodiscard]] const DecodeProblem& problem() const { return problem_; }
  [[nodiscard]] const PreparedCall& call() const { return call_; }
  [[nodiscard]] std::int32_t capacity() const { return capacity_; }

 private:
  KvPool pool_;
  DecodeProblem problem_;
  PreparedCall call_;
  Recorded recorded_;
  std::int32_t capacity_ = 0;
};

Run run_of(const schedule::Segment& segment) {
  const schedule::Output& output = segment.output;
  return {.sequence = static_cast<std::int32_t>(output.sequence),
          .kv_head = output.kv_head,
          .row_block = output.row_block,
          .tile_begin = output.first_tile + segment.tile_begin,
          .tile_end = output.first_tile + segment.tile_end};
}

std::vector<Event> of_kind(const WorkerTimeline& worker, EventKind kind) {
  std::vector<Event> found;
  std::copy_if(worker.events.begin(), worker.events.end(), std::back_inserter(found),
               [kind](const Event& event) { return event.kind == kind; });
  return found;
}

using OutputKey = std::tuple<std::int32_t, std::int32_t, std::int32_t>;
OutputKey output_of(const Event& event) { return {event.run.sequence, event.run.kv_head, event.run.row_block}; }

/// Events of a kind by output, of all workers.
std::map<OutputKey, std::vector<Event>> by_output(const Timeline& timeline, EventKind kind) {
  std::map<OutputKey, std::vector<Event>> found;
  for (const WorkerTimeline& worker : timeline.workers) {
    for (const Event& event : of_kind(worker, kind)) found[output_of(event)].push_back(event);
  }
  return found;
}

std::vector<Options> all_options() {
  std::vector<Options> all;
  for (const std::int32_t workers : {1, 2, 5, 16}) {
    for (const Policy& policy : {Policy::lean(), Policy::fixed_split(3), Policy::data_parallel()}) {
      for (const Fixup fixup : {Fixup::kLastArriver, Fixup::kTwoKernels, Fixup::kHostBlock}) {
        if (fixup == Fixup::kHostBlock && policy.kind == Policy::Kind::kFixedSplit) continue;
        all.push_back({.policy = policy, .fixup = fixup, .workers = workers});
      }
    }
    all.push_back({.policy = Policy::fixed_chunk(), .determinism = Determinism::kBatchInvariant, .workers = workers});
  }
  return all;
}

TEST(Timeline, EverySegmentOfTheScheduleIsThereOnceWithTheWorkerThatHasIt) {
  std::int64_t segments = 0;
  for (const Options& options : all_options()) {
    Recorder recorder(kRagged, options);
    const Recorded& r = recorder.record();
    ASSERT_EQ(r.timeline.workers.size(), static_cast<std::size_t>(r.map.workers_asked));
    for (std::size_t w = 0; w < r.timeline.workers.size(); ++w) {
      const auto shares = w < r.map.workers.size() ? r.map.workers[w].segments : std::vector<schedule::Segment>{};
      const std::vector<Event> begun = of_kind(r.timeline.workers[w], EventKind::kStreamBegin);
      const std::vector<Event> ended = of_kind(r.timeline.workers[w], EventKind::kStreamEnd);
      ASSERT_EQ(begun.size(), shares.size()) << "worker " << w;
      ASSERT_EQ(ended.size(), shares.size()) << "worker " << w;
      for (std::size_t s = 0; s < shares.size(); ++s, ++segments) {
        EXPECT_EQ(begun[s].run, run_of(shares[s])) << "worker " << w << ", segment " << s;
        EXPECT_EQ(ended[s].run, run_of(shares[s])) << "worker " << w << ", segment " << s;
      }
    }
  }
  EXPECT_GT(segments, 400);
}

TEST(Timeline, EventsOfAWorkerAreInTheOrderOfTheirClockAndOfAlgorithm2) {
  for (const Options& options : all_options()) {
    Recorder recorder(kRagged, options);
    const Recorded& r = recorder.record();
    EXPECT_EQ(r.timeline.lost(), 0);
    for (const WorkerTimeline& worker : r.timeline.workers) {
      if (worker.events.empty()) continue;
      EXPECT_EQ(worker.events.front().kind, EventKind::kStart);
      EXPECT_EQ(worker.events.back().kind, EventKind::kEnd);
      for (std::size_t i = 1; i < worker.events.size(); ++i) {
        const Event& before = worker.events[i - 1];
        const Event& now = worker.events[i];
        EXPECT_LE(before.ns, now.ns);
        if (now.kind == EventKind::kStreamEnd) {
          EXPECT_EQ(before.kind, EventKind::kStreamBegin);
        }
        if (now.kind == EventKind::kStored || now.kind == EventKind::kWritten) {
          EXPECT_EQ(before.kind, EventKind::kStreamEnd);
        }
        if (now.kind == EventKind::kMergeEnd) {
          EXPECT_EQ(before.kind, EventKind::kMergeBegin);
        }
        const bool begins = now.kind == EventKind::kStreamBegin || now.kind == EventKind::kStart;
        if (now.kind != EventKind::kEnd && now.kind != EventKind::kMergeBegin && !begins) {
          EXPECT_EQ(before.run, now.run);
        }
      }
    }
  }
}

TEST(Timeline, AnOutputIsMergedOnceAndAfterAllItsContributorsHaveStored) {
  std::int64_t merged = 0;
  for (const Options& options : all_options()) {
    Recorder recorder(kRagged, options);
    const Recorded& r = recorder.record();
    const auto stored = by_output(r.timeline, EventKind::kStored);
    const auto begun = by_output(r.timeline, EventKind::kMergeBegin);
    const auto written = by_output(r.timeline, EventKind::kWritten);
    EXPECT_EQ(static_cast<std::int64_t>(begun.size()), r.map.shared_outputs);
    EXPECT_EQ(static_cast<std::int64_t>(written.size()), r.map.outputs - r.map.shared_outputs);
    for (const auto& [output, merges] : begun) {
      ASSERT_EQ(merges.size(), 1U);
      ASSERT_TRUE(stored.contains(output));
      EXPECT_GT(stored.at(output).size(), 1U);
      for (const Event& event : stored.at(output)) EXPECT_LE(event.ns, merges.front().ns);
      ++merged;
    }
  }
  EXPECT_GT(merged, 50);
}

TEST(Timeline, MergesOfTwoLevelsAreAllThereAndTheLastBeginsWhenTheOthersHaveEnded) {
  const ProblemSpec one{.kv_lens = {40'000}, .q_heads = 1, .kv_heads = 1, .head_dim = 8, .dtype = DType::kFloat32};
  Recorder recorder(one, {.workers = 3 * fixup::kMaxOneLevel});
  const Recorded& r = recorder.record();
  ASSERT_GT(r.map.max_contributors, fixup::kMaxOneLevel);
  const fixup::Bundling bundling = fixup::bundling_of(r.map.max_contributors);
  ASSERT_GT(bundling.bundles, 1);
  const auto begun = by_output(r.timeline, EventKind::kMergeBegin);
  auto ended = by_output(r.timeline, EventKind::kMergeEnd);
  ASSERT_EQ(begun.size(), 1U);
  ASSERT_EQ(begun.begin()->second.size(), static_cast<std::size_t>(bundling.bundles) + 1);
  ASSERT_EQ(ended.begin()->second.size(), begun.begin()->second.size());
  const auto by_time = [](const Event& a, const Event& b) { return a.ns < b.ns; };
  auto& ends = ended.begin()->second;
  std::sort(ends.begin(), ends.end(), by_time);
  const auto& begins = begun.begin()->second;
  EXPECT_GE(std::max_element(begins.begin(), begins.end(), by_time)->ns, ends[ends.size() - 2].ns);
}

TEST(Timeline, EventsThatDoNotFitAreCountedAndWrittenNowhere) {
  Recorder recorder(kRagged, {.workers = 3});
  const Recorded whole = recorder.record();
  constexpr std::int32_t kCapacity = 3;
  const Recorded& r = recorder.record(kCapacity, 2);  // the third worker has no track
  for (std::size_t w = 0; w < 2; ++w) {
    EXPECT_GT(whole.tracks[w].events, kCapacity);
    EXPECT_EQ(r.timeline.workers[w].events.size(), static_cast<std::size_t>(kCapacity));
    EXPECT_GT(r.timeline.workers[w].lost, 0);
  }
  EXPECT_GT(r.timeline.lost(), 0);
  EXPECT_EQ(r.tracks[2].events, 0);
  for (std::size_t i = 2 * kCapacity; i < r.events.size(); ++i) EXPECT_EQ(r.events[i].ns, -1) << i;
}

TEST(Timeline, TracksHoldEveryEventOfTheLongestShare) {
  for (const Options& options : all_options()) {
    Recorder recorder(kRagged, options);
    const Recorded& r = recorder.record();
    for (const Track& track : r.tracks) EXPECT_LE(track.events, recorder.capacity());
  }
}

TEST(Timeline, RecordingChangesNoBitAndEndsWithItsTarget) {
  const auto bits = [](const DecodeProblem& problem) {
    const auto* const data = problem.o().data();
    return std::vector<std::byte>(data, data + problem.o().bytes());
  };
  Recorder recorder(kRagged, {.workers = 5});
  (void)recorder.record();
  const std::vector<std::byte> with = bits(recorder.problem());
  EXPECT_EQ(timeline::target().tracks, nullptr);
  recorder.problem().poison_outputs();
  recorder.call().run();
  EXPECT_EQ(bits(recorder.problem()), with);
}

TEST(Timeline, PartsOfTheTimeSumToAllWorkersTimesTheCall) {
  for (const Options& options : all_options()) {
    Recorder recorder(kRagged, options);
    const Recorded& r = recorder.record();
    const TimeParts parts = r.timeline.parts();
    EXPECT_EQ(parts.whole(), r.timeline.ns * r.map.workers_asked);
    EXPECT_GT(parts.streaming, 0);
    EXPECT_GE(parts.idle, 0);
    EXPECT_GT(r.timeline.occupancy(), 0.0);
    EXPECT_LE(r.timeline.occupancy(), 1.0);
  }
}

TEST(Timeline, PartsAreWhatTheirEventsSay) {
  const timeline::Run run{.sequence = 1, .kv_head = 2, .row_block = 0, .tile_begin = 3, .tile_end = 4};
  const Track tracks[] = {{.events = 7, .processor = 5}, {.events = 0}, {.events = 9, .processor = 6}};
  const std::vector<Event> first = {{1000, EventKind::kStart, {}},       {1010, EventKind::kStreamBegin, run},
                                    {1110, EventKind::kStreamEnd, run},  {1115, EventKind::kStored, run},
                                    {1120, EventKind::kMergeBegin, run}, {1150, EventKind::kMergeEnd, run},
                                    {1200, EventKind::kEnd, {}}};
  std::vector<Event> events = first;
  events.resize(14);  // the second worker had no share
  events.insert(events.end(),
                {{1100, EventKind::kStart, {}}, {1100, EventKind::kStreamBegin, run}, {1180, EventKind::kStreamEnd, run}});
  events.resize(21, {1180, EventKind::kStreamEnd, run});  // and the third lost two
  const Timeline timeline = read_timeline(tracks, events.data(), 3, 7);
  EXPECT_EQ(timeline.ns, 200);
  EXPECT_EQ(timeline.lost(), 2);
  EXPECT_EQ(timeline.workers[0].events[1].ns, 10);
  EXPECT_EQ(timeline.parts(), (TimeParts{.streaming = 180, .storing = 5, .merging = 30, .idle = 600 - 215}));
  EXPECT_DOUBLE_EQ(timeline.occupancy(), 215.0 / 600.0);
  const Json json = to_json(timeline);
  EXPECT_EQ(json.size(), 3U);
  EXPECT_EQ(json[0]["processor"], 5);
  EXPECT_EQ(json[0]["events"][0], Json::parse(R"(["start", 0])"));
  EXPECT_EQ(json[0]["events"][1], Json::parse(R"(["stream_begin", 10, 1, 2, 0, 3, 4])"));
  EXPECT_TRUE(json[1]["events"].empty());
}

TEST(Timeline, ARequestWithoutTokensIsWrittenByItsWorker) {
  const ProblemSpec empty{.kv_lens = {0, 1}, .q_heads = 1, .kv_heads = 1, .head_dim = 8, .dtype = DType::kFloat32};
  Recorder recorder(empty, {.workers = 2});
  const Recorded& r = recorder.record();
  EXPECT_EQ(r.timeline.parts().whole(), r.timeline.ns * 2);
  EXPECT_EQ(by_output(r.timeline, EventKind::kWritten).size(), 2U);
  EXPECT_EQ(Timeline{}.occupancy(), 0.0);
}

}  // namespace
}  // namespace lean::cli
