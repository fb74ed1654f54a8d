// lean bench: the declared matrix of a backend, every row of it. Here are the options; cpu_bench.cpp and gpu_bench.cpp measure.
#include <CLI/CLI.hpp>

#include "cli/backend_option.hpp"
#include "cli/bad_argument.hpp"
#include "cli/bench_settings.hpp"
#include "cli/command.hpp"
#include "cli/cpu_bench.hpp"
#include "cli/energy_bench.hpp"
#include "cli/gpu_bench.hpp"
#include "cli/threads.hpp"
#include "cli/validators.hpp"

namespace lean::cli {
namespace {

std::regex regex_of(const std::string& pattern) {
  try {
    return std::regex(pattern);
  } catch (const std::regex_error&) {
    throw BadArgument("--rows", pattern, "a regular expression (ECMAScript)");
  }
}

class BenchCommand final : public Command {
 public:
  std::string name() const override { return "bench"; }
  std::string description() const override { return "Measure the declared matrix against the read and compute ceilings"; }
  std::string example() const override {
    return "lean bench --rows 'g4 .*bf16' --out bench/results/cpu.jsonl\n  lean bench --backend cuda --tier a --peers peers.jsonl";
  }

  void add_options(CLI::App& app) override {
    backend_.add_to(app, "the CPU");
    app.add_option("--rows", rows_, "Rows to measure: a regular expression that is searched for in their ids")
        ->check(not_empty("--rows", "a regular expression (ECMAScript)"))
        ->capture_default_str();
    app.add_flag("--list", list_, "Print the rows and measure nothing");
    app.add_option("--rounds", settings_.rounds, "Rounds of each row")
        ->transform(in_range("--rounds", 1, 100'000))
        ->capture_default_str();
    app.add_option("--max-seconds", settings_.max_seconds, "Rows not begun by then are skipped, with a note")
        ->transform(in_range("--max-seconds", 1e-3, 1e9));
    app.add_option("--out", settings_.out, "Write the lines to this file too, as JSON lines")->check(file_to_write("--out"));
    app.add_option("--commit", settings_.commit, "Commit to record in the lines");
    app.add_flag("--energy", energy_, "Joules of a call in place of its time: four rows of their own, three windows of 10 s each");
    add_cpu_options(app);
    add_gpu_options(app);
  }

  int run(bool json) override {
    const Backend backend = list_ ? backend_.named_or(Backend::kCpu) : backend_.backend_or(Backend::kCpu);
    refuse_options_of_the_other(backend);
    const std::regex pattern = regex_of(rows_);
    if (energy_) return run_energy(backend, pattern, json);
    if (backend == Backend::kCuda) {
      return list_ ? list_gpu_rows(settings_, pattern, json) : bench_gpu(settings_, pattern, json);
    }
    return list_ ? list_cpu_rows(settings_, pattern, json) : bench_cpu(settings_, pattern, json);
  }

 private:
  int run_energy(Backend backend, const std::regex& pattern, bool json) const {
    for (const char* option :
         {"--rounds", "--max-seconds", "--threads", "--kv-mib", "--tier", "--peers", "--resume", "--trace", "--dependent-launch"}) {
      if (app_->count(option) > 0) throw BadArgument(std::string(option) + " does not go with --energy");
    }
    return list_ ? list_energy_rows(pattern, json) : bench_energy(backend, settings_, pattern, json);
  }

  void add_cpu_options(CLI::App& app) {
    app_ = &app;
    app.add_option("--threads", settings_.threads, "Thread counts, as in 1,2,4; all from 1 on by default")
        ->delimiter(',')
        ->transform(in_range("--threads", 1, thread_count()))
        ->group("CPU");
    app.add_option("--kv-mib", settings_.kv_mib, "MiB of K and V of a row; by default 4 times the last-level cache")
        ->transform(in_range("--kv-mib", 1, 1 << 20))
        ->group("CPU");
  }

  void add_gpu_options(CLI::App& app) {
    app.add_option("--tier", settings_.tier, "a: the rows that peers were measured on (default); b: the rest; all")
        ->check(one_of("--tier", {"a", "b", "all"}))
        ->group("GPU");
    app.add_option("--peers", settings_.peers, "JSON lines of other libraries' times, printed beside each row")
        ->check(not_empty("--peers", "a file that can be read"))
        ->group("GPU");
    app.add_flag("--resume", settings_.resume, "Go on with the file of --out: rows it has are not measured again")->group("GPU");
    app.add_flag("--dependent-launch", settings_.dependent, "Measure calls by programmatic dependent launch too")->group("GPU");
    app.add_option("--trace", settings_.trace, "CSV with a column ContextTokens: adds rows of its requests to tier b")
        ->check(not_empty("--trace", "a file that can be read"))
        ->group("GPU");
  }

  void refuse_options_of_the_other(Backend backend) const {
    const bool on_gpu = backend == Backend::kCuda;
    const std::vector<std::string> others =
        on_gpu ? std::vector<std::string>{"--threads", "--kv-mib"}
               : std::vector<std::string>{"--tier", "--peers", "--resume", "--trace", "--dependent-launch"};
    for (const std::string& option : others) {
      if (app_->count(option) > 0) throw BadArgument(option + " goes with --backend " + (on_gpu ? "cpu" : "cuda"));
    }
  }

  CLI::App* app_ = nullptr;
  BackendOption backend_;
  BenchSettings settings_;
  std::string rows_ = ".*";
  bool list_ = false;
  bool energy_ = false;
};

}  // namespace

std::unique_ptr<Command> make_bench_command() { return std::make_unique<BenchCommand>(); }

}  // namespace lean::cli
