// lean doctor: what this machine offers the library, and a self-test of about a second: every instruction set, type,
// schedule and fix-up on small ragged batches, against the fp64 oracle.
#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include "cli/call_options.hpp"
#include "cli/command.hpp"
#include "cli/machine.hpp"
#include "cli/oracle.hpp"
#include "cli/prepared_call.hpp"
#include "cli/print.hpp"
#include "cli/problem_json.hpp"
#include "lean/version.hpp"

namespace lean::cli {
namespace {

constexpr const char* kGpus = "not in this build";

struct SelfTest {
  int calls = 0;
  double worst_ratio = 0.0;
  std::vector<std::string> failures;

  [[nodiscard]] bool passes() const { return failures.empty() && calls > 0; }
};

/// Lengths at and around a tile's edge, an empty one, a long one; more workers than some have tiles.
constexpr std::int32_t kWorkers = 5;
constexpr std::uint64_t kSeed = 1;

ProblemSpec small_problem(DType dtype, std::int32_t q_tokens) {
  ProblemSpec spec{.kv_lens = {257, 0, 64, 1, 1001},
                   .q_heads = 6,
                   .kv_heads = 2,
                   .head_dim = 72,
                   .dtype = dtype,
                   .q_tokens = q_tokens,
                   .causal = q_tokens > 1};
  spec.layout = natural_layout(spec.kv_lens);
  return spec;
}

void check_call(const DecodeProblem& problem, const Oracle& oracle, const Options& options, SelfTest& test) {
  const std::string words = fmt::format("{} {} {} fixup {} n_q {}", name_of(options.cpu_isa), name_of(problem.spec().dtype),
                                        policy_text(options.policy), static_cast<int>(options.fixup), problem.spec().q_tokens);
  // What the library refuses by its own words is no failure: host_block does not go with every schedule.
  if (supports(problem.problem(), options).code == StatusCode::kUnsupported) return;
  ++test.calls;
  try {
    const PreparedCall call(problem, options);
    problem.poison_outputs();
    call.run();
    const Verdict verdict = oracle.check(rounding_of(problem.problem(), options));
    test.worst_ratio = std::max(test.worst_ratio, verdict.error_ratio);
    if (!verdict.passes()) test.failures.push_back(words + ": " + verdict.worst);
  } catch (const std::exception& error) {
    test.failures.push_back(words + ": " + error.what());
  }
}

SelfTest self_test() {
  SelfTest test;
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    for (const std::int32_t q_tokens : {1, 3}) {
      const ProblemSpec spec = small_problem(dtype, q_tokens);
      const KvPool pool(dtype, spec.stored_elements(), kSeed);
      const DecodeProblem problem(spec, pool, kSeed);
      const Oracle oracle(problem.problem());
      for (const CpuIsa isa : available_isas()) {
        for (const Policy& policy : {Policy::lean(), Policy::fixed_split(3), Policy::data_parallel(), Policy::fixed_chunk(128)}) {
          for (const Fixup fixup : {Fixup::kLastArriver, Fixup::kTwoKernels, Fixup::kHostBlock}) {
            check_call(problem, oracle, {.policy = policy, .fixup = fixup, .workers = kWorkers, .cpu_isa = isa}, test);
          }
        }
      }
    }
  }
  return test;
}

std::string isas_text() {
  std::string text;
  for (const CpuIsa isa : available_isas()) text += (text.empty() ? "" : ", ") + std::string(name_of(isa));
  return text;
}

std::string caches_text(const Machine& machine) {
  std::string text;
  for (const CacheLevel& cache : machine.caches) {
    const std::string kind = cache.type == "Unified" ? "" : " " + cache.type;
    text += fmt::format("{}L{}{} {} KiB x {}", text.empty() ? "" : ", ", cache.level, kind, cache.bytes >> 10, cache.instances);
  }
  return text.empty() ? "unknown" : text;
}

std::string to_text(const Machine& machine, const SelfTest& test) {
  std::string text = fmt::format("lean-attention {}\n", LEAN_VERSION_STRING);
  text += fmt::format("  cpu        {}\n", machine.cpu_model);
  text += fmt::format("  cores      {} online, {} usable\n", machine.logical_cpus, machine.usable_cpus);
  text += fmt::format("  isa        {} (found: {})\n", name_of(best_cpu_isa()), isas_text());
  text += fmt::format("  threads    {} of {}\n", machine.threads, machine.executor);
  text += fmt::format("  caches     {}\n", caches_text(machine));
  text += fmt::format("  last level {:.1f} MiB in all\n", static_cast<double>(machine.last_level_cache_bytes()) / (1 << 20));
  text += fmt::format("  gpus       {}\n", kGpus);
  text += fmt::format("  self-test  {}: {} calls, worst error / bound {}\n", test.passes() ? "ok" : "FAILED", test.calls,
                      ratio_text(test.worst_ratio));
  for (const std::string& failure : test.failures) text += "    " + failure + "\n";
  return text;
}

Json to_json(const Machine& machine, const SelfTest& test) {
  Json json{{"command", "doctor"}, {"version", LEAN_VERSION_STRING}, {"cpu", machine.cpu_model}};
  json["logical_cpus"] = machine.logical_cpus;
  json["usable_cpus"] = machine.usable_cpus;
  json["isa"] = name_of(best_cpu_isa());
  for (const CpuIsa isa : available_isas()) json["isas"].push_back(name_of(isa));
  json["executor"] = machine.executor;
  json["threads"] = machine.threads;
  json["caches"] = Json::array();
  for (const CacheLevel& cache : machine.caches) {
    json["caches"].push_back(
        {{"level", cache.level}, {"type", cache.type}, {"bytes", cache.bytes}, {"instances", cache.instances}});
  }
  json["last_level_cache_bytes"] = machine.last_level_cache_bytes();
  json["gpus"] = kGpus;
  json["self_test"] = {
      {"passes", test.passes()}, {"calls", test.calls}, {"error_ratio", test.worst_ratio}, {"failures", test.failures}};
  return json;
}

class DoctorCommand final : public Command {
 public:
  std::string name() const override { return "doctor"; }
  std::string description() const override { return "Say what this machine offers and run a self-test of about a second"; }
  std::string example() const override { return "lean doctor --json"; }
  void add_options(CLI::App&) override {}

  int run(bool json) override {
    const Machine machine = inspect_machine();
    const SelfTest test = self_test();
    print(json ? to_json(machine, test).dump() + "\n" : to_text(machine, test));
    return test.passes() ? kExitOk : kExitCheckFailed;
  }
};

}  // namespace

std::unique_ptr<Command> make_doctor_command() { return std::make_unique<DoctorCommand>(); }

}  // namespace lean::cli
