// The CPU backend: threads are the workers, and run the same schedule, softmax, fix-up and output rooms as a GPU.
// Called by the API after the problem's and the options' preconditions hold.
#pragma once

#include <cstdint>

#include "lean/lean.hpp"
#include "schedule/line_shape.hpp"
#include "tile/tile_config.hpp"

namespace lean::cpu {

/// What this backend does not do yet, with the reason; ok otherwise.
[[nodiscard]] Status supports(const Problem& problem, const Options& options) noexcept;

[[nodiscard]] WorkspaceSize workspace_size(const Problem& problem, const Options& options) noexcept;

/// Computes the problem. The workspace is large enough and aligned.
[[nodiscard]] Status decode(const Problem& problem, const Options& options, const Workspace& workspace) noexcept;

[[nodiscard]] Status clear_state(const Workspace& workspace, const Options& options) noexcept;
[[nodiscard]] Status read_sticky(const Workspace& workspace, const Options& options, StatusCode& code) noexcept;

/// The LeanTile variant for a problem: a function of types, d, dv and the longest n_q alone, never of lengths.
[[nodiscard]] tile::TileConfig select_tile(const Problem& problem) noexcept;

/// The schedule's integers for this backend (docs/schedule.md).
[[nodiscard]] constexpr schedule::CostModel cost_model(const tile::TileConfig& /*config*/) noexcept {
  return {.tile_units = 16,
          .free_rows = 8,
          .row_units = 2,
          .segment_units = 2,
          .min_worker_tiles = 1,
          .sliver_tiles = 2,
          .align_percent = 0,
          .whole_percent = 0};
}

/// Workers a call would ask for: options.workers, or the executor's threads.
[[nodiscard]] std::int32_t worker_count(const Options& options) noexcept;

}  // namespace lean::cpu
