#include "cli/gpu_bench.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <memory>
#include <optional>

#include "cli/bad_argument.hpp"
#include "cli/bench_rows.hpp"
#include "cli/call_chain.hpp"
#include "cli/command.hpp"
#include "cli/earlier_lines.hpp"
#include "cli/gpu_ceiling.hpp"
#include "cli/gpu_line.hpp"
#include "cli/gpu_timing.hpp"
#include "cli/line_sink.hpp"
#include "cli/oracle.hpp"
#include "cli/prepared_call.hpp"
#include "cli/row_progress.hpp"

namespace lean::cli {
namespace {

constexpr double kWarmUpUs = 1.5e6;                            // clocks settle
constexpr double kClockMoved = 0.03;                           // voids a row
constexpr std::int64_t kSpareBytes = std::int64_t{512} << 20;  // workspaces, graphs and the runtime itself

/// Device memory of a row: K and V, the outputs, and the oracle's answers to every row.
std::int64_t bytes_needed(const ProblemSpec& spec) {
  const std::int64_t pool = KvPool::bytes_for(spec.kv_type(), spec.stored_elements(), copies_for(spec.kv_bytes()));
  return pool + spec.query_elements() * (2 * bytes_of(spec.dtype) + 3 * static_cast<std::int64_t>(sizeof(double))) + kSpareBytes;
}

class GpuBench {
 public:
  GpuBench(const BenchSettings& settings, const std::vector<Implementation>& implementations, const Peers& peers,
           LineSink<GpuLine>& sink)
      : settings_(settings), implementations_(implementations), peers_(peers), sink_(sink) {}

  void run(const std::vector<BenchRow>& rows) {
    RowProgress& progress = progress_.emplace(costs_of(rows));
    for (const BenchRow& row : rows) {
      progress.next();
      std::vector<GpuLine> lines = lines_of(row);
      const std::string reason = reason_to_skip(row);
      if (!reason.empty()) {
        for (GpuLine& line : lines) line.note = reason;
      } else {
        try_row(row, lines);
      }
      for (GpuLine& line : lines) sink_.add(std::move(line), progress.line());
    }
  }

 private:
  /// Every row takes about as long as its rounds do, and the oracle reads what it needs.
  static std::vector<double> costs_of(const std::vector<BenchRow>& rows) {
    constexpr double kProductsASecond = 1e11;
    std::vector<double> costs;
    for (const BenchRow& row : rows) {
      costs.push_back(row.missing.empty() ? 1.0 + static_cast<double>(row.spec.products()) / kProductsASecond : 0.0);
    }
    return costs;
  }

  [[nodiscard]] std::vector<GpuLine> lines_of(const BenchRow& row) const {
    std::vector<GpuLine> lines;
    const PeerTime* peer = row.missing.empty() ? peers_.best(row.spec) : nullptr;
    for (const Implementation& implementation : implementations_) {
      lines.push_back({.row = row.id, .suite = row.suite, .tier = row.tier, .impl = implementation.name, .spec = row.spec});
      if (peer != nullptr && lines.size() == 1) lines.back().peer = *peer;
    }
    return lines;
  }

  [[nodiscard]] std::string reason_to_skip(const BenchRow& row) const {
    if (!row.missing.empty()) return "skipped: this command makes no " + row.missing;
    if (lost_) return "skipped: the GPU stopped answering";
    if (limit_.passed()) return kOutOfTime;
    const std::int64_t needed = bytes_needed(row.spec);
    const std::int64_t free = gpu::free_bytes();
    if (needed <= free) return {};
    return fmt::format("skipped: needs {:.1f} GB of device memory, {:.1f} GB are free", static_cast<double>(needed) / 1e9,
                       static_cast<double>(free) / 1e9);
  }

  void try_row(const BenchRow& row, std::vector<GpuLine>& lines) {
    try {
      measure_row(row, lines);
    } catch (const std::exception& error) {
      for (GpuLine& line : lines) {
        line.call = {};
        if (line.note.empty()) fail(line, error);
      }
      lost_ = !answers();
    }
  }

