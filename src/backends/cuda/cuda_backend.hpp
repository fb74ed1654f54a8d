// The CUDA backend: CTAs are the workers. One launch per call, two where prefill and decode come together; the share of each worker
// is computed on the device from device-resident lengths. Called by the API after the problem's and the options' preconditions hold.
#pragma once

#include <cstdint>

#include "lean/lean.hpp"
#include "tile/tile_config.hpp"

namespace lean::cuda {

/// What this backend does not do, with the reason; ok otherwise. Asks for the current device's properties.
[[nodiscard]] Status supports(const Problem& problem, const Options& options) noexcept;

[[nodiscard]] WorkspaceSize workspace_size(const Problem& problem, const Options& options) noexcept;

/// Enqueues the call on options.stream. The workspace is large enough, aligned, and device memory.
[[nodiscard]] Status decode(const Problem& problem, const Options& options, const Workspace& workspace) noexcept;

/// Enqueues zeroing on options.stream.
[[nodiscard]] Status clear_state(const Workspace& workspace, const Options& options) noexcept;
/// Waits for options.stream.
[[nodiscard]] Status read_sticky(const Workspace& workspace, const Options& options, StatusCode& code) noexcept;

/// The variant for a call: a function of type, d and the longest n_q alone (with fixed_chunk: of the group), never of lengths.
[[nodiscard]] tile::TileConfig select_tile(const Problem& problem, const Options& options) noexcept;

/// Workers a call would ask for: options.workers, or the current device's multiprocessors.
[[nodiscard]] std::int32_t worker_count(const Options& options) noexcept;

}  // namespace lean::cuda
