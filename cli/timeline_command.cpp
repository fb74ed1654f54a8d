// lean timeline: when each worker of a call streams, stores and merges, by its own clock, under lean, fixed split and one worker per
// output: the paper's picture of occupancy over time, measured. It is recorded by builds with LEAN_TIMELINE alone.
#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include <algorithm>

#include "cli/backend_option.hpp"
#include "cli/bad_argument.hpp"
#include "cli/bench_settings.hpp"
#include "cli/command.hpp"
#include "cli/gpu.hpp"
#include "cli/gpu_models.hpp"
#include "cli/machine.hpp"
#include "cli/measure.hpp"
#include "cli/noise.hpp"
#include "cli/oracle.hpp"
#include "cli/prepared_call.hpp"
#include "cli/print.hpp"
#include "cli/problem_options.hpp"
#include "cli/threads.hpp"
#include "cli/time_coefficients.hpp"
#include "cli/time_model.hpp"
#include "cli/timeline.hpp"
#include "cli/validators.hpp"
#include "timeline/hook.hpp"

namespace lean::cli {
namespace {

/// Memory that a call records to, and the call recorded.
class Recording {
 public:
  Recording(const explain::ScheduleMap& map, Place place)
      : workers_(map.workers_asked),
        capacity_(timeline::events_of_segments(most_segments(map))),
        host_(bytes()),
        memory_(bytes(), place) {}

  [[nodiscard]] Timeline of(const PreparedCall& call) const {
    memory_.set_bytes(0);
#ifdef LEAN_TIMELINE
    const timeline::Installed installed(
        {.tracks = tracks_in(memory_), .events = events_in(memory_), .workers = workers_, .capacity = capacity_});
#endif
    call.run();
    copy_bytes(host_, memory_);
    return read_timeline(tracks_in(host_), events_in(host_), workers_, capacity_);
  }

 private:
  static std::int32_t most_segments(const explain::ScheduleMap& map) {
    std::size_t most = 0;
    for (const explain::WorkerShare& share : map.workers) most = std::max(most, share.segments.size());
    return static_cast<std::int32_t>(most);
  }
  [[nodiscard]] std::int64_t tracks_bytes() const {
    return round_up(workers_ * static_cast<std::int64_t>(sizeof(timeline::Track)), std::int64_t{256});
  }
  [[nodiscard]] std::int64_t bytes() const {
    return tracks_bytes() + std::int64_t{workers_} * capacity_ * static_cast<std::int64_t>(sizeof(timeline::Event));
  }
  [[nodiscard]] static timeline::Track* tracks_in(const Buffer& buffer) {
    return reinterpret_cast<timeline::Track*>(buffer.data());
  }
  [[nodiscard]] timeline::Event* events_in(const Buffer& buffer) const {
    return reinterpret_cast<timeline::Event*>(buffer.data() + tracks_bytes());
  }

