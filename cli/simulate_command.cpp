// lean simulate: how long a batch would take, and how busy its multiprocessors were, on GPUs that are not at hand, under lean,
// fixed split and one worker per output. Or, for measured lines of a result file, what the model says beside what was measured.
#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <fstream>
#include <map>

#include "cli/bad_argument.hpp"
#include "cli/command.hpp"
#include "cli/gpu_models.hpp"
#include "cli/print.hpp"
#include "cli/problem_json.hpp"
#include "cli/problem_options.hpp"
#include "cli/time_coefficients.hpp"
#include "cli/time_model.hpp"
#include "cli/validators.hpp"
#include "explain/words.hpp"

namespace lean::cli {
namespace {

struct NamedPolicy {
  const char* impl;  // as result files name it
  const char* words;
  Policy policy;
};

const NamedPolicy kPolicies[] = {{"lean", "lean (stream-K)", Policy::lean()},
                                 {"lean/fixed_split", "fixed split (FlashDecoding's rule)", Policy::fixed_split(0)},
                                 {"lean/data_parallel", "one worker per output", Policy::data_parallel()}};

std::string gpu_names() {
  std::string names;
  for (const GpuModel& gpu : kGpuModels) names += (names.empty() ? "" : ", ") + std::string(gpu.name);
  return names;
}

/// "a100,h200", or "all".
std::vector<GpuModel> gpus_named(const std::string& text) {
  if (text == "all") return {std::begin(kGpuModels), std::end(kGpuModels)};
  std::vector<GpuModel> gpus;
  for (const std::string& name : items_of(text)) {
    const auto* const gpu =
        std::find_if(std::begin(kGpuModels), std::end(kGpuModels), [&](const GpuModel& each) { return each.name == name; });
    if (gpu == std::end(kGpuModels))
      throw BadArgument("--gpu", name, "all, or some of " + gpu_names() + " with commas between them");
    gpus.push_back(*gpu);
  }
  return gpus;
}

/// "memory_share=0.95,step.call_us=4": those named differ from the committed ones. Empty: none does.
TimeModel model_with(const std::string& text) {
  TimeModel model = kTimeModel;
  if (text.empty()) return model;
  const std::vector<Coefficient> known = coefficients_of(model);
  for (const std::string& item : items_of(text)) {
    const std::size_t equals = std::min(item.find('='), item.size());
    const auto found =
        std::find_if(known.begin(), known.end(), [&](const Coefficient& each) { return each.name == item.substr(0, equals); });
    double value = -1.0;
    const char* const last = item.data() + item.size();
    const auto parsed = std::from_chars(item.data() + std::min(equals + 1, item.size()), last, value);
    if (found == known.end() || parsed.ec != std::errc() || parsed.ptr != last || !(value >= 0.0) || !std::isfinite(value)) {
      std::string names;
      for (const Coefficient& each : known) names += (names.empty() ? "" : ", ") + std::string(each.name);
      throw BadArgument("--coefficients", item, "NAME=NUMBER with commas between them; the names are " + names);
    }
    found->value = value;
  }
  if (std::min({model.memory_share, model.step.worker_gbps, model.any_call.worker_gbps, model.sm80.worker_gbps}) <= 0.0) {
    throw BadArgument("--coefficients", text, "memory_share and worker_gbps above 0");
  }
  return model;
}

/// Heads of one of so many GPUs.
ProblemSpec divided(ProblemSpec spec, std::int32_t gpus) {
  if (spec.kv_heads % gpus != 0) {
    throw BadArgument("--tensor-parallel", std::to_string(gpus),
                      "a number that divides --kv-heads, which is " + std::to_string(spec.kv_heads));
  }
  spec.q_heads /= gpus;
  spec.kv_heads /= gpus;
  return spec;
}

/// Multiprocessors that still work when so much of the streaming time is over.
std::int64_t busy_at(const Prediction& prediction, double share) {
  const auto done = std::upper_bound(prediction.ends_us.begin(), prediction.ends_us.end(), share * prediction.streaming_us);
  return prediction.ends_us.end() - done;
}

struct Predicted {
  const NamedPolicy* policy;
  Prediction prediction;
};

std::vector<Predicted> predict_all(const GpuModel& gpu, const ProblemSpec& spec, const TimeModel& model) {
  std::vector<Predicted> all;
  for (const NamedPolicy& policy : kPolicies) all.push_back({&policy, predict(gpu, spec, policy.policy, model)});
  return all;
}

std::string text_of(const GpuModel& gpu, const std::vector<Predicted>& rows) {
  Table table(
      {"schedule", "time", "x read limit", "x lean", "occupancy", "SMs busy at 25 %", "50 %", "75 %", "99 %", "merged outputs"});
  const double lean_us = rows.front().prediction.us;
  for (const auto& [policy, prediction] : rows) {
    table.add({policy->words, time_text(prediction.us),
               prediction.read_us > 0.0 ? fmt::format("{:.2f}", prediction.us / prediction.read_us) : "-",
               fmt::format("{:.2f}", prediction.us / lean_us), percent_text(prediction.occupancy),
               std::to_string(busy_at(prediction, 0.25)), std::to_string(busy_at(prediction, 0.5)),
               std::to_string(busy_at(prediction, 0.75)), std::to_string(busy_at(prediction, 0.99)),
               std::to_string(prediction.map.shared_outputs)});
  }
  return fmt::format("\n{}: {} SMs, {:.0f} GB/s, {} MHz{}\n{}", gpu.description, gpu.multiprocessors, gpu.read_gbps, gpu.clock_mhz,
                     gpu.device.empty() ? ", never measured" : "", table.text());
}

Json json_of(const GpuModel& gpu) {
  return {{"gpu", gpu.name},
          {"description", gpu.description},
          {"multiprocessors", gpu.multiprocessors},
          {"read_gbps", gpu.read_gbps},
          {"clock_mhz", gpu.clock_mhz},
          {"kernels", fmt::format("sm_{}", static_cast<int>(gpu.kernels))},
          {"measured", !gpu.device.empty()},
          {"source", gpu.source}};
}

/// [us since the first byte, workers still busy], a step each time some end.
Json occupancy_steps(const Prediction& prediction) {
  Json steps = Json::array();
  const std::vector<double>& ends = prediction.ends_us;
  if (!ends.empty()) steps.push_back({0.0, ends.size()});
  for (std::size_t i = 0; i < ends.size(); ++i) {
    if (i + 1 == ends.size() || ends[i + 1] > ends[i]) steps.push_back({ends[i], ends.size() - i - 1});
  }
  return steps;
}

Json json_of(const Predicted& row) {
  const Prediction& prediction = row.prediction;
  return {{"schedule", row.policy->impl},
          {"us", prediction.us},
          {"read_us", prediction.read_us},
          {"occupancy", prediction.occupancy},
          {"busy_workers", prediction.map.busy_workers},
          {"worker_tiles", prediction.map.tiles.max},
          {"contributors", prediction.map.max_contributors},
          {"shared_outputs", prediction.map.shared_outputs},
          {"tile_tokens", prediction.map.shape.tile_tokens},
          {"busy", occupancy_steps(prediction)}};
}

/// A line of a result file that the model can be held against.
struct MeasuredLine {
  std::string row;
  const NamedPolicy* policy = nullptr;
  const GpuModel* gpu = nullptr;
  ProblemSpec spec{};
  double us = 0.0;
  std::string commit;
};

/// Nothing for a line of another kind: not measured or with a note, another GPU or schedule, more than a plain decode step.
std::vector<MeasuredLine> measured_lines(const Json& line) {
  const std::string impl = line.value("impl", "");
  const auto* const policy =
      std::find_if(std::begin(kPolicies), std::end(kPolicies), [&](const NamedPolicy& each) { return each.impl == impl; });
  const bool noted = line.contains("note") && !line["note"].is_null();
  if (policy == std::end(kPolicies) || !line.contains("us") || !line["us"].is_number() || noted) return {};
  const GpuModel* const gpu = gpu_of_device(line.value("device", ""));
  const std::string dtype = line.value("dtype", "");
  const bool more =
      line.contains("kv_dtype") || line.contains("page_tokens") || line.contains("window_left") || line.value("n_q", 1) != 1;
  if (gpu == nullptr || more || (dtype != "fp16" && dtype != "bf16")) return {};
  const auto whole = [&](const Json& number, const char* name, std::int64_t least, std::int64_t most) {
    if (number.is_number_integer() && number.get<std::int64_t>() >= least && number.get<std::int64_t>() <= most)
      return static_cast<std::int32_t>(number.get<std::int64_t>());
    throw BadArgument(name, number.dump(), fmt::format("a whole number from {} to {}", least, most));
  };
  MeasuredLine found;
  found.row = line.at("row");
  found.policy = policy;
  found.gpu = gpu;
  found.us = line.at("us");
  if (!(found.us > 0.0)) throw BadArgument("us", line["us"].dump(), "a time above 0");
  found.commit = line.value("commit", "");
  for (const Json& tokens : line.at("lens")) found.spec.kv_lens.push_back(whole(tokens, "lens", 0, INT32_MAX));
  if (found.spec.kv_lens.empty()) throw BadArgument("lens", "[]", "the tokens of one request and more");
  found.spec.kv_heads = whole(line.at("kv_heads"), "kv_heads", 1, INT32_MAX);
  found.spec.q_heads = whole(line.at("q_heads"), "q_heads", 1, INT32_MAX);
  if (found.spec.q_heads % found.spec.kv_heads != 0) throw BadArgument("q_heads", line["q_heads"].dump(), "a multiple of kv_heads");
  found.spec.head_dim = whole(line.at("head_dim"), "head_dim", 1, INT32_MAX);
  found.spec.dtype = dtype == "fp16" ? DType::kFloat16 : DType::kBFloat16;
  found.spec.layout = natural_layout(found.spec.kv_lens);
  require_simulated(found.spec);
  return {found};
}

std::vector<MeasuredLine> read_measured(const std::vector<std::string>& paths) {
  std::vector<MeasuredLine> lines;
  for (const std::string& path : paths) {
    std::ifstream file(path);
    if (!file) throw BadArgument("--measured", path, "a file that can be read");
    std::string text;
    for (int number = 1; std::getline(file, text); ++number) {
      try {
        for (MeasuredLine& line : measured_lines(Json::parse(text))) lines.push_back(std::move(line));
      } catch (const std::exception& error) {
        throw BadArgument("--measured", path, fmt::format("line {} is not of a result file: {}", number, error.what()));
      }
    }
  }
  if (lines.empty()) {
    throw BadArgument("--measured", paths.front(),
                      "result files with calls of lean, lean/fixed_split or lean/data_parallel on an H100 or H200");
  }
  return lines;
}

double median_of(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const std::size_t half = values.size() / 2;
  return values.size() % 2 == 1 ? values[half] : (values[half - 1] + values[half]) / 2.0;
}

class SimulateCommand final : public Command {
 public:
  std::string name() const override { return "simulate"; }
  std::string description() const override { return "Predict the time and the occupancy of a batch on GPUs that are not at hand"; }
  std::string example() const override { return "lean simulate --lens 128k,63x1k --gpu a100,h200"; }

