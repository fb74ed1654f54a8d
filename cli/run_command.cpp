// lean run: one decode call on N(0, 1) data, on the CPU or the GPU, checked against the fp64 oracle and measured against a
// pure read.
#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include "backends/cpu/tile_kernels.hpp"
#include "cli/call_chain.hpp"
#include "cli/call_options.hpp"
#include "cli/ceilings.hpp"
#include "cli/command.hpp"
#include "cli/gpu_timing.hpp"
#include "cli/measure.hpp"
#include "cli/oracle.hpp"
#include "cli/prepared_call.hpp"
#include "cli/print.hpp"
#include "cli/problem_json.hpp"
#include "cli/problem_options.hpp"
#include "cli/threads.hpp"
#include "cli/validators.hpp"
#include "explain/words.hpp"

namespace lean::cli {
namespace {

struct RunResult {
  ProblemSpec spec{};
  Options options{};
  std::int32_t threads = 0;  // CPU
  CpuIsa isa{};              // CPU
  std::string device{};      // GPU
  Samples call{};
  Samples isolated{};  // GPU: one call, not in a chain
  Samples ceiling{};
  std::string ceiling_kernel{};
  explain::ScheduleMap map{};
  Verdict verdict{};

  [[nodiscard]] bool on_gpu() const { return options.backend == Backend::kCuda; }
  [[nodiscard]] double gbps() const { return static_cast<double>(spec.kv_bytes()) / call.median() / 1e3; }
  [[nodiscard]] double read_fraction() const { return ceiling.median() / call.median(); }
};

std::string to_text(const RunResult& r) {
  const auto times = [](const Samples& s) {
    return fmt::format("{} (min {}, max {}, {} rounds)", time_text(s.median()), time_text(s.min()), time_text(s.max()),
                       s.us.size());
  };
  const explain::Balance& tiles = r.map.tiles;
  std::string text = describe(r.spec) + "\n";
  text += fmt::format("  schedule   {}, {}, {}\n", explain::words::policy_words(r.map), explain::words::workers_words(r.map),
                      explain::words::sharing_words(r.map));
  if (r.on_gpu()) text += fmt::format("  device     {}\n", r.device);
  text += fmt::format("  time       {}\n", times(r.call));
  if (r.on_gpu()) text += fmt::format("  alone      {}\n", times(r.isolated));
  text += fmt::format("  bandwidth  {:.2f} GB/s, {} of a pure read of the same bytes: {}\n", r.gbps(),
                      percent_text(r.read_fraction()), times(r.ceiling));
  text += fmt::format("  balance    {} (mean {:.1f} / longest {} tiles per worker)\n", explain::words::percent(tiles.ratio()),
                      tiles.mean, tiles.max);
  text += fmt::format("  check      {}: {} of {} rows, {}\n", r.verdict.passes() ? "ok" : "FAILED", r.verdict.rows_checked,
                      r.verdict.rows, r.verdict.worst.empty() ? "nothing to compare" : r.verdict.worst);
  return text;
}

Json to_json(const RunResult& r) {
  Json json{{"command", "run"}};
  add_problem(json, r.spec);
  json["schedule"] = policy_text(r.map.policy);
  json["backend"] = name_of(r.options.backend);
  json["workers"] = r.map.workers_asked;
  if (r.on_gpu()) {
    json["device"] = r.device;
    json["us_isolated"] = r.isolated.median();
  } else {
    json["isa"] = name_of(r.isa);
    json["threads"] = r.threads;
  }
  add_times(json, r.call);
  json["gbps"] = r.gbps();
  json["ceiling_us"] = r.ceiling.median();
  json["ceiling_kernel"] = r.ceiling_kernel;
  json["read_fraction"] = r.read_fraction();
  json["balance"] = r.map.tiles.ratio();
  json["error_ratio"] = r.verdict.error_ratio;
  json["rows_checked"] = r.verdict.rows_checked;
  json["rows"] = r.verdict.rows;
  json["worst"] = r.verdict.worst;
  json["passes"] = r.verdict.passes();
  return json;
}

class RunCommand final : public Command {
 public:
  std::string name() const override { return "run"; }
  std::string description() const override { return "Run one decode call, check it against the fp64 oracle, measure it"; }
  std::string example() const override {
    return "lean run --lens 1000,37,5001 --q-heads 32 --kv-heads 8 --dtype bf16 --schedule lean";
  }