  std::int32_t workers_;
  std::int32_t capacity_;
  Buffer host_;
  Buffer memory_;
};

/// One schedule's call: of those recorded, the shortest, since whatever else runs on the machine makes calls longer.
struct Recorded {
  const Implementation* implementation = nullptr;
  explain::ScheduleMap map{};
  Timeline timeline{};
  Samples calls{};          // their lengths, from the first event to the last
  double simulated = -1.0;  // occupancy, as simulated on this GPU; below 0: not known
  Verdict verdict{};
  std::string note{};
};

struct Where {
  Backend backend{};
  std::string device{};
  std::int32_t processors = 0;  // multiprocessors, or logical processors that this process may use
};

Where where_of(Backend backend) {
  if (backend == Backend::kCuda) {
    const gpu::Device device = gpu::devices().at(0);
    return {backend, device.name, device.multiprocessors};
  }
  const Machine machine = inspect_machine();
  return {backend, machine.cpu_model, machine.usable_cpus};
}

/// What else is in the picture than the schedule.
std::string note_of(const Where& where, const Recorded& recorded) {
  std::vector<std::string> notes;
  const std::int32_t workers = recorded.map.workers_asked;
  if (where.backend == Backend::kCpu && workers > std::min(where.processors, thread_count())) {
    notes.push_back(fmt::format("oversubscribed: {} workers take turns on {} threads of {} processors", workers,
                                std::min(thread_count(), workers), where.processors));
  }
  if (const std::string noise = noise_in(recorded.calls, recorded.calls); !noise.empty()) notes.push_back(noise);
  if (recorded.timeline.lost() > 0) notes.push_back(fmt::format("{} events were lost", recorded.timeline.lost()));
  if (recorded.timeline.ns == 0) notes.push_back("nothing was recorded: the plain kernel served the call");
  if (!recorded.verdict.passes()) notes.push_back("wrong: " + recorded.verdict.worst);
  std::string text;
  for (const std::string& note : notes) text += (text.empty() ? "" : "; ") + note;
  return text;
}

double simulated_occupancy(const Where& where, const ProblemSpec& spec, const Policy& policy) {
  const GpuModel* const gpu = where.backend == Backend::kCuda ? gpu_of_device(where.device) : nullptr;
  if (gpu == nullptr) return -1.0;
  try {
    require_simulated(spec);
  } catch (const BadArgument&) {
    return -1.0;
  }
  return predict(*gpu, spec, policy, kTimeModel).occupancy;
}

std::string share_of(std::int64_t part, const TimeParts& parts) {
  return parts.whole() == 0 ? "-" : percent_text(static_cast<double>(part) / static_cast<double>(parts.whole()));
}

std::string text_of(const std::vector<Recorded>& all) {
  Table table(
      {"schedule", "workers", "time", "occupancy", "streaming", "storing", "merging", "idle", "shares even to", "simulated"});
  std::string notes;
  for (const Recorded& one : all) {
    const TimeParts parts = one.timeline.parts();
    table.add({one.implementation->name, fmt::format("{}", one.map.workers_asked),
               time_text(static_cast<double>(one.timeline.ns) / 1e3), percent_text(one.timeline.occupancy()),
               share_of(parts.streaming, parts), share_of(parts.storing, parts), share_of(parts.merging, parts),
               share_of(parts.idle, parts), percent_text(one.map.cost_units.ratio()),
               one.simulated < 0.0 ? "-" : percent_text(one.simulated)});
    if (!one.note.empty()) notes += fmt::format("{}: {}\n", one.implementation->name, one.note);
  }
  return table.text() +
         "\noccupancy: workers that stream, store or merge / all, mean over the call. shares even to: mean / longest share of the\n"
         "schedule, what occupancy would be if nothing but the shares counted. simulated: by lean simulate, of this GPU\n" +
         notes;
}

Json json_of(const Recorded& one, const ProblemSpec& spec, const Where& where, const std::string& commit) {
  const TimeParts parts = one.timeline.parts();
  Json json{{"command", "timeline"}, {"impl", one.implementation->name}, {"backend", name_of(where.backend)}};
  add_problem(json, spec);
  json["kv_bytes"] = spec.kv_bytes();
  json["tile_tokens"] = one.map.shape.tile_tokens;
  json["workers"] = one.map.workers_asked;
  json["processors"] = where.processors;
  add_times(json, one.calls);
  json["ns"] = one.timeline.ns;
  json["occupancy"] = one.timeline.occupancy();
  json["parts_ns"] = {{"streaming", parts.streaming}, {"storing", parts.storing}, {"merging", parts.merging}, {"idle", parts.idle}};
  json["balance"] = one.map.cost_units.ratio();
  json["simulated_occupancy"] = one.simulated < 0.0 ? Json(nullptr) : Json(one.simulated);
  json["error_ratio"] = one.verdict.error_ratio;
  json["lost_events"] = one.timeline.lost();
  json["tracks"] = to_json(one.timeline);
  json["device"] = where.device;
  json["commit"] = commit;
  json["date"] = utc_now();
  json["note"] = one.note.empty() ? Json(nullptr) : Json(one.note);
  return json;
}

class TimelineCommand final : public Command {
 public:
  std::string name() const override { return "timeline"; }
  std::string description() const override {
    return "Record when each worker streams, stores and merges, under three schedules (a build with LEAN_TIMELINE)";
  }
  std::string example() const override { return "lean timeline --lens 64k,7x1k --q-heads 4 --kv-heads 1 --out timeline.jsonl"; }

