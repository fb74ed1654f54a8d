#include "cli/cpu_bench.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <optional>

#include "backends/cpu/tile_kernels.hpp"
#include "cli/bad_argument.hpp"
#include "cli/bench_result.hpp"
#include "cli/bench_rows.hpp"
#include "cli/ceilings.hpp"
#include "cli/command.hpp"
#include "cli/cpu_row_cost.hpp"
#include "cli/earlier_lines.hpp"
#include "cli/line_sink.hpp"
#include "cli/machine.hpp"
#include "cli/prepared_call.hpp"
#include "cli/print.hpp"
#include "cli/row_progress.hpp"
#include "cli/threads.hpp"

namespace lean::cli {
namespace {

constexpr double kShareOfMemory = 0.75;  // of what is available, for a row
constexpr double kWarmUpSeconds = 1.0;   // clocks and page tables settle

/// A row with the numbers of threads that it is still to be measured on, and why it is not.
struct PlannedRow {
  const BenchRow* row = nullptr;
  std::vector<std::int32_t> threads;
  double seconds = 0.0;  // expected; 0: skipped
  std::string reason{};  // empty: measured
};

class CpuBench {
 public:
  CpuBench(const BenchSettings& settings, LineSink<BenchLine>& sink, std::vector<PlannedRow> rows, ComputePeak& peak)
      : settings_(settings), sink_(sink), rows_(std::move(rows)), peak_(peak), progress_(seconds_of(rows_)) {}

  void run() {
    for (const PlannedRow& planned : rows_) {
      progress_.next();
      if (!planned.reason.empty()) {
        skip(planned, planned.reason);
      } else if (limit_.passed()) {
        skip(planned, kOutOfTime);
      } else {
        try_row(planned);
      }
    }
  }

  [[nodiscard]] bool call_failed() const { return call_failed_; }

 private:
  static std::vector<double> seconds_of(const std::vector<PlannedRow>& rows) {
    std::vector<double> seconds;
    for (const PlannedRow& row : rows) seconds.push_back(row.seconds);
    return seconds;
  }

  void try_row(const PlannedRow& planned) {
    PlannedRow left = planned;
    try {
      measure_on(*planned.row, left.threads);
    } catch (const std::exception& error) {
      skip(left, std::string("failed: ") + error.what());
      call_failed_ = true;
    }
  }

  /// Takes from `threads` what it has measured.
  void measure_on(const BenchRow& row, std::vector<std::int32_t>& threads) {
    const KvPool& pool = pool_for(row);
    progress_.say(row.id + ": fp64 answers");
    const DecodeProblem problem(row.spec, pool, kBenchSeed);
    const Oracle oracle(problem, kMaxCheckedProducts);
    warm_up(problem);
    while (!threads.empty()) {
      progress_.say(fmt::format("{}: {} threads", row.id, threads.front()));
      measure_row(row, problem, oracle, threads.front());
      threads.erase(threads.begin());
    }
  }

  /// The one of the row before where it is large enough.
  const KvPool& pool_for(const BenchRow& row) {
    const std::int64_t elements = row.spec.stored_elements();
    if (pool_ && pool_->dtype() == row.spec.kv_type() && pool_elements_ >= elements) return *pool_;
    pool_.reset();
    progress_.say(row.id + ": making K and V");
    pool_elements_ = elements;
    return pool_.emplace(row.spec.kv_type(), elements, kBenchSeed);
  }

  void warm_up(const DecodeProblem& problem) {
    if (warm_) return;
    const ReadCeiling ceiling(problem, thread_count());
    for (double spent_us = 0.0; spent_us < kWarmUpSeconds * 1e6;) spent_us += time_us([&] { ceiling.run(); });
    warm_ = true;
  }

  void skip(const PlannedRow& planned, const std::string& note) {
    for (const std::int32_t threads : planned.threads) {
      for (const Implementation& implementation : kImplementations) {
        BenchLine line = line_of(*planned.row, implementation, threads);
        line.note = note;
        sink_.add(std::move(line), progress_.line());
      }
    }
  }

  static BenchLine line_of(const BenchRow& row, const Implementation& implementation, std::int32_t threads) {
    return {.row = row.id, .suite = row.suite, .impl = implementation.name, .spec = row.spec, .threads = threads};
  }

  void measure_row(const BenchRow& row, const DecodeProblem& problem, const Oracle& oracle, std::int32_t threads) {
    std::vector<BenchLine> lines;
    std::vector<std::unique_ptr<PreparedCall>> calls;
    for (const Implementation& implementation : kImplementations) {
      const Options options{.policy = implementation.policy, .workers = threads};
      BenchLine line = line_of(row, implementation, threads);
      line.isa = name_of(cpu::isa_of(options, problem.problem()));
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
    for (BenchLine& line : lines) sink_.add(std::move(line), progress_.line());
  }

  void time_lines(std::vector<BenchLine>& lines, const std::vector<std::unique_ptr<PreparedCall>>& calls,
                  const DecodeProblem& problem) {
    const std::int32_t threads = lines[0].threads;
    const ReadCeiling ceiling(problem, threads);
    const double compute_us = static_cast<double>(problem.spec().products()) /
                              peak_.products_per_us(arithmetic_of(Options{}, problem.problem()), threads);
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
      if (lines[i].note.empty()) lines[i].note = lines[i].noise();
    }
  }