  void add_options(CLI::App& app) override {
    problem_.add_to(app);
    const std::string group = "Simulation";
    gpu_option_ = app.add_option("--gpu", gpus_, "GPUs with commas between them, or all: " + gpu_names())
                      ->capture_default_str()
                      ->group(group);
    app.add_option("--tensor-parallel", gpu_count_, "GPUs that share the heads; one of them is simulated")
        ->transform(in_range("--tensor-parallel", 1, 1024))
        ->capture_default_str()
        ->group(group);
    app.add_option("--measured", measured_, "Result files: their calls' times beside the model's, in place of a problem")
        ->check(not_empty("--measured", "files of lean bench --out"))
        ->group(group);
    app.add_option("--coefficients", coefficients_,
                   "NAME=NUMBER,...: other coefficients of the model, as tools/fit_time_model.py tries them")
        ->check(not_empty("--coefficients", "NAME=NUMBER with commas between them"))
        ->group(group);
  }

  int run(bool json) override {
    const TimeModel model = model_with(coefficients_);
    if (!measured_.empty()) return compare(model, json);
    const ProblemSpec whole = problem_.spec();
    require_simulated(whole);
    const ProblemSpec spec = divided(whole, gpu_count_);
    const std::vector<GpuModel> gpus = gpus_named(gpus_);
    Json result;
    std::string text = describe(spec) + (gpu_count_ > 1 ? fmt::format(", on each of {} GPUs", gpu_count_) : "") + '\n';
    add_problem(result, spec);
    result["tensor_parallel"] = gpu_count_;
    for (const GpuModel& gpu : gpus) {
      const std::vector<Predicted> rows = predict_all(gpu, spec, model);
      text += text_of(gpu, rows);
      Json entry = json_of(gpu);
      for (const Predicted& row : rows) entry["schedules"].push_back(json_of(row));
      result["gpus"].push_back(std::move(entry));
    }
    text +=
        "\nPredicted, not measured: docs/simulate.md says how well. Occupancy: multiprocessors that work, mean from the first byte "
        "to\n"
        "the last end.\n";
    print(json ? line_of(result) : text);
    return kExitOk;
  }

