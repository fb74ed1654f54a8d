// lean bench: the declared matrix, every row of it. Each row is checked against the oracle, then its implementations and a
// pure read of the same bytes take turns for at least 7 rounds.
#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include <fstream>
#include <optional>
#include <regex>

#include "cli/bad_argument.hpp"
#include "cli/bench_matrix.hpp"
#include "cli/bench_result.hpp"
#include "cli/call_options.hpp"
#include "cli/ceilings.hpp"
#include "cli/command.hpp"
#include "cli/machine.hpp"
#include "cli/prepared_call.hpp"
#include "cli/print.hpp"
#include "cli/threads.hpp"

namespace lean::cli {
namespace {

constexpr std::int64_t kCacheMultiple = 4;                // K/V per last-level cache: no call finds its data there
constexpr std::int64_t kMaxCheckedProducts = 50'000'000;  // of a row: a fraction of a second of the oracle
constexpr double kWarmUpSeconds = 1.0;                    // clocks and page tables settle
constexpr std::uint64_t kSeed = 1;

struct Implementation {
  const char* name;
  Policy policy;
};
const Implementation kImplementations[] = {
    {"lean", Policy::lean()}, {"lean/fixed_split", Policy::fixed_split()}, {"lean/data_parallel", Policy::data_parallel()}};

struct BenchSettings {
  std::string rows = ".*";
  std::vector<std::int32_t> threads;  // empty: 1 to all
  int rounds = 7;
  double max_seconds = 1e9;
  std::int64_t kv_mib = 0;  // 0: kCacheMultiple x the last-level cache
  std::string out;
  std::string commit;
};

std::regex regex_of(const std::string& pattern) {
  try {
    return std::regex(pattern);
  } catch (const std::regex_error&) {
    throw BadArgument("--rows", pattern, "a regular expression (ECMAScript)");
  }
}

/// Writes each line as it comes: to the result file, and to stdout in one of its two forms.
class LineSink {
 public:
  LineSink(const BenchContext& context, const std::string& path, bool json) : context_(context), path_(path), json_(json) {
    if (!path.empty()) write_file("--out", path, "");
    if (!json) print(text_header());
  }

  void add(BenchLine line, Progress& progress) {
    const std::string json_line = to_json(line, context_).dump() + "\n";
    if (!path_.empty()) std::ofstream(path_, std::ios::app) << json_line;
    progress.clear();
    print(json_ ? json_line : to_text(line));
    lines_.push_back(std::move(line));
  }

  [[nodiscard]] const std::vector<BenchLine>& lines() const { return lines_; }

 private:
  const BenchContext& context_;
  std::string path_;
  bool json_;
  std::vector<BenchLine> lines_;
};

class BenchRun {
 public:
  BenchRun(const BenchSettings& settings, std::int64_t kv_bytes, LineSink& sink)
      : settings_(settings), kv_bytes_(kv_bytes), sink_(sink) {}

  void run(const std::vector<MatrixRow>& rows, const std::vector<std::int32_t>& thread_counts) {
    for (const MatrixRow& row : rows) {
      const ProblemSpec spec = spec_of(row, kv_bytes_);
      if (over_time()) {
        skip(row, thread_counts, "skipped: --max-seconds");
        continue;
      }
      const KvPool* pool = pool_for(rows, row.dtype);
      if (pool == nullptr) {
        skip(row, thread_counts, "skipped: not enough memory");
        continue;
      }
      progress_.say(id_of(row) + ": fp64 answers");
      const DecodeProblem problem(spec, *pool, kSeed);
      const Oracle oracle(problem.problem(), kMaxCheckedProducts);
      warm_up(problem);
      for (const std::int32_t threads : thread_counts) {
        progress_.say(fmt::format("{}: {} threads", id_of(row), threads));
        measure_row(id_of(row), problem, oracle, threads);
      }
    }
  }

 private:
  [[nodiscard]] bool over_time() const {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - started_).count() > settings_.max_seconds;
  }

