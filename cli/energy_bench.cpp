#include "cli/energy_bench.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>

#include "cli/bench_rows.hpp"
#include "cli/call_chain.hpp"
#include "cli/command.hpp"
#include "cli/energy.hpp"
#include "cli/gpu.hpp"
#include "cli/line_sink.hpp"
#include "cli/machine.hpp"
#include "cli/nvml.hpp"
#include "cli/oracle.hpp"
#include "cli/prepared_call.hpp"

namespace lean::cli {
namespace {

struct EnergyContext {
  std::string device;
  std::string driver;
  std::string commit;
};

struct EnergyLine {
  std::string row{};
  std::string impl{};
  ProblemSpec spec{};
  std::string meter{};
  double idle_watts = 0.0;
  Energy energy{};
  Verdict verdict{};
  std::string note{};  // not empty: there is no number, and why
  bool broken = false;

  [[nodiscard]] bool measured() const { return note.empty(); }
  [[nodiscard]] double nj_per_byte() const { return energy.joules_per_call.median() * 1e9 / static_cast<double>(spec.kv_bytes()); }
};

Json to_json(const EnergyLine& line, const EnergyContext& context) {
  Json json{{"row", line.row}, {"impl", line.impl}};
  add_problem(json, line.spec);
  json["kv_bytes"] = line.spec.kv_bytes();
  if (line.measured()) {
    json["call_us"] = line.energy.us_per_call.median();
    json["call_us_min"] = line.energy.us_per_call.min();
    json["call_us_max"] = line.energy.us_per_call.max();
    json["joules_per_call"] = line.energy.joules_per_call.median();
    json["joules_per_call_min"] = line.energy.joules_per_call.min();
    json["joules_per_call_max"] = line.energy.joules_per_call.max();
    json["nj_per_kv_byte"] = line.nj_per_byte();
    json["watts"] = line.energy.watts;
    json["idle_watts"] = line.idle_watts;
    json["windows"] = line.energy.us_per_call.us.size();
    json["seconds"] = line.energy.seconds;
    json["calls"] = line.energy.calls;
    json["meter"] = line.meter;
    json["error_ratio"] = line.verdict.error_ratio;
  } else {
    for (const char* key : {"call_us", "joules_per_call", "nj_per_kv_byte"}) json[key] = nullptr;
  }
  json["device"] = context.device;
  json["driver"] = context.driver;
  json["commit"] = context.commit;
  json["date"] = utc_now();
  json["note"] = line.measured() ? Json(nullptr) : Json(line.note);
  return json;
}

std::string text_header() {
  return fmt::format("{:<24} {:<20} {:>9} {:>11} {:>9} {:>7} {:>7}\n", "row", "impl", "time", "mJ a call", "nJ / byte", "W",
                     "idle W");
}

std::string to_text(const EnergyLine& line) {
  const std::string head = fmt::format("{:<24} {:<20}", line.row, line.impl);
  if (!line.measured()) return fmt::format("{} {}\n", head, line.note);
  return fmt::format("{} {:>9} {:>11.3f} {:>9.3f} {:>7.1f} {:>7.1f}\n", head, time_text(line.energy.us_per_call.median()),
                     line.energy.joules_per_call.median() * 1e3, line.nj_per_byte(), line.energy.watts, line.idle_watts);
}

/// Calls for about so many seconds, and how many they were.
using Work = std::function<std::int64_t(double)>;

/// On the GPU a captured graph of calls, replayed; on the CPU calls one after the other.
Work work_of(const DecodeProblem& problem, const PreparedCall& call) {
  if (problem.place() == Place::kHost) {
    return [&call](double seconds) {
      std::int64_t calls = 0;
      const EnergyClock clock = steady_energy_clock();
      for (const double end = clock.now_seconds() + seconds; calls == 0 || clock.now_seconds() < end; ++calls) call.run();
      return calls;
    };
  }
  const auto chain =
      std::make_shared<CallChain>([&call](std::int64_t copy, void* stream) { call.enqueue(copy, stream); },
                                  Rotation{.copies = problem.pool().copies(), .kv_bytes = problem.spec().kv_bytes()});
  return [chain](double seconds) { return chain->replay_for(seconds * 1e6); };
}

class EnergyBench {
 public:
  EnergyBench(Backend backend, const EnergyMeter& meter, LineSink<EnergyLine>& sink)
      : backend_(backend), meter_(meter), sink_(sink) {}

