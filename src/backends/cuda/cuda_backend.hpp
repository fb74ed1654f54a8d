// The CUDA backend: CTAs are the workers. One launch per call, two where prefill and decode come together; the share of each worker
// is computed on the device from device-resident lengths. Called by the API after the problem's and the options' preconditions
// hold.
#pragma once

#include <cstdint>

#include "backends/cuda/call_plan.hpp"
#include "backends/cuda/launch.hpp"
#include "fixup/workspace.hpp"
#include "lean/lean.hpp"
#include "tile/tiling.hpp"

namespace lean::cuda {

/// Decides a call, or says what this backend does not do of it. Asks for the current device. launch_call() carries a plan out.
[[nodiscard]] Status decide(const Problem& problem, const Options& options, CallPlan& plan) noexcept;

/// How a call would be cut up, refused or not. Types, d and the longest n_q (with fixed_chunk the group) decide it, never lengths.
[[nodiscard]] tile::Tiling tiling_of(const Problem& problem, const Options& options) noexcept;

/// Enqueues zeroing on options.stream.
[[nodiscard]] Status clear_state(const Workspace& workspace, const Options& options) noexcept;
/// Waits for options.stream.
[[nodiscard]] Status read_header(const Workspace& workspace, const Options& options, fixup::StateHeader& header) noexcept;

}  // namespace lean::cuda
