// The backends of this build, as the API sees them: one table of functions each.
#pragma once

#include "fixup/workspace.hpp"
#include "lean/lean.hpp"
#include "tile/tiling.hpp"

namespace lean {

struct BackendEntry {
  /// What the backend does not do of a call, with the reason; the problem's and the options' own preconditions hold.
  Status (*supports)(const Problem&, const Options&) noexcept;
  /// What memory it needs, or the same.
  WorkspaceSize (*workspace_size)(const Problem&, const Options&) noexcept;
  /// The call, in a workspace that is yet to be checked.
  Status (*decode)(const Problem&, const Options&, const Workspace&) noexcept;
  Status (*clear_state)(const Workspace&, const Options&) noexcept;
  /// The header of the workspace's state, once what was enqueued is done.
  Status (*read_header)(const Workspace&, const Options&, fixup::StateHeader& header) noexcept;
  /// How the call would be cut up, refused or not.
  tile::Tiling (*tiling_of)(const Problem&, const Options&) noexcept;
};

/// Null when this build has no such backend.
[[nodiscard]] const BackendEntry* backend_of(Backend backend) noexcept;

/// Defined in cuda_present.cpp or cuda_absent.cpp, whichever the build takes.
[[nodiscard]] const BackendEntry* cuda_backend() noexcept;

}  // namespace lean
