#include "cli/cpu_bench.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <optional>

#include "backends/cpu/tile_kernels.hpp"
#include "cli/bad_argument.hpp"
#include "cli/bench_matrix.hpp"
#include "cli/bench_result.hpp"
#include "cli/ceilings.hpp"
#include "cli/command.hpp"
#include "cli/line_sink.hpp"
#include "cli/machine.hpp"
#include "cli/prepared_call.hpp"
#include "cli/print.hpp"
#include "cli/threads.hpp"

namespace lean::cli {
namespace {

constexpr std::int64_t kCacheMultiple = 4;                // K/V per last-level cache: no call finds its data there
constexpr std::int64_t kMaxCheckedProducts = 50'000'000;  // of a row: a fraction of a second of the oracle
constexpr double kWarmUpSeconds = 1.0;                    // clocks and page tables settle

class CpuBench {
 public:
  CpuBench(const BenchSettings& settings, std::int64_t kv_bytes, LineSink<BenchLine>& sink)
      : settings_(settings), kv_bytes_(kv_bytes), sink_(sink) {}

  void run(const std::vector<MatrixRow>& rows, const std::vector<std::int32_t>& thread_counts) {
    for (const MatrixRow& row : rows) {
      const ProblemSpec spec = spec_of(row, kv_bytes_);
      if (limit_.passed()) {
        skip(row, thread_counts, "skipped: --max-seconds");
        continue;
      }
      const KvPool* pool = pool_for(rows, row.dtype);
      if (pool == nullptr) {
        skip(row, thread_counts, "skipped: not enough memory");
        continue;
      }
      progress_.say(id_of(row) + ": fp64 answers");
      const DecodeProblem problem(spec, *pool, kBenchSeed);
      const Oracle oracle(problem, kMaxCheckedProducts);
      warm_up(problem);
      for (const std::int32_t threads : thread_counts) {
        progress_.say(fmt::format("{}: {} threads", id_of(row), threads));
        measure_row(id_of(row), problem, oracle, threads);
      }
    }
  }

  [[nodiscard]] bool call_failed() const { return call_failed_; }

 private:
  /// K and V for every row of this dtype; null when they do not fit memory.
  const KvPool* pool_for(const std::vector<MatrixRow>& rows, DType dtype) {
    if (pool_ && pool_->dtype() == dtype) return &*pool_;
    pool_.reset();
    std::int64_t elements = 0;
    for (const MatrixRow& row : rows) {
      if (row.dtype == dtype) elements = std::max(elements, spec_of(row, kv_bytes_).stored_elements());
    }
    if (2 * elements * bytes_of(dtype) > available_memory_bytes()) return nullptr;
    progress_.say(fmt::format("making K and V in {}", name_of(dtype)));
    return &pool_.emplace(dtype, elements, kBenchSeed);
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
    for (BenchLine& line : lines) sink_.add(std::move(line), progress_);
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
  std::int64_t kv_bytes_;
  LineSink<BenchLine>& sink_;
  Progress progress_;
  TimeLimit limit_{settings_.max_seconds};
  std::optional<KvPool> pool_;
  ComputePeak peak_;
  bool warm_ = false;
  bool call_failed_ = false;
};

std::int64_t kv_bytes_of(const BenchSettings& settings, const Machine& machine) {
  return settings.kv_mib > 0 ? settings.kv_mib << 20 : kCacheMultiple * machine.last_level_cache_bytes();
}

std::vector<MatrixRow> chosen_rows(const std::regex& pattern) {
  std::vector<MatrixRow> rows = cpu_matrix();
  std::erase_if(rows, [&](const MatrixRow& row) { return !std::regex_search(id_of(row), pattern); });
  if (rows.empty()) throw BadArgument("--rows: no row's id has the pattern; --list shows them");
  return rows;
}

/// All threads first: what is cut by --max-seconds is the least used.
std::vector<std::int32_t> thread_counts(const BenchSettings& settings) {
  std::vector<std::int32_t> counts = settings.threads;
  for (std::int32_t threads = thread_count(); settings.threads.empty() && threads >= 1; --threads) counts.push_back(threads);
  return counts;
}

std::string header(const Machine& machine, std::int64_t kv_bytes) {
  return fmt::format(
      "{}, {}, {} threads ({}); last-level cache {:.1f} MiB, K and V of a row {:.1f} MiB\n"
      "of read: time of a pure read of the same bytes by as many threads / time. roofline: the same, or the time of the "
      "multiply-adds at the measured peak where that is longer\n\n",
      machine.cpu_model, name_of(best_cpu_isa()), machine.threads, machine.executor,
      static_cast<double>(machine.last_level_cache_bytes()) / (1 << 20), static_cast<double>(kv_bytes) / (1 << 20));
}

}  // namespace

int bench_cpu(const BenchSettings& settings, const std::regex& pattern, bool json) {
  const Machine machine = inspect_machine();
  const std::int64_t kv_bytes = kv_bytes_of(settings, machine);
  const std::vector<MatrixRow> rows = chosen_rows(pattern);
  const BenchContext context{.device = machine.cpu_model,
                             .isa = name_of(best_cpu_isa()),
                             .executor = machine.executor,
                             .commit = settings.commit,
                             .last_level_cache_bytes = machine.last_level_cache_bytes()};
  if (!json) print(header(machine, kv_bytes));
  LineSink<BenchLine> sink({.json = [&](const BenchLine& line) { return to_json(line, context); },
                            .text = [](const BenchLine& line) { return to_text(line); },
                            .text_header = text_header()},
                           settings.out, json);
  CpuBench bench(settings, kv_bytes, sink);
  bench.run(rows, thread_counts(settings));
  if (!json) print("\n" + summary_text(sink.lines()));
  const bool wrong = std::any_of(sink.lines().begin(), sink.lines().end(), [](const BenchLine& line) { return line.failed(); });
  return wrong || bench.call_failed() ? kExitCheckFailed : kExitOk;
}

int list_cpu_rows(const BenchSettings& settings, const std::regex& pattern, bool json) {
  const std::int64_t kv_bytes = kv_bytes_of(settings, inspect_machine());
  for (const MatrixRow& row : chosen_rows(pattern)) {
    const ProblemSpec spec = spec_of(row, kv_bytes);
    Json line{{"row", id_of(row)}};
    add_problem(line, spec);
    print(json ? line.dump() + "\n" : fmt::format("{:<40}  {}\n", id_of(row), describe(spec)));
  }
  return kExitOk;
}

}  // namespace lean::cli
