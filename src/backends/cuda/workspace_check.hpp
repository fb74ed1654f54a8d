// Options::check_workspace: who else uses the state, seen on the device, in the order of the stream.
#pragma once

#include "fixup/workspace.hpp"
#include "lean/status.hpp"

namespace lean::cuda {

/// Names a call that holds a workspace; never 0.
[[nodiscard]] fixup::Counter next_ticket() noexcept;

/// Enqueues a kernel that takes the state for this ticket. Another ticket there leaves workspace_in_use as the sticky code, a
/// counter that is not 0 workspace_dirty. `stream` is a cudaStream_t.
[[nodiscard]] Status claim_workspace(const fixup::Slots& slots, fixup::Counter ticket, void* stream) noexcept;

/// Enqueues a kernel that gives back what the ticket holds; nothing where it holds nothing.
[[nodiscard]] Status release_workspace(const fixup::Slots& slots, fixup::Counter ticket, void* stream) noexcept;

}  // namespace lean::cuda
