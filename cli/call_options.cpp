#include "cli/call_options.hpp"

#include <CLI/CLI.hpp>
#include <charconv>
#include <string_view>
#include <vector>

#include "api/option_preconditions.hpp"
#include "cli/bad_argument.hpp"
#include "cli/choice.hpp"
#include "cli/machine.hpp"
#include "cli/validators.hpp"
#include "lean/lean.hpp"

namespace lean::cli {
namespace {

const Choices<Fixup> kFixups{
    {"last-arriver", Fixup::kLastArriver}, {"two-kernels", Fixup::kTwoKernels}, {"host-block", Fixup::kHostBlock}};
const Choices<Determinism> kDeterminisms{{"run-to-run", Determinism::kRunToRun},
                                         {"batch-invariant", Determinism::kBatchInvariant},
                                         {"not-guaranteed", Determinism::kNotGuaranteed}};
const Choices<CpuIsa> kIsas{{"best", CpuIsa::kBest},       {"scalar", CpuIsa::kScalar}, {"native128", CpuIsa::kNative128},
                            {"avx2", CpuIsa::kAvx2},       {"avx512", CpuIsa::kAvx512}, {"avx512_bf16", CpuIsa::kAvx512Bf16},
                            {"amx_bf16", CpuIsa::kAmxBf16}};

/// The number behind the colon, from `low` on; 0 without a colon.
std::int32_t parameter_of(const std::string& text, std::size_t colon, std::int32_t high) {
  if (colon == std::string::npos) return 0;
  std::int32_t value = 0;
  const char* const end = text.data() + text.size();
  const auto parsed = std::from_chars(text.data() + colon + 1, end, value);
  if (parsed.ec != std::errc() || parsed.ptr != end || value < 1 || value > high) {
    throw BadArgument("--schedule", text, "a number from 1 to " + std::to_string(high) + " behind the colon");
  }
  return value;
}

}  // namespace

Policy parse_policy(const std::string& text) {
  const std::size_t colon = text.find(':');
  const std::string name = text.substr(0, colon);
  if (name == "fixed-split") return Policy::fixed_split(parameter_of(text, colon, Policy::kMaxSplits));
  if (name == "fixed-chunk") return Policy::fixed_chunk(parameter_of(text, colon, INT32_MAX));
  if (text == "lean") return Policy::lean();
  if (text == "data-parallel") return Policy::data_parallel();
  throw BadArgument("--schedule", text, "lean, fixed-split, fixed-split:S, data-parallel, fixed-chunk or fixed-chunk:TOKENS");
}

std::string policy_text(const Policy& policy) {
  switch (policy.kind) {
    case Policy::Kind::kLean: return "lean";
    case Policy::Kind::kFixedSplit: return policy.splits == 0 ? "fixed-split" : "fixed-split:" + std::to_string(policy.splits);
    case Policy::Kind::kDataParallel: return "data-parallel";
    case Policy::Kind::kFixedChunk:
      return policy.chunk_tokens == 0 ? "fixed-chunk" : "fixed-chunk:" + std::to_string(policy.chunk_tokens);
  }
  return "unknown";
}

void require_accepted(const Status& status) {
  struct Name {
    std::string_view argument;
    const char* option;
  };
  static constexpr Name kNames[] = {{"options.backend", "--backend"},
                                    {"options.policy", "--schedule"},
                                    {"options.fixup", "--fixup"},
                                    {"options.determinism", "--determinism"},
                                    {"options.workers", "--workers"},
                                    {"options.cpu_isa", "--isa"},
                                    {"batch x q_heads", "--lens, --q-heads"},
                                    {"q_heads", "--q-heads"},
                                    {"kv_heads", "--kv-heads"},
                                    {"head_dim", "--head-dim"},
                                    {"q_tokens", "--n-q"},
                                    {"q.dtype", "--dtype"},
                                    {"scores.softcap", "--softcap"},
                                    {"batch", "--lens"}};
  if (status.ok()) return;
  const std::string_view message = status.message;
  for (const Name& name : kNames) {
    if (message.substr(0, name.argument.size()) == name.argument)
      throw BadArgument(std::string(name.option) + ": " + status.message);
  }
  throw BadArgument(status.message);
}

void CallOptions::add_schedule_to(CLI::App& app) {
  const std::string group = "Call";
  app.add_option("--schedule", schedule_,
                 "lean (stream-K), fixed-split (FlashDecoding, its own rule), fixed-split:S, data-parallel "
                 "(FlashAttention-2), fixed-chunk[:TOKENS]")
      ->capture_default_str()
      ->group(group);
  add_choice(app, "--determinism", determinism_, kDeterminisms,
             "run-to-run by default; with batch-invariant, lean means fixed-chunk")
      ->group(group);
  app.add_option("--workers", workers_,
                 "Workers that share the work; 0: as many as there are threads, or one or two a multiprocessor")
      ->transform(in_range("--workers", 0, 4096))
      ->group(group);
}

void CallOptions::add_to(CLI::App& app) {
  const std::string group = "Call";
  add_schedule_to(app);
  add_choice(app, "--fixup", fixup_, kFixups, "Who merges shared outputs; last-arriver by default")->group(group);
  add_choice(app, "--isa", isa_, kIsas, "CPU: instruction set; best by default: the widest this machine runs")->group(group);
  app.add_flag("--stream-order", stream_order_, "GPU: no call starts before what is ahead of it on the stream has ended")
      ->group(group);
  backend_.add_to(app, "the CPU");
}

Options CallOptions::options() const {
  const Options options{.backend = backend_.backend_or(Backend::kCpu),
                        .policy = parse_policy(schedule_),
                        .fixup = fixup_,
                        .determinism = determinism_,
                        .workers = workers_,
                        .cpu_isa = isa_,
                        .dependent_launch = !stream_order_};
  require_accepted(option_preconditions().check(resolve(options)));
  if (options.backend == Backend::kCpu && stream_order_) throw BadArgument("--stream-order: goes with --backend cuda");
  if (options.backend == Backend::kCuda && isa_ != CpuIsa::kBest)
    throw BadArgument("--isa", name_of(isa_), "goes with --backend cpu");
  if (!cpu_isa_available(isa_)) {
    std::string runs;
    for (const CpuIsa isa : available_isas()) runs += (runs.empty() ? "" : ", ") + std::string(name_of(isa));
    throw BadArgument("--isa", name_of(isa_), "this machine runs " + runs);
  }
  return options;
}

}  // namespace lean::cli
