// Workspaces that an embedding uses without its callers' asking: one a host thread on the CPU, one a device and stream on CUDA.
// They grow, and are given back by clear_workspaces() or, on the CPU, when the thread ends.
#pragma once

#include <cstdint>

#include "lean/lean.hpp"

namespace lean::runtime {

/// Memory of at least `need` for a call with these options, its state zeroed when new. `device_index` counts with backend kCuda
/// only. Throws std::bad_alloc, or device::Error.
[[nodiscard]] Workspace workspace_for(const Options& options, std::int32_t device_index, const WorkspaceSize& need);

/// Gives back the calling thread's workspace, and every device's. No call may be in flight.
void clear_workspaces() noexcept;

}  // namespace lean::runtime
