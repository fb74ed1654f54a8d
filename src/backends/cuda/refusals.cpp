// What the CUDA backend refuses: a row for each demand on a problem, and what a plan shows that this build or device lacks.
#include "backends/cuda/refusals.hpp"

#include <array>
#include <cstdint>

#include "base/message.hpp"
#include "fixup/workspace_size.hpp"
#include "problem/preconditions.hpp"

namespace lean::cuda {
namespace {

using P = const Problem&;

constexpr auto kUnsupported = StatusCode::kUnsupported;

// clang-format off: one row, one refusal
constexpr std::array kRefused = {
    Precondition<Problem>{kUnsupported, "q.dtype", "the CUDA backend computes float16 and bfloat16",
                 [](P p) noexcept -> std::int64_t { return static_cast<std::int64_t>(p.q.dtype); },
                 [](P p) noexcept { return p.q.dtype == DType::kFloat16 || p.q.dtype == DType::kBFloat16; }},
    Precondition<Problem>{kUnsupported, "append.rotary_dim", "the CUDA backend keeps turned queries in o: needs value_dim of head_dim or more",
                 [](P p) noexcept -> std::int64_t { return p.append.rotary_dim; },
                 [](P p) noexcept { return p.append.rotary_dim == 0 || value_dim_of(p) >= p.head_dim; }},
};
// clang-format on

}  // namespace

Status refuse_problem(const Problem& problem) noexcept {
  return PreconditionTable<Problem>{kRefused.data(), kRefused.size()}.check(problem);
}

Status refuse_plan(const Problem& problem, const CallPlan& plan) noexcept {
  const Options& options = plan.options;
  const KernelEntry* const any_call = plan.own_values ? plan.launches[0].kernel : plan.launches[0].any_call;
  if (!plan.plain && any_call == nullptr) {
    return refuse(kUnsupported, "head_dim", problem.head_dim,
                  "this build has no kernels for it and the type of k (LEAN_CUDA_FAMILIES)");
  }
  const tile::TileConfig config = plan.plain ? plan.plain_tile : any_call->config.tile();
  if (const Status status = fixup::check_pairing(problem, options, config, options.workers); !status.ok()) {
    return status;
  }
  if (options.workers > kMaxWorkers) {
    return refuse(kUnsupported, "options.workers", options.workers, "the CUDA backend takes 1024 at most");
  }
  if (options.exchange != nullptr && !plan.exchanges()) {
    return refuse(
        kUnsupported, "options.exchange", options.exchange->ranks,
        "ranks exchange in the launch of a decode step of 16 bits, d 64 or 128: else by exchange_states() behind decode()");
  }
  if (options.fixup != Fixup::kHostBlock) return {};
  if (!plan.device.cooperative || options.workers > plan.device.multiprocessors) {
    return refuse(kUnsupported, "options.workers", options.workers,
                  "host_block needs all workers resident: one a multiprocessor at most");
  }
  return {};
}

}  // namespace lean::cuda
