// The table of what options must keep by themselves, a row a precondition, and what is made of them before a backend sees them.
#include "api/option_preconditions.hpp"

#include <array>

namespace lean {
namespace {

using O = const Options&;

static_assert(Options::kMaxWorkers == 4096, "keeps the state, three counters a worker, within 64 KB; named in the row below");

template <typename T>
constexpr std::int64_t as_int(T value) noexcept {
  return static_cast<std::int64_t>(value);
}

constexpr auto kInvalid = StatusCode::kInvalidArgument;

// clang-format off: one row, one precondition
constexpr std::array kRows = {
    Precondition<Options>{kInvalid, "options.backend", "allowed 0 (cpu), 1 (cuda)",
                 [](O o) noexcept { return as_int(o.backend); },
                 [](O o) noexcept { return as_int(o.backend) >= 0 && as_int(o.backend) <= 1; }},
    Precondition<Options>{kInvalid, "options.policy.kind", "allowed 0 (lean), 1 (fixed_split), 2 (data_parallel), 3 (fixed_chunk)",
                 [](O o) noexcept { return as_int(o.policy.kind); },
                 [](O o) noexcept { return as_int(o.policy.kind) >= 0 && as_int(o.policy.kind) <= 3; }},
    Precondition<Options>{kInvalid, "options.policy.splits", "allowed 0 (FlashDecoding's rule) to 128 with fixed_split, else 0",
                 [](O o) noexcept { return as_int(o.policy.splits); },
                 [](O o) noexcept { return o.policy.splits >= 0 && o.policy.splits <=
                                           (o.policy.kind == Policy::Kind::kFixedSplit ? Policy::kMaxSplits : 0); }},
    Precondition<Options>{kInvalid, "options.policy.chunk_tokens", "allowed 0 (default) or more with fixed_chunk, else 0",
                 [](O o) noexcept { return as_int(o.policy.chunk_tokens); },
                 [](O o) noexcept { return o.policy.chunk_tokens == 0 ||
                                           (o.policy.chunk_tokens > 0 && o.policy.kind == Policy::Kind::kFixedChunk); }},
    Precondition<Options>{kInvalid, "options.fixup", "allowed 0 (last_arriver), 1 (two_kernels), 2 (host_block)",
                 [](O o) noexcept { return as_int(o.fixup); },
                 [](O o) noexcept { return as_int(o.fixup) >= 0 && as_int(o.fixup) <= 2; }},
    Precondition<Options>{kInvalid, "options.determinism", "allowed 0 (run_to_run), 1 (batch_invariant), 2 (not_guaranteed)",
                 [](O o) noexcept { return as_int(o.determinism); },
                 [](O o) noexcept { return as_int(o.determinism) >= 0 && as_int(o.determinism) <= 2; }},
    Precondition<Options>{kInvalid, "options.determinism",
                 "batch_invariant needs policy lean (which then means fixed_chunk) or fixed_chunk",
                 [](O o) noexcept { return as_int(o.determinism); },
                 [](O o) noexcept { return o.determinism != Determinism::kBatchInvariant ||
                                           o.policy.kind == Policy::Kind::kLean || o.policy.kind == Policy::Kind::kFixedChunk; }},
    Precondition<Options>{kInvalid, "options.workers", "allowed 0 (all) to 4096",
                 [](O o) noexcept { return as_int(o.workers); },
                 [](O o) noexcept { return o.workers >= 0 && o.workers <= Options::kMaxWorkers; }},
    Precondition<Options>{kInvalid, "options.cpu_isa", "allowed 0 (best) to 6 (amx_bf16)",
                 [](O o) noexcept { return as_int(o.cpu_isa); },
                 [](O o) noexcept { return as_int(o.cpu_isa) >= 0 && as_int(o.cpu_isa) <= 6; }},
};
// clang-format on

}  // namespace

PreconditionTable<Options> option_preconditions() noexcept { return {kRows.data(), kRows.size()}; }

Options resolve(const Options& options) noexcept {
  Options resolved = options;
  if (options.determinism == Determinism::kBatchInvariant && options.policy.kind == Policy::Kind::kLean) {
    resolved.policy = Policy::fixed_chunk();
  }
  return resolved;
}

}  // namespace lean
