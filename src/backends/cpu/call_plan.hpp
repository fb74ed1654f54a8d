// CallPlan: everything that is decided of a call before a worker runs. Made once a call; whoever refuses the call, measures its
// workspace or runs it only reads the plan.
#pragma once

#include <cstdint>

#include "backends/cpu/worker_memory.hpp"
#include "fixup/workspace.hpp"
#include "fixup/workspace_size.hpp"
#include "lean/lean.hpp"
#include "schedule/line_shape.hpp"
#include "tile/tile_config.hpp"
#include "tile/tiling.hpp"

namespace lean::cpu {

struct CallPlan {
  Options options;
  const Executor* executor = nullptr;
  std::int32_t workers = 1;
  tile::TileConfig config{};
  fixup::WorkspaceLayout workspace{};
  WorkerMemoryLayout memory{};  // of each worker, behind the workspace's own scratch

  /// What the call is to be given. Of a plan that nothing is refused of: sizes beyond what is taken may not be multiplied.
  [[nodiscard]] fixup::WorkspaceNeed need() const noexcept;
  [[nodiscard]] tile::Tiling tiling() const noexcept;
};

[[nodiscard]] CallPlan plan_call(const Problem& problem, const Options& options) noexcept;

/// The LeanTile variant for a problem: a function of types, d, dv and the longest n_q alone, never of lengths.
[[nodiscard]] tile::TileConfig select_tile(const Problem& problem) noexcept;

/// The schedule's integers for this backend.
[[nodiscard]] schedule::CostModel cost_model(const tile::TileConfig& config) noexcept;

}  // namespace lean::cpu
