// lean doctor: what this machine offers the library, and a self-test of about a second on each backend: every instruction set,
// type, schedule and fix-up on small ragged batches, against the fp64 oracle; on a GPU against its own oracle as well.
#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <cmath>
#include <optional>
#include <stdexcept>

#include "cli/backend_option.hpp"
#include "cli/call_options.hpp"
#include "cli/command.hpp"
#include "cli/gpu.hpp"
#include "cli/machine.hpp"
#include "cli/nvml.hpp"
#include "cli/oracle.hpp"
#include "cli/prepared_call.hpp"
#include "cli/print.hpp"
#include "cli/problem_json.hpp"
#include "lean/dtypes.hpp"
#include "lean/version.hpp"

namespace lean::cli {
namespace {

struct SelfTest {
  Backend backend = Backend::kCpu;
  int calls = 0;
  double worst_ratio = 0.0;
  std::vector<std::string> failures;

  [[nodiscard]] bool passes() const { return failures.empty() && calls > 0; }
};

/// Lengths at and around a tile's edge, an empty one, a long one; more workers than some have tiles.
constexpr std::int32_t kWorkers = 5;
constexpr std::uint64_t kSeed = 1;

ProblemSpec small_problem(DType dtype, std::int32_t q_tokens, Layout layout) {
  return {.kv_lens = {257, 0, 64, 1, 1001},
          .q_heads = 6,
          .kv_heads = 2,
          .head_dim = 72,
          .dtype = dtype,
          .q_tokens = q_tokens,
          .causal = q_tokens > 1,
          .layout = layout};
}

/// Problems of one shape, on the host with its oracle and, for a backend elsewhere, there too.
class TestBed {
 public:
  TestBed(const ProblemSpec& spec, Place place)
      : host_pool_(spec.dtype, spec.stored_elements(), kSeed), host_(spec, host_pool_, kSeed), host_oracle_(host_) {
    if (place == Place::kHost) return;
    pool_.emplace(spec.dtype, spec.stored_elements(), kSeed, place);
    problem_.emplace(spec, *pool_, kSeed);
    oracle_.emplace(*problem_);
  }

  void check(const Options& options, SelfTest& test) const {
    const DecodeProblem& problem = problem_ ? *problem_ : host_;
    const std::string words = words_of(problem.spec(), options);
    // What the library refuses by its own words is no failure: host_block does not go with every schedule.
    if (supports(problem.problem(), options).code == StatusCode::kUnsupported) return;
    ++test.calls;
    try {
      const PreparedCall call(problem, options);
      problem.poison_outputs();
      call.run();
      const Verdict verdict = judge(rounding_of(problem.problem(), options));
      test.worst_ratio = std::max(test.worst_ratio, verdict.error_ratio);
      if (!verdict.passes()) test.failures.push_back(words + ": " + verdict.worst);
    } catch (const std::exception& error) {
      test.failures.push_back(words + ": " + error.what());
    }
  }

 private:
  static std::string words_of(const ProblemSpec& spec, const Options& options) {
    return fmt::format("{} {} {} {} fixup {} n_q {}", options.backend == Backend::kCpu ? name_of(options.cpu_isa) : "cuda",
                       name_of(spec.dtype), name_of(spec.layout), policy_text(options.policy), static_cast<int>(options.fixup),
                       spec.q_tokens);
  }

  /// By the host's oracle. A result on the GPU is brought here for it, and the oracle there must say the same.
  [[nodiscard]] Verdict judge(const reference::Rounding& rounding) const {
    if (problem_) {
      copy_bytes(host_.o(), problem_->o());
      copy_bytes(host_.lse(), problem_->lse());
    }
    const Verdict verdict = host_oracle_.check(rounding);
    if (!oracle_) return verdict;
    const Verdict other = oracle_->check(rounding);
    if (std::abs(other.error_ratio - verdict.error_ratio) > kOraclesDiffer * verdict.error_ratio) {
      throw std::runtime_error(
          fmt::format("the oracles differ: error / bound {} on the host, {} on the GPU", verdict.error_ratio, other.error_ratio));
    }
    return verdict;
  }

  static constexpr double kOraclesDiffer = 1e-3;  // of a ratio; both compute in fp64

