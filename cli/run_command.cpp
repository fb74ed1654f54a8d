// lean run: one decode call on N(0, 1) data, checked against the fp64 oracle and measured against a pure read.
#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include "cli/call_options.hpp"
#include "cli/ceilings.hpp"
#include "cli/command.hpp"
#include "cli/measure.hpp"
#include "cli/oracle.hpp"
#include "cli/prepared_call.hpp"
#include "cli/print.hpp"
#include "cli/problem_json.hpp"
#include "cli/problem_options.hpp"
#include "cli/threads.hpp"
#include "schedule/explain_format.hpp"

namespace lean::cli {
namespace {

struct RunResult {
  ProblemSpec spec{};
  Options options{};
  std::int32_t threads = 0;
  Samples call{};
  Samples ceiling{};
  std::string ceiling_kernel{};
  schedule::ScheduleMap map{};
  Verdict verdict{};

  [[nodiscard]] double gbps() const { return static_cast<double>(spec.kv_bytes()) / call.median() / 1e3; }
  [[nodiscard]] double read_fraction() const { return ceiling.median() / call.median(); }
};

std::string to_text(const RunResult& r) {
  const auto times = [](const Samples& s) {
    return fmt::format("{} (min {}, max {}, {} rounds)", time_text(s.median()), time_text(s.min()), time_text(s.max()),
                       s.us.size());
  };
  const schedule::Balance& tiles = r.map.tiles;
  std::string text = describe(r.spec) + "\n";
  text += fmt::format("  schedule   {}, {}, {}\n", schedule::format::policy_words(r.map), schedule::format::workers_words(r.map),
                      schedule::format::sharing_words(r.map));
  text += fmt::format("  time       {}\n", times(r.call));
  text += fmt::format("  bandwidth  {:.2f} GB/s, {} of a pure read of the same bytes: {}\n", r.gbps(),
                      percent_text(r.read_fraction()), times(r.ceiling));
  text += fmt::format("  balance    {} (mean {:.1f} / longest {} tiles per worker)\n", schedule::format::percent(tiles.ratio()),
                      tiles.mean, tiles.max);
  text += fmt::format("  check      {}: {} of {} rows, {}\n", r.verdict.passes() ? "ok" : "FAILED", r.verdict.rows_checked,
                      r.verdict.rows, r.verdict.worst.empty() ? "nothing to compare" : r.verdict.worst);
  return text;
}

Json to_json(const RunResult& r) {
  Json json{{"command", "run"}};
  add_problem(json, r.spec);
  json["schedule"] = policy_text(r.map.policy);
  json["isa"] = name_of(r.options.cpu_isa == CpuIsa::kBest ? best_cpu_isa() : r.options.cpu_isa);
  json["workers"] = r.map.workers_asked;
  json["threads"] = r.threads;
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
    app.add_option("--seed", seed_, "Seed of the data")->check(CLI::NonNegativeNumber)->capture_default_str();
    app.add_option("--repeat", repeat_, "Rounds to time")->check(CLI::Range(1, 1'000'000))->capture_default_str();
  }

  int run(bool json) override {
    const RunResult result = measure_and_check(call_.options(), problem_.spec());
    print(json ? to_json(result).dump() + "\n" : to_text(result));
    return result.verdict.passes() ? kExitOk : kExitCheckFailed;
  }

 private:
  RunResult measure_and_check(const Options& options, const ProblemSpec& spec) const {
    Progress progress;
    require_memory(2 * spec.stored_elements() * bytes_of(spec.dtype), "ask for fewer or shorter requests");
    progress.say("making K and V");
    const KvPool pool(spec.dtype, spec.stored_elements(), seed_);
    const DecodeProblem problem(spec, pool, seed_);
    const PreparedCall call(problem, options);
    RunResult result{.spec = spec, .options = options, .map = map_of(problem.problem(), options)};
    result.threads = std::min(thread_count(), result.map.workers_asked);

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
    result.verdict = Oracle(problem.problem()).check(rounding_of(problem.problem(), options));
    return result;
  }

  ProblemOptions problem_;
  CallOptions call_;
  std::uint64_t seed_ = 1;
  int repeat_ = 7;
};

}  // namespace

std::unique_ptr<Command> make_run_command() { return std::make_unique<RunCommand>(); }

}  // namespace lean::cli