  const BenchSettings& settings_;
  LineSink<BenchLine>& sink_;
  std::vector<PlannedRow> rows_;
  ComputePeak& peak_;
  RowProgress progress_;
  TimeLimit limit_{settings_.max_seconds};
  std::optional<KvPool> pool_;
  std::int64_t pool_elements_ = 0;
  bool warm_ = false;
  bool call_failed_ = false;
};

/// The most threads first: what is cut by --max-seconds is the least used.
std::vector<std::int32_t> threads_for(const BenchRow& row, const BenchSettings& settings) {
  if (!settings.threads.empty()) return settings.threads;
  if (row.suite != Suite::kCpu) return {thread_count()};
  std::vector<std::int32_t> counts;
  for (std::int32_t threads = thread_count(); threads >= 1; --threads) counts.push_back(threads);
  return counts;
}

/// Rows that earlier runs have are left out; those that do not fit memory or time keep their place, with the reason.
std::vector<PlannedRow> plan_rows(const std::vector<BenchRow>& rows, const BenchSettings& settings, EarlierLines& earlier,
                                  ComputePeak& peak) {
  const double memory = kShareOfMemory * static_cast<double>(available_memory_bytes());
  const std::vector<std::string> impls = names_of({std::begin(kImplementations), std::end(kImplementations)});
  std::vector<PlannedRow> planned;
  for (const BenchRow& row : rows) {
    PlannedRow plan{.row = &row, .threads = threads_for(row, settings)};
    std::erase_if(plan.threads, [&](std::int32_t threads) {
      return earlier.has({.row = row.id, .lens = row.spec.kv_lens, .threads = threads, .impls = impls});
    });
    if (plan.threads.empty()) continue;
    const auto needed = static_cast<double>(bytes_to_measure(row.spec));
    const RowRuns runs{
        .threads = plan.threads, .implementations = static_cast<int>(std::size(kImplementations)), .rounds = settings.rounds};
    const double seconds = seconds_to_measure(row.spec, runs, peak);
    if (!row.missing.empty()) {
      plan.reason = "skipped: this command makes no " + row.missing;
    } else if (needed > memory) {
      plan.reason = fmt::format("skipped: needs {:.1f} GB of memory, {:.1f} GB are for a row", needed / 1e9, memory / 1e9);
    } else if (seconds > settings.row_seconds) {
      plan.reason =
          fmt::format("skipped: expected to take {:.0f} s, --row-seconds is {:g}", std::ceil(seconds), settings.row_seconds);
    } else {
      plan.seconds = seconds;
    }
    planned.push_back(std::move(plan));
  }
  return planned;
}

std::string header(const Machine& machine, std::int64_t cpu_kv_bytes) {
  return fmt::format(
      "{}, {}, {} threads ({}); last-level cache {:.1f} MiB, K and V of a row of suite cpu {:.1f} MiB\n"
      "of read: time of a pure read of the same bytes by as many threads / time. roofline: the same, or the time of the "
      "multiply-adds at the measured peak where that is longer\n\n",
      machine.cpu_model, name_of(best_cpu_isa()), machine.threads, machine.executor,
      static_cast<double>(machine.last_level_cache_bytes()) / (1 << 20), static_cast<double>(cpu_kv_bytes) / (1 << 20));
}

}  // namespace

int bench_cpu(const BenchSettings& settings, bool json) {
  const Machine machine = inspect_machine();
  const std::vector<BenchRow> rows = chosen_rows(settings);
  const BenchContext context{.device = machine.cpu_model,
                             .isa = name_of(best_cpu_isa()),
                             .executor = machine.executor,
                             .commit = settings.commit,
                             .last_level_cache_bytes = machine.last_level_cache_bytes()};
  EarlierLines earlier = settings.resume ? EarlierLines(settings.out, context.device) : EarlierLines();
  ComputePeak peak;
  std::vector<PlannedRow> planned = plan_rows(rows, settings, earlier, peak);
  if (!json) print(header(machine, settings.rows.cpu_kv_bytes));
  LineSink<BenchLine> sink({.json = [&](const BenchLine& line) { return to_json(line, context); },
                            .text = [](const BenchLine& line) { return to_text(line); },
                            .text_header = text_header()},
                           settings.out, json, earlier.text());
  CpuBench bench(settings, sink, std::move(planned), peak);
  bench.run();
  if (!json) print("\n" + summary_text(sink.lines()));
  const bool wrong = std::any_of(sink.lines().begin(), sink.lines().end(), [](const BenchLine& line) { return line.failed(); });
  return wrong || bench.call_failed() ? kExitCheckFailed : kExitOk;
}

}  // namespace lean::cli