  void run(const BenchRow& row) {
    std::vector<EnergyLine> lines;
    for (const Implementation& implementation : kImplementations) {
      lines.push_back({.row = row.id, .impl = implementation.name, .spec = row.spec, .meter = meter_.name});
    }
    try {
      measure_row(row, lines);
    } catch (const std::exception& error) {  // what concerns the row: its memory, the idle machine
      for (EnergyLine& line : lines) {
        if (line.note.empty() && line.energy.calls == 0) line.note = std::string("not measured: ") + error.what();
      }
    }
    for (EnergyLine& line : lines) sink_.add(std::move(line), progress_);
  }

 private:
  void measure_row(const BenchRow& row, std::vector<EnergyLine>& lines) {
    const Place place = place_of(backend_);
    const std::int64_t copies = place == Place::kDevice ? copies_for(row.spec.kv_bytes()) : 1;
    require_memory(place, bytes_to_hold(row.spec, copies), "a machine with more");
    progress_.say(row.id + ": making K and V");
    const KvPool pool(row.spec.kv_type(), row.spec.stored_elements(), kBenchSeed, place, copies);
    const DecodeProblem problem(row.spec, pool, kBenchSeed);
    progress_.say(row.id + ": fp64 answers");
    const Oracle oracle(problem);
    progress_.say(row.id + ": idle");
    const double idle = idle_watts(meter_, plan_, clock_);
    for (std::size_t i = 0; i < lines.size(); ++i) {
      lines[i].idle_watts = idle;
      try {
        measure(problem, oracle, kImplementations[i], lines[i]);
      } catch (const std::exception& error) {
        lines[i].note = std::string("not measured: ") + error.what();
        if (place == Place::kDevice) gpu::synchronize();  // throws, and ends the row, where the GPU is lost
      }
    }
  }

  void measure(const DecodeProblem& problem, const Oracle& oracle, const Implementation& implementation, EnergyLine& line) {
    progress_.say(line.row + ": " + line.impl);
    const PreparedCall call(problem, {.backend = backend_, .policy = implementation.policy});
    problem.poison_outputs();
    call.run();
    line.verdict = oracle.check(rounding_of(problem.problem(), call.options()));
    line.broken = !line.verdict.passes();
    if (line.broken) {
      line.note = "wrong: " + line.verdict.worst;
      return;
    }
    line.energy = measure_energy(meter_, line.idle_watts, work_of(problem, call), plan_, clock_);
  }

  Backend backend_;
  const EnergyMeter& meter_;
  LineSink<EnergyLine>& sink_;
  EnergyPlan plan_;
  EnergyClock clock_ = steady_energy_clock();
  Progress progress_;
};

/// Or why there is none.
struct FoundMeter {
  std::optional<EnergyMeter> meter{};
  std::string why_none{};
};

FoundMeter find_meter(Backend backend, const std::shared_ptr<Nvml>& nvml) {
  try {
    if (backend == Backend::kCpu) return {.meter = rapl_meter()};
  } catch (const std::runtime_error& error) {
    return {.why_none = error.what()};
  }
  if (!nvml->joules()) return {.why_none = "no energy counter: NVML has none of this GPU, or is not there"};
  return {.meter = EnergyMeter{.name = "NVML", .joules = [nvml] { return nvml->joules(); }}};
}

EnergyContext context_of(Backend backend, const Nvml* nvml, const std::string& commit) {
  if (backend == Backend::kCpu) return {inspect_machine().cpu_model, "", commit};
  return {gpu::devices().at(0).name, nvml->driver(), commit};
}

void add_unmeasured(const BenchRow& row, const std::string& why, LineSink<EnergyLine>& sink) {
  Progress progress;
  for (const Implementation& implementation : kImplementations) {
    sink.add({.row = row.id, .impl = implementation.name, .spec = row.spec, .note = "not measured: " + why}, progress);
  }
}

}  // namespace

int bench_energy(Backend backend, const BenchSettings& settings, bool json) {
  const std::vector<BenchRow> rows = chosen_rows(settings);
  const auto nvml = backend == Backend::kCuda ? std::make_shared<Nvml>(gpu::devices().at(0).pci_bus_id) : nullptr;
  const EnergyContext context = context_of(backend, nvml.get(), settings.commit);
  LineSink<EnergyLine> sink({.json = [&](const EnergyLine& line) { return to_json(line, context); },
                             .text = [](const EnergyLine& line) { return to_text(line); },
                             .text_header = text_header()},
                            settings.out, json);
  const FoundMeter found = find_meter(backend, nvml);
  for (const BenchRow& row : rows) {
    if (found.meter) {
      EnergyBench(backend, *found.meter, sink).run(row);
    } else {
      add_unmeasured(row, found.why_none, sink);
    }
  }
  const bool broken = std::any_of(sink.lines().begin(), sink.lines().end(), [](const EnergyLine& line) { return line.broken; });
  return broken ? kExitCheckFailed : kExitOk;
}

}  // namespace lean::cli
