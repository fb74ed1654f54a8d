// lean demo: the main job on real request lengths. Decode attention of one Llama-3-8B layer for a batch of conversation
// requests, by each of the paper's schedules, in one table; and the paper's first figure for this very batch. Takes the GPU
// where there is one.
#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include <algorithm>

#include "backends/cpu/tile_kernels.hpp"
#include "cli/backend_option.hpp"
#include "cli/bad_argument.hpp"
#include "cli/call_chain.hpp"
#include "cli/call_options.hpp"
#include "cli/ceilings.hpp"
#include "cli/command.hpp"
#include "cli/gpu_timing.hpp"
#include "cli/machine.hpp"
#include "cli/measure.hpp"
#include "cli/noise.hpp"
#include "cli/oracle.hpp"
#include "cli/prepared_call.hpp"
#include "cli/print.hpp"
#include "cli/problem_json.hpp"
#include "cli/trace.hpp"
#include "cli/validators.hpp"
#include "explain/words.hpp"
#include "lean/version.hpp"

namespace lean::cli {
namespace {

constexpr std::int32_t kPredictedWorkers = 132;              // one a streaming multiprocessor of an H100 or H200
constexpr std::int64_t kMaxKvBytes = std::int64_t{2} << 30;  // of a whole trace: keeps the demo under a minute
constexpr std::int64_t kMaxCheckedProducts = 1'000'000'000;  // a few seconds of the oracle
constexpr std::uint64_t kSeed = 1;

constexpr const char* kAttribution =
    "Azure LLM inference trace 2023, conversations (Azure/AzurePublicDataset, CC-BY 4.0; Patel et al., \"Splitwise\", ISCA 2024)";

struct DemoRow {
  Policy policy{};
  explain::ScheduleMap map{};        // for the workers used
  explain::ScheduleMap predicted{};  // on the CPU: for kPredictedWorkers
  Samples call{};
  Verdict verdict{};
};

struct Demo {
  Backend backend = Backend::kCpu;
  CpuIsa isa = CpuIsa::kBest;  // on the CPU: what computes the calls
  ProblemSpec spec;
  std::string source;
  std::string note;
  Samples ceiling;
  std::vector<DemoRow> rows;

