// What a workspace must be: large enough, aligned, and apart from every tensor.
#pragma once

#include <cstddef>
#include <cstdint>

#include "fixup/workspace_size.hpp"
#include "lean/lean.hpp"

namespace lean {

/// Codes: ok, workspace_too_small, workspace_misaligned.
[[nodiscard]] Status check_memory(const char* name, const void* pointer, std::size_t bytes, std::int64_t needed) noexcept;

/// Whether a workspace may serve the call: check_memory() of both parts, and invalid_argument where it overlaps itself or a
/// tensor's first element.
[[nodiscard]] Status check_workspace(const Problem& problem, const Workspace& workspace, const fixup::WorkspaceNeed& need) noexcept;

}  // namespace lean