  KvPool host_pool_;
  DecodeProblem host_;
  Oracle host_oracle_;
  std::optional<KvPool> pool_;
  std::optional<DecodeProblem> problem_;
  std::optional<Oracle> oracle_;
};

std::vector<CpuIsa> isas_of(Backend backend) {
  return backend == Backend::kCpu ? available_isas() : std::vector<CpuIsa>{CpuIsa::kBest};
}

void check_every_way(const ProblemSpec& spec, SelfTest& test) {
  const TestBed bed(spec, place_of(test.backend));
  for (const CpuIsa isa : isas_of(test.backend)) {
    for (const Policy& policy : {Policy::lean(), Policy::fixed_split(3), Policy::data_parallel(), Policy::fixed_chunk(128)}) {
      for (const Fixup fixup : {Fixup::kLastArriver, Fixup::kTwoKernels, Fixup::kHostBlock}) {
        bed.check({.backend = test.backend, .policy = policy, .fixup = fixup, .workers = kWorkers, .cpu_isa = isa}, test);
      }
    }
  }
}

SelfTest self_test(Backend backend) {
  SelfTest test{.backend = backend, .failures = {}};
  for (const DType dtype : kQueryDTypes) {
    if (backend == Backend::kCuda && dtype == DType::kFloat32) continue;  // refused
    for (const std::int32_t q_tokens : {1, 3}) {
      for (const Layout layout : {Layout::kHsd, Layout::kBshd}) {
        if (backend == Backend::kCpu && layout != Layout::kHsd) continue;  // the same code there; keeps it a second
        check_every_way(small_problem(dtype, q_tokens, layout), test);
      }
    }
  }
  ProblemSpec every_rule = small_problem(DType::kFloat16, 3, Layout::kHsd);
  every_rule.window_left = 300;
  every_rule.softcap = 5.0F;
  every_rule.alibi = true;
  every_rule.sinks = true;
  check_every_way(every_rule, test);
  return test;
}

std::vector<SelfTest> self_tests() {
  std::vector<SelfTest> tests{self_test(Backend::kCpu)};
  if (best_backend() == Backend::kCuda) tests.push_back(self_test(Backend::kCuda));
  return tests;
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

std::string gpus_text() {
  std::string text;
  for (const gpu::Device& device : gpu::devices()) {
    text += fmt::format("{}{}: compute capability {}.{}, {} multiprocessors, {:.1f} GiB, L2 {:.0f} MiB",
                        text.empty() ? "" : "\n             ", device.name, device.major, device.minor, device.multiprocessors,
                        static_cast<double>(device.memory_bytes) / (1 << 30), static_cast<double>(device.l2_bytes) / (1 << 20));
    if (const std::string driver = Nvml(device.pci_bus_id).driver(); !driver.empty()) text += ", driver " + driver;
  }
  return text.empty() ? "none: " + gpu::why_none() : text;
}

Json gpus_json() {
  Json gpus = Json::array();
  for (const gpu::Device& device : gpu::devices()) {
    gpus.push_back({{"name", device.name},
                    {"compute_capability", fmt::format("{}.{}", device.major, device.minor)},
                    {"multiprocessors", device.multiprocessors},
                    {"memory_bytes", device.memory_bytes},
                    {"l2_bytes", device.l2_bytes},
                    {"driver", Nvml(device.pci_bus_id).driver()}});
  }
  return gpus;
}

std::string to_text(const Machine& machine, const std::vector<SelfTest>& tests) {
  std::string text = fmt::format("lean-attention {}\n", LEAN_VERSION_STRING);
  text += fmt::format("  cpu        {}\n", machine.cpu_model);
  text += fmt::format("  cores      {} online, {} usable\n", machine.logical_cpus, machine.usable_cpus);
  text += fmt::format("  isa        {} (found: {})\n", name_of(best_cpu_isa()), isas_text());
  text += fmt::format("  threads    {} of {}\n", machine.threads, machine.executor);
  text += fmt::format("  caches     {}\n", caches_text(machine));
  text += fmt::format("  last level {:.1f} MiB in all\n", static_cast<double>(machine.last_level_cache_bytes()) / (1 << 20));
  text += fmt::format("  gpus       {}\n", gpus_text());
  for (const SelfTest& test : tests) {
    text += fmt::format("  self-test  {} {}: {} calls, worst error / bound {}\n", name_of(test.backend),
                        test.passes() ? "ok" : "FAILED", test.calls, ratio_text(test.worst_ratio));
    for (const std::string& failure : test.failures) text += "    " + failure + "\n";
  }
  return text;
}

Json to_json(const Machine& machine, const std::vector<SelfTest>& tests) {
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
  json["gpus"] = gpus_json();
  json["no_gpus"] = gpu::why_none();
  json["self_tests"] = Json::array();
  for (const SelfTest& test : tests) {
    json["self_tests"].push_back({{"backend", name_of(test.backend)},
                                  {"passes", test.passes()},
                                  {"calls", test.calls},
                                  {"error_ratio", test.worst_ratio},
                                  {"failures", test.failures}});
  }
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
    const std::vector<SelfTest> tests = self_tests();
    print(json ? line_of(to_json(machine, tests)) : to_text(machine, tests));
    const bool passes = std::all_of(tests.begin(), tests.end(), [](const SelfTest& test) { return test.passes(); });
    return passes ? kExitOk : kExitCheckFailed;
  }
};

}  // namespace

std::unique_ptr<Command> make_doctor_command() { return std::make_unique<DoctorCommand>(); }

}  // namespace lean::cli