  static void fail(GpuLine& line, const std::exception& error) {
    line.note = std::string("failed: ") + error.what();
    line.broken = true;
  }

  /// An illegal address takes the whole process's device with it.
  static bool answers() {
    try {
      gpu::synchronize();
      return true;
    } catch (const GpuError&) {
      return false;
    }
  }

  void measure_row(const BenchRow& row, std::vector<GpuLine>& lines) {
    progress_->say(row.id + ": making K and V");
    const KvPool pool(row.spec.kv_type(), row.spec.stored_elements(), kBenchSeed, Place::kDevice, copies_for(row.spec.kv_bytes()));
    const DecodeProblem problem(row.spec, pool, kBenchSeed);
    warm_up(problem);
    progress_->say(row.id + ": fp64 answers");
    const Oracle oracle(problem);
    progress_->say(row.id);

    std::vector<std::unique_ptr<PreparedCall>> calls;
    std::vector<GpuLine*> timed;
    for (std::size_t i = 0; i < lines.size(); ++i) {
      if (auto call = first_call(problem, oracle, implementations_[i], lines[i])) {
        calls.push_back(std::move(call));
        timed.push_back(&lines[i]);
      }
    }
    time_lines(problem, oracle, calls, timed);
  }

  /// The call after one that was right or wrong; null when there was none.
  std::unique_ptr<PreparedCall> first_call(const DecodeProblem& problem, const Oracle& oracle, const Implementation& implementation,
                                           GpuLine& line) {
    try {
      auto call = std::make_unique<PreparedCall>(problem, options_of(implementation));
      problem.poison_outputs();
      call->run();
      judge(problem, oracle, *call, line);
      line.work = work_of(problem, call->options());
      return call;
    } catch (const std::exception& error) {
      fail(line, error);
      if (!answers()) throw;
      return nullptr;
    }
  }

  static Options options_of(const Implementation& implementation) {
    return {.backend = Backend::kCuda, .policy = implementation.policy, .dependent_launch = implementation.dependent_launch};
  }

  static GpuWork work_of(const DecodeProblem& problem, const Options& options) {
    const explain::ScheduleMap map = map_of(problem.shape(), options);
    GpuWork work{.workers = map.plan.workers,
                 .contributors = map.max_contributors,
                 .tile_bytes = 2 * map.shape.tile_tokens * problem.spec().head_dim * bytes_of(problem.spec().kv_type())};
    for (const explain::WorkerShare& share : map.workers) {
      work.tiles = std::max(work.tiles, share.tiles);
      work.segments = std::max(work.segments, static_cast<std::int64_t>(share.segments.size()));
    }
    return work;
  }

  /// Keeps the worse of this verdict and an earlier one.
  static void judge(const DecodeProblem& problem, const Oracle& oracle, const PreparedCall& call, GpuLine& line) {
    Verdict verdict = oracle.check(rounding_of(problem.problem(), call.options()));
    if (line.verdict.rows_checked > 0 && verdict.error_ratio <= line.verdict.error_ratio) return;
    line.verdict = std::move(verdict);
    if (line.verdict.passes()) return;
    line.note = "wrong: " + line.verdict.worst;
    line.broken = true;
  }