  void add_options(CLI::App& app) override {
    problem_.add_to(app);
    const std::string group = "Recording";
    app.add_option("--workers", workers_,
                   "Workers that share the work; 0: as many as there are threads, or one or two a multiprocessor")
        ->transform(in_range("--workers", 0, 4096))
        ->group(group);
    app.add_option("--calls", calls_, "Calls to record of each schedule; the shortest is told")
        ->transform(in_range("--calls", 1, 10'000))
        ->capture_default_str()
        ->group(group);
    app.add_option("--out", out_, "Write the events to this file too, a JSON line a schedule")
        ->check(file_to_write("--out"))
        ->group(group);
    app.add_option("--commit", commit_, "Commit to record in the lines")->group(group);
    backend_.add_to(app, "the CPU");
  }

  int run(bool json) override {
    if (!timeline::kBuilt) throw BadArgument("this build records no timeline: one configured with -DLEAN_TIMELINE=ON does");
    const Where where = where_of(backend_.backend_or(Backend::kCpu));
    const ProblemSpec spec = problem_.spec();
    const OutputFile file("--out", out_);
    if (!out_.empty()) file.check();
    const std::vector<Recorded> all = record_all(where, spec);
    std::string lines;
    for (const Recorded& one : all) lines += line_of(json_of(one, spec, where, commit_));
    if (!out_.empty()) file.begin(lines);
    print(json ? lines : fmt::format("{}, {}\n\n{}", describe(spec), where.device, text_of(all)));
    const bool right = std::all_of(all.begin(), all.end(), [](const Recorded& one) { return one.verdict.passes(); });
    return right ? kExitOk : kExitCheckFailed;
  }

 private:
  std::vector<Recorded> record_all(const Where& where, const ProblemSpec& spec) const {
    Progress progress;
    const Place place = place_of(where.backend);
    require_memory(place, bytes_to_hold(spec, 1), "ask for fewer or shorter requests, or fewer heads");
    progress.say("making K and V");
    const KvPool pool(spec.kv_type(), spec.stored_elements(), kBenchSeed, place, 1, spec.kv_tensors());
    const DecodeProblem problem(spec, pool, kBenchSeed);
    progress.say("computing the fp64 answers to check against");
    const Oracle oracle(problem);
    progress.say("recording");
    std::vector<Recorded> all;
    for (const Implementation& implementation : kImplementations) {
      all.push_back(record(problem, implementation, where, oracle));
    }
    return all;
  }

  Recorded record(const DecodeProblem& problem, const Implementation& implementation, const Where& where,
                  const Oracle& oracle) const {
    const Options options{.backend = where.backend, .policy = implementation.policy, .workers = workers_};
    const PreparedCall call(problem, options);
    Recorded one{.implementation = &implementation, .map = map_of(problem.shape(), options)};
    one.simulated = simulated_occupancy(where, problem.spec(), implementation.policy);
    const Recording recording(one.map, problem.place());
    (void)recording.of(call);  // threads start, kernels are loaded
    problem.poison_outputs();
    std::vector<Timeline> timelines;
    for (int i = 0; i < calls_; ++i) timelines.push_back(recording.of(call));
    one.verdict = oracle.check(rounding_of(problem.problem(), options));
    std::sort(timelines.begin(), timelines.end(), [](const Timeline& a, const Timeline& b) { return a.ns < b.ns; });
    for (const Timeline& timeline : timelines) one.calls.us.push_back(std::max(static_cast<double>(timeline.ns) / 1e3, 1e-3));
    one.timeline = timelines.front();
    one.note = note_of(where, one);
    return one;
  }

  ProblemOptions problem_;
  BackendOption backend_;
  std::int32_t workers_ = 0;
  int calls_ = 7;
  std::string out_;
  std::string commit_;
};

}  // namespace

std::unique_ptr<Command> make_timeline_command() { return std::make_unique<TimelineCommand>(); }

}  // namespace lean::cli