  /// K and V for every row of this dtype; null when they do not fit memory.
  const KvPool* pool_for(const std::vector<MatrixRow>& rows, DType dtype) {
    if (pool_ && pool_->dtype == dtype) return &*pool_;
    pool_.reset();
    std::int64_t elements = 0;
    for (const MatrixRow& row : rows) {
      if (row.dtype == dtype) elements = std::max(elements, spec_of(row, kv_bytes_).stored_elements());
    }
    if (2 * elements * bytes_of(dtype) > available_memory_bytes()) return nullptr;
    progress_.say(fmt::format("making K and V in {}", name_of(dtype)));
    return &pool_.emplace(dtype, elements, kSeed);
  }

  void warm_up(const DecodeProblem& problem) {
    if (warm_) return;
    const ReadCeiling ceiling(problem, thread_count());
    for (double spent_us = 0.0; spent_us < kWarmUpSeconds * 1e6;) spent_us += time_us([&] { ceiling.run(); });
    warm_ = true;
  }

  void skip(const MatrixRow& row, const std::vector<std::int32_t>& thread_counts, const std::string& note) {
    for (const std::int32_t threads : thread_counts) {
      for (const Implementation& implementation : kImplementations) {
        sink_.add(
            {.row = id_of(row), .impl = implementation.name, .spec = spec_of(row, kv_bytes_), .threads = threads, .note = note},
            progress_);
      }
    }
  }

  void measure_row(const std::string& id, const DecodeProblem& problem, const Oracle& oracle, std::int32_t threads) {
    std::vector<BenchLine> lines;
    std::vector<std::unique_ptr<PreparedCall>> calls;
    for (const Implementation& implementation : kImplementations) {
      const Options options{.policy = implementation.policy, .workers = threads};
      BenchLine line{.row = id, .impl = implementation.name, .spec = problem.spec(), .threads = threads};
      try {
        calls.push_back(std::make_unique<PreparedCall>(problem, options));
        problem.poison_outputs();
        calls.back()->run();
        line.verdict = oracle.check(rounding_of(problem.problem(), options));
        if (!line.verdict.passes()) line.note = "wrong: " + line.verdict.worst;
      } catch (const std::exception& error) {
        line.note = std::string("failed: ") + error.what();
        call_failed_ = true;
        if (calls.size() > lines.size()) calls.pop_back();
        calls.push_back(nullptr);
      }
      lines.push_back(std::move(line));
    }
    time_lines(lines, calls, problem);
    for (BenchLine& line : lines) sink_.add(std::move(line), progress_);
  }

  void time_lines(std::vector<BenchLine>& lines, const std::vector<std::unique_ptr<PreparedCall>>& calls,
                  const DecodeProblem& problem) {
    const std::int32_t threads = lines[0].threads;
    const ReadCeiling ceiling(problem, threads);
    const double compute_us = static_cast<double>(problem.spec().products()) /
                              peak_.products_per_us(arithmetic_of(CpuIsa::kBest, problem.spec().dtype), threads);
    std::vector<std::function<void()>> subjects;
    for (const auto& call : calls) {
      if (call != nullptr) subjects.emplace_back([&call] { call->run(); });
    }
    subjects.emplace_back([&ceiling] { ceiling.run(); });
    const auto samples = measure(subjects, {.rounds = settings_.rounds, .min_rounds = settings_.rounds});
    std::size_t next = 0;
    for (std::size_t i = 0; i < lines.size(); ++i) {
      if (calls[i] == nullptr) continue;
      lines[i].call = samples[next++];
      lines[i].ceiling = samples.back();
      lines[i].compute_us = compute_us;
    }
  }

 public:
  [[nodiscard]] bool call_failed() const { return call_failed_; }

 private:
  const BenchSettings& settings_;
  std::int64_t kv_bytes_;
  LineSink& sink_;
  Progress progress_;
  std::chrono::steady_clock::time_point started_ = std::chrono::steady_clock::now();
  std::optional<KvPool> pool_;
  ComputePeak peak_;
  bool warm_ = false;
  bool call_failed_ = false;
};

class BenchCommand final : public Command {
 public:
  std::string name() const override { return "bench"; }
  std::string description() const override { return "Measure the declared matrix against the read and compute ceilings"; }
  std::string example() const override { return "lean bench --backend cpu --rows 'g4 .*bf16' --out bench/results/cpu.jsonl"; }

