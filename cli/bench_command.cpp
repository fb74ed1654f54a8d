// lean bench: the declared matrix of a backend, every row of it. Here are the options; cpu_bench.cpp and gpu_bench.cpp measure.
#include <CLI/CLI.hpp>
#include <algorithm>

#include "cli/backend_option.hpp"
#include "cli/bad_argument.hpp"
#include "cli/bench_rows.hpp"
#include "cli/command.hpp"
#include "cli/cpu_bench.hpp"
#include "cli/energy_bench.hpp"
#include "cli/gpu_bench.hpp"
#include "cli/machine.hpp"
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
    return "lean bench --rows 'g4 .*bf16' --out bench/results/cpu.jsonl\n  lean bench --backend cuda --suite ragged,short --peers "
           "peers.jsonl";
  }

  void add_options(CLI::App& app) override {
    backend_.add_to(app, "the CPU");
    app.add_option("--suite", suite_, suite_help())->check(not_empty("--suite", suite_help()));
    app.add_option("--rows", rows_, "Rows to measure: a regular expression that is searched for in their ids")
        ->check(not_empty("--rows", "a regular expression (ECMAScript)"))
        ->capture_default_str();
    app.add_flag("--list", list_, "Print the rows and measure nothing; with --json all that describes them");
    app.add_option("--trace", settings_.rows.trace, "CSV with a column ContextTokens: adds rows of its requests to suite ragged")
        ->check(not_empty("--trace", "a file that can be read"));
    app.add_option("--rounds", settings_.rounds, "Rounds of each row")
        ->transform(in_range("--rounds", 1, 100'000))
        ->capture_default_str();
    app.add_option("--max-seconds", settings_.max_seconds, "Rows not begun by then are skipped, with a note")
        ->transform(in_range("--max-seconds", 1e-3, 1e9));
    app.add_option("--out", settings_.out, "Write the lines to this file too, as JSON lines")->check(file_to_write("--out"));
    app.add_flag("--resume", settings_.resume, "Go on with the file of --out: what it has is not measured again");
    app.add_option("--commit", settings_.commit, "Commit to record in the lines");
    app.add_flag("--energy", energy_, "Joules of a call in place of its time: four rows of their own, three windows of 10 s each");
    add_cpu_options(app);
    add_gpu_options(app);
  }

  int run(bool json) override {
    const Backend backend = list_ ? backend_.named_or(Backend::kCpu) : backend_.backend_or(Backend::kCpu);
    refuse_options_of_the_other(backend);
    if (settings_.resume && settings_.out.empty()) throw BadArgument("--resume goes with --out");
    settings_.pattern = regex_of(rows_);
    if (energy_) refuse_options_of_times();
    settings_.rows.suites = energy_ ? std::vector<Suite>{Suite::kEnergy} : suites_on(backend);
    settings_.rows.tier = tier_;
    settings_.rows.cpu_kv_bytes = cpu_kv_bytes();
    if (list_) return list_rows(settings_, json);
    if (energy_) return bench_energy(backend, settings_, json);
    return backend == Backend::kCuda ? bench_gpu(settings_, json) : bench_cpu(settings_, json);
  }

 private:
  void refuse_options_of_times() const {
    for (const char* option : {"--rounds", "--max-seconds", "--threads", "--kv-mib", "--row-seconds", "--suite", "--tier",
                               "--peers", "--resume", "--trace", "--stream-order"}) {
      if (app_->count(option) > 0) throw BadArgument(std::string(option) + " does not go with --energy");
    }
  }

  void add_cpu_options(CLI::App& app) {
    app_ = &app;
    const auto add_threads = [this](const std::string& text) {
      settings_.threads.clear();
      for (const std::string& item : items_of(text)) settings_.threads.push_back(number_in("--threads", item, 1, thread_count()));
    };
    app.add_option_function<std::string>("--threads", add_threads,
                                         "Thread counts, as in 1,2,4; by default all from 1 on for suite cpu, the most for others")
        ->type_name("INT,...")
        ->group("CPU");
    app.add_option("--kv-mib", kv_mib_, "MiB of K and V of a row of suite cpu; by default 4 times the last-level cache")
        ->transform(in_range("--kv-mib", 1, 1 << 20))
        ->group("CPU");
    app.add_option("--row-seconds", settings_.row_seconds, "Rows that are expected to take longer are skipped, with a note")
        ->transform(in_range("--row-seconds", 1e-3, 1e9))
        ->capture_default_str()
        ->group("CPU");
  }

  void add_gpu_options(CLI::App& app) {
    app.add_option("--tier", tier_, "In place of --suite: a: the rows that peers were measured on (default); b: the rest; all")
        ->check(one_of("--tier", {"a", "b", "all"}))
        ->group("GPU");
    app.add_option("--peers", settings_.peers, "JSON lines of other libraries' times, printed beside each row")
        ->check(not_empty("--peers", "a file that can be read"))
        ->group("GPU");
    app.add_flag("--stream-order", settings_.stream_order,
                 "Measure calls in stream order too, without programmatic dependent launch")
        ->group("GPU");
  }

  void refuse_options_of_the_other(Backend backend) const {
    const bool on_gpu = backend == Backend::kCuda;
    const std::vector<std::string> others = on_gpu ? std::vector<std::string>{"--threads", "--kv-mib", "--row-seconds"}
                                                   : std::vector<std::string>{"--tier", "--peers", "--stream-order"};
    for (const std::string& option : others) {
      if (app_->count(option) > 0) throw BadArgument(option + " goes with --backend " + (on_gpu ? "cpu" : "cuda"));
    }
  }

  static std::string suite_help() {
    std::string names;
    for (const Suite suite : all_suites()) names += std::string(name_of(suite)) + ", ";
    return "Some of " + names + "with commas between them, or all";
  }

  /// Empty: by tier.
  [[nodiscard]] std::vector<Suite> suites_on(Backend backend) const {
    const bool on_gpu = backend == Backend::kCuda;
    if (!suite_.empty() && app_->count("--tier") > 0) throw BadArgument("only one of --suite and --tier may be given");
    if (suite_.empty() && on_gpu) return {};
    std::vector<Suite> suites = parse_suites(suite_.empty() ? name_of(Suite::kCpu) : suite_);
    const auto has = [&](Suite suite) { return std::find(suites.begin(), suites.end(), suite) != suites.end(); };
    if (!settings_.rows.trace.empty() && !has(Suite::kRagged)) throw BadArgument("--trace goes with --suite ragged");
    if (kv_mib_ > 0 && !has(Suite::kCpu)) throw BadArgument("--kv-mib goes with --suite cpu");
    if (!on_gpu) return suites;
    if (has(Suite::kCpu) && suite_ != "all") throw BadArgument("--suite", name_of(Suite::kCpu), "goes with --backend cpu");
    std::erase(suites, Suite::kCpu);
    return suites;
  }

  [[nodiscard]] std::int64_t cpu_kv_bytes() const {
    constexpr std::int64_t kCacheMultiple = 4;  // no call finds its data in the last-level cache
    return kv_mib_ > 0 ? kv_mib_ << 20 : kCacheMultiple * inspect_machine().last_level_cache_bytes();
  }

  CLI::App* app_ = nullptr;
  BackendOption backend_;
  BenchSettings settings_;
  std::string suite_;
  std::string tier_ = "a";
  std::string rows_ = ".*";
  std::int64_t kv_mib_ = 0;
  bool list_ = false;
  bool energy_ = false;
};

}  // namespace

std::unique_ptr<Command> make_bench_command() { return std::make_unique<BenchCommand>(); }

}  // namespace lean::cli
