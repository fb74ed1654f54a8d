// The CPU backend: threads are the workers, and run the same schedule, softmax, fix-up and output rooms as a GPU.
// Called by the API after the problem's and the options' preconditions hold.
#pragma once

#include "backends/cpu/call_plan.hpp"
#include "lean/lean.hpp"
#include "softmax/finished_states.hpp"
#include "tile/tiling.hpp"

namespace lean::cpu {

/// Decides a call, or says what this backend does not do of it.
[[nodiscard]] Status decide(const Problem& problem, const Options& options, CallPlan& plan) noexcept;

/// Computes the problem as planned. The workspace is large enough and aligned.
[[nodiscard]] Status run_call(const Problem& problem, const CallPlan& plan, const Workspace& workspace) noexcept;

/// How a call would be cut up, refused or not.
[[nodiscard]] tile::Tiling tiling_of(const Problem& problem, const Options& options) noexcept;

/// Of arrays in host memory, before it returns.
[[nodiscard]] Status shard_lengths(const std::int32_t* tokens, std::int32_t* held, std::int64_t count, const TokenShard& shard,
                                   const Options& options) noexcept;

[[nodiscard]] Status clear_state(const Workspace& workspace, const Options& options) noexcept;
[[nodiscard]] Status read_sticky(const Workspace& workspace, const Options& options, StatusCode& code) noexcept;

/// On the calling thread.
[[nodiscard]] Status merge_states(const softmax::FinishedStates& states, const Options& options) noexcept;

}  // namespace lean::cpu