 private:
  int compare(const TimeModel& model, bool json) const {
    if (gpu_option_->count() > 0) throw BadArgument("--gpu", gpus_, "no GPU with --measured, whose lines name theirs");
    if (gpu_count_ != 1) throw BadArgument("--tensor-parallel", std::to_string(gpu_count_), "1 with --measured");
    Json result = Json::array();
    std::map<std::string, std::vector<double>> errors;
    std::string worst_row;
    double worst = -1.0;
    for (const MeasuredLine& line : read_measured(measured_)) {
      const Prediction prediction = predict(*line.gpu, line.spec, line.policy->policy, model);
      const double error = std::abs(prediction.us / line.us - 1.0);
      errors[std::string(line.gpu->description) + ", " + line.policy->words].push_back(error);
      if (error > worst) {
        worst = error;
        worst_row = fmt::format("{}, {}, {}: measured {}, predicted {}", line.gpu->description, line.row, line.policy->words,
                                time_text(line.us), time_text(prediction.us));
      }
      result.push_back({{"row", line.row},
                        {"gpu", line.gpu->name},
                        {"schedule", line.policy->impl},
                        {"commit", line.commit},
                        {"us", line.us},
                        {"predicted_us", prediction.us},
                        {"worker_tiles", prediction.map.tiles.max},
                        {"contributors", prediction.map.max_contributors}});
    }
    if (json) return print(line_of(result)), kExitOk;
    Table table({"", "calls", "median error", "worst"});
    for (const auto& [what, values] : errors) {
      table.add({what, std::to_string(values.size()), percent_text(median_of(values)),
                 percent_text(*std::max_element(values.begin(), values.end()))});
    }
    print(table.text() + "\nworst: " + worst_row + '\n');
    return kExitOk;
  }

  ProblemOptions problem_;
  std::string gpus_ = "h200";
  std::int32_t gpu_count_ = 1;
  std::vector<std::string> measured_;
  std::string coefficients_;
  CLI::Option* gpu_option_ = nullptr;
};

}  // namespace

std::unique_ptr<Command> make_simulate_command() { return std::make_unique<SimulateCommand>(); }

}  // namespace lean::cli
