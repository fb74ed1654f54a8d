// The backends of this build, as the API sees them: one table of functions each.
#pragma once

#include "lean/lean.hpp"
#include "schedule/line_shape.hpp"
#include "tile/tile_config.hpp"

namespace lean {

struct BackendEntry {
  /// What the backend does not do, with the reason; the problem's and the options' own preconditions hold.
  Status (*supports)(const Problem&, const Options&) noexcept;
  WorkspaceSize (*workspace_size)(const Problem&, const Options&) noexcept;
  /// The workspace is large enough and aligned.
  Status (*decode)(const Problem&, const Options&, const Workspace&) noexcept;
  Status (*clear_state)(const Workspace&, const Options&) noexcept;
  /// The sticky code of the workspace's state.
  Status (*read_sticky)(const Workspace&, const Options&, StatusCode& code) noexcept;
  // What the schedule of a call is made of.
  tile::TileConfig (*select_tile)(const Problem&, const Options&) noexcept;
  schedule::CostModel (*cost_model)(const tile::TileConfig& config) noexcept;
  std::int32_t (*worker_count)(const Options&) noexcept;
};

/// Null when this build has no such backend.
[[nodiscard]] const BackendEntry* backend_of(Backend backend) noexcept;

/// Defined in cuda_present.cpp or cuda_absent.cpp, whichever the build takes.
[[nodiscard]] const BackendEntry* cuda_backend() noexcept;

}  // namespace lean