  [[nodiscard]] bool on_gpu() const { return backend == Backend::kCuda; }
  /// What one of the rows shows of something else on the machine; empty: nothing.
  [[nodiscard]] std::string noise() const {
    std::string found;
    for (const DemoRow& row : rows) found = found.empty() && !on_gpu() ? noise_in(row.call, ceiling) : found;
    return found;
  }
  [[nodiscard]] double gbps(const Samples& samples) const { return static_cast<double>(spec.kv_bytes()) / samples.median() / 1e3; }
  [[nodiscard]] bool passes() const {
    return std::all_of(rows.begin(), rows.end(), [](const DemoRow& row) { return row.verdict.passes(); });
  }
};

ProblemSpec llama_layer(std::vector<std::int32_t> kv_lens) {
  ProblemSpec spec{.kv_lens = std::move(kv_lens), .q_heads = 32, .kv_heads = 8, .head_dim = 128, .dtype = DType::kBFloat16};
  spec.layout = natural_layout(spec.kv_lens);
  return spec;
}

/// As many requests of a trace, evenly spread, as memory and a minute allow.
ProblemSpec whole_trace(const std::string& path, Place place) {
  const std::vector<std::int32_t> all = trace_lengths(path, 0, Pick::kSpread);
  const std::int64_t limit = std::min(kMaxKvBytes, available_memory_bytes(place) / 2);
  ProblemSpec spec = llama_layer(all);
  for (auto count = static_cast<std::int64_t>(all.size()); spec.kv_bytes() > limit && count > 1;) {
    count = std::max<std::int64_t>(1, std::min(count - 1, count * limit / spec.kv_bytes()));
    spec = llama_layer(pick_lengths(all, count, Pick::kSpread));
  }
  return spec;
}

std::string device_words(const Demo& demo) {
  if (demo.on_gpu()) {
    const gpu::Device device = gpu::devices().at(0);
    return fmt::format("{}: {} multiprocessors", device.name, device.multiprocessors);
  }
  const Machine machine = inspect_machine();
  return fmt::format("{}: {} threads ({}), {}", machine.cpu_model, machine.threads, machine.executor, name_of(demo.isa));
}

/// "132 workers", if all schedules have as many.
std::string workers_of(const Demo& demo) {
  const std::int32_t workers = demo.rows[0].map.workers_asked;
  const bool alike =
      std::all_of(demo.rows.begin(), demo.rows.end(), [=](const DemoRow& row) { return row.map.workers_asked == workers; });
  return alike ? explain::words::counted(workers, "worker") : "its workers";
}

std::string table_text(const Demo& demo) {
  std::vector<std::string> header{
      "schedule", "time", "min", "max", "GB/s", "of read bandwidth", fmt::format("balance, {}", workers_of(demo))};
  if (!demo.on_gpu()) header.push_back(fmt::format("balance, {} workers", kPredictedWorkers));
  header.push_back("error / bound");
  Table table(header);
  for (const DemoRow& row : demo.rows) {
    std::vector<std::string> cells{explain::words::policy_words(row.map),
                                   time_text(row.call.median()),
                                   time_text(row.call.min()),
                                   time_text(row.call.max()),
                                   fmt::format("{:.2f}", demo.gbps(row.call)),
                                   percent_text(demo.ceiling.median() / row.call.median()),
                                   explain::words::percent(row.map.tiles.ratio())};
    if (!demo.on_gpu()) cells.push_back(explain::words::percent(row.predicted.tiles.ratio()));
    cells.push_back(ratio_text(row.verdict.error_ratio));
    table.add(std::move(cells));
  }
  return table.text();
}

std::string to_text(const Demo& demo) {
  std::string text = fmt::format("lean-attention {} on {}\n", LEAN_VERSION_STRING, device_words(demo));
  text += fmt::format("Decode attention, one layer of Llama-3-8B: {}\n  lengths: {}\n", describe(demo.spec), demo.source);
  if (!demo.note.empty()) text += "  " + demo.note + "\n";
  text += fmt::format("\n{}\nread bandwidth: {:.2f} GB/s, a pure read of the same bytes by the same {} in the same run\n",
                      table_text(demo), demo.gbps(demo.ceiling), demo.on_gpu() ? "GPU" : "threads");
  text += "balance: mean / longest work per worker, in tiles\n";
  if (const std::string noise = demo.noise(); !noise.empty()) {
    text += noise + "; something else ran on this machine, and the times say little\n";
  }
  for (const DemoRow& row : demo.rows) {
    if (!row.verdict.passes()) text += "FAILED " + explain::words::policy_words(row.map) + ": " + row.verdict.worst + "\n";
  }
  return text;
}

/// What the table shows: where the schedules are told apart, and by how much.
std::string meaning_of(const Demo& demo) {
  constexpr double kBalanced = 0.95;
  const auto balances = [&](const explain::ScheduleMap DemoRow::* map) {
    std::string text;
    for (const DemoRow& row : demo.rows) {
      text += fmt::format("{}{} {}", text.empty() ? "" : ", ", policy_text(row.policy),
                          explain::words::percent((row.*map).tiles.ratio()));
    }
    return text;
  };
  const bool balanced =
      std::all_of(demo.rows.begin(), demo.rows.end(), [](const DemoRow& row) { return row.map.tiles.ratio() >= kBalanced; });
  const std::string workers = workers_of(demo);
  if (demo.on_gpu() || !balanced) {
    return fmt::format("A call ends with its longest worker, so balance is what sets the times apart on {}: {}.\n", workers,
                       balances(&DemoRow::map));
  }
  return fmt::format(
      "With {} every schedule is balanced: on a machine left alone their times are about equal. The column for {} workers is\n"
      "the point: a call ends with its longest worker, and on a GPU of that many multiprocessors the balance is {}.\n",
      workers, kPredictedWorkers, balances(&DemoRow::predicted));
}

std::string what_next(const Demo& demo, const std::string& svg_path) {
  return fmt::format(
      "\n{}Wrote {}: a row is a worker, a bar is its work. Next: `lean schedule --lens 8x4k,128k --workers 132` for a batch of\n"
      "your own, `lean run --lens 8x4k` to time one call, `lean doctor` for this machine, README.md for C++, C and Python.\n",
      meaning_of(demo), svg_path);
}

Json to_json(const Demo& demo, const std::string& svg_path) {
  Json json{{"command", "demo"}, {"backend", name_of(demo.backend)}};
  json["device"] = demo.on_gpu() ? gpu::devices().at(0).name : inspect_machine().cpu_model;
  if (!demo.on_gpu()) json["isa"] = name_of(demo.isa);
  json["source"] = demo.source;
  add_problem(json, demo.spec);
  json["ceiling_us"] = demo.ceiling.median();
  json["rows"] = Json::array();
  for (const DemoRow& row : demo.rows) {
    Json line{{"schedule", policy_text(row.policy)}};
    add_times(line, row.call);
    line["gbps"] = demo.gbps(row.call);
    line["read_fraction"] = demo.ceiling.median() / row.call.median();
    line["workers"] = row.map.workers_asked;
    line["balance"] = row.map.tiles.ratio();
    if (!demo.on_gpu()) {
      line["predicted_workers"] = kPredictedWorkers;
      line["predicted_balance"] = row.predicted.tiles.ratio();
    }
    line["error_ratio"] = row.verdict.error_ratio;
    line["rows_checked"] = row.verdict.rows_checked;
    line["passes"] = row.verdict.passes();
    json["rows"].push_back(std::move(line));
  }
  json["noise"] = demo.noise().empty() ? Json(nullptr) : Json(demo.noise());
  json["svg"] = svg_path;
  json["passes"] = demo.passes();
  return json;
}

std::string drawing_of(const Demo& demo) {
  std::vector<explain::ScheduleMap> maps;
  for (const DemoRow& row : demo.rows) maps.push_back(row.map);
  for (const DemoRow& row : demo.rows) {
    if (!demo.on_gpu()) maps.push_back(row.predicted);
  }
  const auto columns = static_cast<std::int32_t>(demo.rows.size());
  return explain::to_svg(maps, {.title = "Who computes what", .columns = columns, .width_px = 1800});
}

class DemoCommand final : public Command {
 public:
  std::string name() const override { return "demo"; }
  std::string description() const override { return "Every schedule on real request lengths: one table and a drawing"; }
  std::string example() const override { return "lean demo --trace AzureLLMInferenceTrace_conv.csv --batch 64"; }