  void add_options(CLI::App& app) override {
    problem_.add_to(app);
    call_.add_to(app);
    app.add_option("--seed", seed_, "Seed of the data")
        ->transform(in_range("--seed", std::uint64_t{0}, UINT64_MAX))
        ->capture_default_str();
    app.add_option("--repeat", repeat_, "Rounds to time")->transform(in_range("--repeat", 1, 1'000'000))->capture_default_str();
  }

  int run(bool json) override {
    const RunResult result = measure_and_check(call_.options(), problem_.spec());
    print(json ? line_of(to_json(result)) : to_text(result));
    return result.verdict.passes() ? kExitOk : kExitCheckFailed;
  }

 private:
  RunResult measure_and_check(const Options& options, const ProblemSpec& spec) const {
    Progress progress;
    const Place place = place_of(options.backend);
    const std::int64_t copies = place == Place::kDevice ? copies_for(spec.kv_bytes()) : 1;
    require_memory(place, bytes_to_hold(spec, copies), "ask for fewer or shorter requests, or fewer heads");
    progress.say("making K and V");
    const KvPool pool(spec.kv_type(), spec.stored_elements(), seed_, place, copies, spec.kv_tensors());
    const DecodeProblem problem(spec, pool, seed_);
    const PreparedCall call(problem, options);
    RunResult result{.spec = spec, .options = options, .map = map_of(problem.shape(), options)};
    if (place == Place::kDevice) {
      measure_on_gpu(problem, call, result, progress);
    } else {
      measure_on_cpu(problem, call, result, progress);
    }
    return result;
  }

  void measure_on_cpu(const DecodeProblem& problem, const PreparedCall& call, RunResult& result, Progress& progress) const {
    result.threads = std::min(thread_count(), result.map.workers_asked);
    result.isa = cpu::isa_of(result.options, problem.problem());
    progress.say("measuring");
    problem.poison_outputs();
    call.run();
    const ReadCeiling ceiling(problem, result.threads);
    const auto samples = measure({[&] { call.run(); }, [&] { ceiling.run(); }}, {.rounds = repeat_});
    result.call = samples[0];
    result.ceiling = samples[1];
    result.ceiling_kernel = ceiling.kernel_name();

    progress.say("checking every row against the fp64 oracle");
    problem.poison_outputs();
    call.run();
    result.verdict = Oracle(problem).check(rounding_of(problem.problem(), result.options));
  }

  /// What is checked is the result of the calls that were timed.
  void measure_on_gpu(const DecodeProblem& problem, const PreparedCall& call, RunResult& result, Progress& progress) const {
    progress.say("computing the fp64 answers to check against");
    const Oracle oracle(problem);
    progress.say("measuring");
    const GpuInstruments instruments;
    const auto check = [&](std::size_t) { result.verdict = oracle.check(rounding_of(problem.problem(), result.options)); };
    GpuTimes times = time_on_gpu(problem, {&call}, instruments, {.rounds = repeat_, .check = check});
    result.device = gpu::devices().at(0).name;
    result.call = std::move(times.calls[0].chained);
    result.isolated = std::move(times.calls[0].isolated);
    result.ceiling = std::move(times.ceiling.chained);
    result.ceiling_kernel = times.ceiling_kernel;
  }

  ProblemOptions problem_;
  CallOptions call_;
  std::uint64_t seed_ = 1;
  int repeat_ = 7;
};

}  // namespace

std::unique_ptr<Command> make_run_command() { return std::make_unique<RunCommand>(); }

}  // namespace lean::cli