  void time_lines(const DecodeProblem& problem, const Oracle& oracle, const std::vector<std::unique_ptr<PreparedCall>>& calls,
                  const std::vector<GpuLine*>& lines) {
    std::vector<const PreparedCall*> subjects;
    for (const auto& call : calls) subjects.push_back(call.get());
    const auto check = [&](std::size_t i) { judge(problem, oracle, *calls[i], *lines[i]); };
    const GpuTimes times = time_on_gpu(problem, subjects, instruments_, {.rounds = settings_.rounds, .check = check});
    for (std::size_t i = 0; i < lines.size(); ++i) {
      lines[i]->call = times.calls[i];
      lines[i]->ceiling = times.ceiling;
      lines[i]->ceiling_kernel = times.ceiling_kernel;
      lines[i]->copies = problem.pool().copies();
      lines[i]->state_before = times.state_before;
      lines[i]->state_after = times.state_after;
      const double before = times.state_before.sm_clock_mhz;
      const double after = times.state_after.sm_clock_mhz;
      if (before > 0.0 && std::abs(after / before - 1.0) > kClockMoved && lines[i]->note.empty()) {
        lines[i]->note = fmt::format("void: the SM clock moved from {:.0f} to {:.0f} MHz", before, after);
      }
    }
  }

  void warm_up(const DecodeProblem& problem) {
    if (warm_) return;
    const GpuReadCeiling ceiling(problem, instruments_.read_kernels);
    const CallChain chain([&](std::int64_t copy, void* stream) { ceiling.enqueue(copy, stream); },
                          {.copies = problem.pool().copies(), .kv_bytes = problem.spec().kv_bytes()});
    (void)chain.us_per_call(kWarmUpUs);
    warm_ = true;
  }

  const BenchSettings& settings_;
  const std::vector<Implementation>& implementations_;
  const Peers& peers_;
  LineSink<GpuLine>& sink_;
  GpuInstruments instruments_;
  std::optional<RowProgress> progress_;
  TimeLimit limit_{settings_.max_seconds};
  bool warm_ = false;
  bool lost_ = false;
};

std::vector<Implementation> implementations_of(const BenchSettings& settings) {
  std::vector<Implementation> implementations(std::begin(kImplementations), std::end(kImplementations));
  if (settings.stream_order) implementations.push_back(kStreamOrder);
  return implementations;
}

std::string header(const gpu::Device& device, const GpuContext& context, const Peers& peers, const std::string& peers_path) {
  std::string text = fmt::format(
      "{}: {} multiprocessors, {:.1f} GiB, driver {}\n"
      "of read: time of a pure read of the same bytes / time. alone: one call, not in a chain. error: error / bound\n",
      device.name, device.multiprocessors, static_cast<double>(device.memory_bytes) / (1 << 30), context.driver);
  if (!peers.empty()) {
    text += fmt::format(
        "peers: {}, measured on {}; below 1 lean is faster; where the two read ceilings differ by more than 3 %, times / ceilings "
        "are compared\n",
        peers_path, peers.device());
  }
  return text + "\n";
}

}  // namespace

int bench_gpu(const BenchSettings& settings, bool json) {
  const gpu::Device device = gpu::devices().at(0);
  const Peers peers = settings.peers.empty() ? Peers() : Peers(settings.peers);
  const GpuContext context{
      .device = device.name, .driver = Nvml(device.pci_bus_id).driver(), .commit = settings.commit, .peers_device = peers.device()};
  EarlierLines earlier = settings.resume ? EarlierLines(settings.out, context.device) : EarlierLines();
  const std::vector<Implementation> implementations = implementations_of(settings);
  std::vector<BenchRow> rows = chosen_rows(settings);
  std::erase_if(rows, [&](const BenchRow& row) {
    return earlier.has({.row = row.id, .lens = row.spec.kv_lens, .impls = names_of(implementations)});
  });
  if (!json) print(header(device, context, peers, settings.peers));
  LineSink<GpuLine> sink({.json = [&](const GpuLine& line) { return to_json(line, context); },
                          .text = [](const GpuLine& line) { return to_text(line); },
                          .text_header = gpu_text_header(!peers.empty())},
                         settings.out, json, earlier.text());
  GpuBench(settings, implementations, peers, sink).run(rows);
  if (!json) print("\n" + summary_text(sink.lines()));
  const bool broken = std::any_of(sink.lines().begin(), sink.lines().end(), [](const GpuLine& line) { return line.broken; });
  return broken ? kExitCheckFailed : kExitOk;
}

}  // namespace lean::cli