  void add_options(CLI::App& app) override {
    app.add_option("--trace", trace_, "CSV with a column ContextTokens, in place of the built-in 32 lengths")
        ->check(not_empty("--trace", "a file that can be read"));
    app.add_option("--batch", batch_, "Requests to take from the trace, evenly spread; 0: as many as fit")
        ->transform(in_range("--batch", 0, 1 << 20));
    app.add_option("--workers", workers_,
                   "Workers that share the work; 0: as many as there are threads, or one or two a multiprocessor")
        ->transform(in_range("--workers", 0, 4096));
    app.add_option("--repeat", repeat_, "Rounds to time")->transform(in_range("--repeat", 1, 100'000))->capture_default_str();
    app.add_option("--svg", svg_path_, "Where to write the drawing")->check(file_to_write("--svg"))->capture_default_str();
    backend_.add_to(app, "the GPU where there is one, else the CPU");
  }

  int run(bool json) override {
    if (trace_.empty() && batch_ != 0) throw BadArgument("--batch", std::to_string(batch_), "goes with --trace");
    const OutputFile svg("--svg", svg_path_);
    svg.check();
    Demo demo = choose_batch();
    measure_and_check(demo);
    print(json ? line_of(to_json(demo, svg_path_)) : to_text(demo));
    svg.begin(drawing_of(demo));
    if (!json) print(what_next(demo, svg_path_));
    return demo.passes() ? kExitOk : kExitCheckFailed;
  }

 private:
  [[nodiscard]] Demo choose_batch() const {
    Demo demo;
    demo.backend = backend_.backend_or(best_backend());
    if (trace_.empty()) {
      demo.spec = llama_layer(conv32_lengths());
      demo.source = kAttribution;
      return demo;
    }
    demo.source = trace_;
    if (batch_ > 0) {
      demo.spec = llama_layer(trace_lengths(trace_, batch_, Pick::kSpread));
    } else {
      demo.spec = whole_trace(trace_, place_of(demo.backend));
      demo.note = "evenly spread over the trace: what fits memory and a minute; --batch N takes another number";
    }
    return demo;
  }

  void measure_and_check(Demo& demo) const {
    Progress progress;
    const Place place = place_of(demo.backend);
    const std::int64_t copies = demo.on_gpu() ? copies_for(demo.spec.kv_bytes()) : 1;
    require_memory(place, bytes_to_hold(demo.spec, copies), "take fewer requests with --batch");
    progress.say("making K and V");
    const KvPool pool(demo.spec.dtype, demo.spec.stored_elements(), kSeed, place, copies);
    const DecodeProblem problem(demo.spec, pool, kSeed);
    progress.say("computing the fp64 answers to check against");
    const Oracle oracle(problem, kMaxCheckedProducts);

    std::vector<PreparedCall> calls;
    for (const Policy& policy : {Policy::lean(), Policy::fixed_split(), Policy::data_parallel()}) {
      Options options{.backend = demo.backend, .policy = policy, .workers = workers_};
      calls.emplace_back(problem, options);
      DemoRow row{.policy = policy, .map = map_of(problem.shape(), options)};
      progress.say("checking " + explain::words::policy_words(row.map));
      problem.poison_outputs();
      calls.back().run();
      row.verdict = oracle.check(rounding_of(problem.problem(), options));
      if (!demo.on_gpu()) {
        demo.isa = cpu::isa_of(options, problem.problem());
        options.workers = kPredictedWorkers;
        row.predicted = map_of(problem.shape(), options);
      }
      demo.rows.push_back(std::move(row));
    }
    progress.say("measuring");
    if (demo.on_gpu()) {
      time_gpu_calls(demo, problem, calls);
    } else {
      time_cpu_calls(demo, problem, calls);
    }
  }

  void time_gpu_calls(Demo& demo, const DecodeProblem& problem, const std::vector<PreparedCall>& calls) const {
    std::vector<const PreparedCall*> subjects;
    for (const PreparedCall& call : calls) subjects.push_back(&call);
    const GpuTimes times = time_on_gpu(problem, subjects, GpuInstruments(), {.rounds = repeat_, .check = {}});
    for (std::size_t i = 0; i < demo.rows.size(); ++i) demo.rows[i].call = times.calls[i].chained;
    demo.ceiling = times.ceiling.chained;
  }

  void time_cpu_calls(Demo& demo, const DecodeProblem& problem, const std::vector<PreparedCall>& calls) const {
    const ReadCeiling ceiling(problem, demo.rows[0].map.workers_asked);
    std::vector<std::function<void()>> subjects;
    for (const PreparedCall& call : calls) subjects.emplace_back([&call] { call.run(); });
    subjects.emplace_back([&ceiling] { ceiling.run(); });
    const auto samples = measure(subjects, {.rounds = repeat_, .min_rounds = std::min(repeat_, 3), .max_seconds = 20.0});
    for (std::size_t i = 0; i < demo.rows.size(); ++i) demo.rows[i].call = samples[i];
    demo.ceiling = samples.back();
  }

  std::string trace_;
  std::int64_t batch_ = 0;
  std::int32_t workers_ = 0;
  BackendOption backend_;
  int repeat_ = 21;
  std::string svg_path_ = "lean-schedule.svg";
};

}  // namespace

std::unique_ptr<Command> make_demo_command() { return std::make_unique<DemoCommand>(); }

}  // namespace lean::cli