  void add_options(CLI::App& app) override {
    add_backend_to(app);
    app.add_option("--rows", settings_.rows, "Rows to measure: a regular expression that is searched for in their ids")
        ->capture_default_str();
    app.add_flag("--list", list_, "Print the rows and measure nothing");
    app.add_option("--threads", settings_.threads, "Thread counts, as in 1,2,4; all from 1 on by default")
        ->delimiter(',')
        ->check(CLI::Range(1, thread_count()));
    app.add_option("--rounds", settings_.rounds, "Rounds of each row")->check(CLI::Range(1, 100'000))->capture_default_str();
    app.add_option("--max-seconds", settings_.max_seconds, "Rows not begun by then are skipped, with a note")
        ->check(CLI::PositiveNumber);
    app.add_option("--kv-mib", settings_.kv_mib, "MiB of K and V of a row; by default 4 times the last-level cache")
        ->check(CLI::Range(1, 1 << 20));
    app.add_option("--out", settings_.out, "Write the lines to this file too, as JSON lines");
    app.add_option("--commit", settings_.commit, "Commit to record in the lines");
  }

  int run(bool json) override {
    const Machine machine = inspect_machine();
    const std::int64_t cache_bytes = machine.last_level_cache_bytes();
    const std::int64_t kv_bytes = settings_.kv_mib > 0 ? settings_.kv_mib << 20 : kCacheMultiple * cache_bytes;
    const std::vector<MatrixRow> rows = chosen_rows();
    if (list_) return list(rows, kv_bytes, json);
    const BenchContext context{.device = machine.cpu_model,
                               .isa = name_of(best_cpu_isa()),
                               .executor = machine.executor,
                               .commit = settings_.commit,
                               .last_level_cache_bytes = cache_bytes};
    if (!json) print(header(machine, kv_bytes));
    LineSink sink(context, settings_.out, json);
    BenchRun bench(settings_, kv_bytes, sink);
    bench.run(rows, thread_counts());
    if (!json) print("\n" + summary_text(sink.lines()));
    const bool wrong = std::any_of(sink.lines().begin(), sink.lines().end(), [](const BenchLine& line) { return line.failed(); });
    return wrong || bench.call_failed() ? kExitCheckFailed : kExitOk;
  }

 private:
  [[nodiscard]] std::vector<MatrixRow> chosen_rows() const {
    const std::regex pattern = regex_of(settings_.rows);
    std::vector<MatrixRow> rows = cpu_matrix();
    std::erase_if(rows, [&](const MatrixRow& row) { return !std::regex_search(id_of(row), pattern); });
    if (rows.empty()) throw BadArgument("--rows", settings_.rows, "a pattern that some row's id has; --list shows them");
    return rows;
  }

  /// All threads first: what is cut by --max-seconds is the least used.
  [[nodiscard]] std::vector<std::int32_t> thread_counts() const {
    std::vector<std::int32_t> counts = settings_.threads;
    for (std::int32_t threads = thread_count(); settings_.threads.empty() && threads >= 1; --threads) counts.push_back(threads);
    return counts;
  }

  static int list(const std::vector<MatrixRow>& rows, std::int64_t kv_bytes, bool json) {
    for (const MatrixRow& row : rows) {
      const ProblemSpec spec = spec_of(row, kv_bytes);
      Json line{{"row", id_of(row)}};
      add_problem(line, spec);
      print(json ? line.dump() + "\n" : fmt::format("{:<40}  {}\n", id_of(row), describe(spec)));
    }
    return kExitOk;
  }

  static std::string header(const Machine& machine, std::int64_t kv_bytes) {
    return fmt::format(
        "{}, {}, {} threads ({}); last-level cache {:.1f} MiB, K and V of a row {:.1f} MiB\n"
        "of read: time of a pure read of the same bytes by as many threads / time. roofline: the same, or the time of the "
        "multiply-adds at the measured peak where that is longer\n\n",
        machine.cpu_model, name_of(best_cpu_isa()), machine.threads, machine.executor,
        static_cast<double>(machine.last_level_cache_bytes()) / (1 << 20), static_cast<double>(kv_bytes) / (1 << 20));
  }

  BenchSettings settings_;
  bool list_ = false;
};

}  // namespace

std::unique_ptr<Command> make_bench_command() { return std::make_unique<BenchCommand>(); }

}  // namespace lean::cli
