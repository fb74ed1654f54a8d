// Workspaces that calls from Python use without asking for them: one a host thread on the CPU, one a device and stream on
// CUDA. They grow, and are given back by clear_workspaces() or when the thread ends.
#pragma once

#include "arguments.hpp"

namespace lean::python {

/// Memory of at least `need` for `call`, its state zeroed when new. Throws on exhaustion.
[[nodiscard]] Workspace workspace_for(const Call& call, const WorkspaceSize& need);

/// The same for a call on the CPU by this thread. Throws std::bad_alloc.
[[nodiscard]] Workspace host_workspace_for(const WorkspaceSize& need);

/// Gives back the calling thread's workspace, and every device's. No call may be in flight.
void clear_workspaces() noexcept;

}  // namespace lean::python
