// Whether the memory that a call is given can serve it: size, alignment, overlap. Looks at addresses, at no contents.
#include "api/workspace_checks.hpp"

#include <cinttypes>
#include <cstdint>
#include <cstdio>
#include <initializer_list>

#include "base/alignment.hpp"
#include "base/message.hpp"

namespace lean {
namespace {

bool misaligned(const void* pointer) noexcept { return reinterpret_cast<std::uintptr_t>(pointer) % kWorkspaceAlignment != 0; }

}  // namespace

Status check_memory(const char* name, const void* pointer, std::size_t bytes, std::int64_t needed) noexcept {
  if (needed == 0) return {};  // then it may be null
  if (pointer == nullptr || bytes < static_cast<std::size_t>(needed)) {
    Status status{.code = StatusCode::kWorkspaceTooSmall};
    std::snprintf(status.message, sizeof(status.message), "%s_bytes = %zu%s: %" PRId64 " needed", name, bytes,
                  pointer == nullptr ? " (null)" : "", needed);
    return status;
  }
  if (misaligned(pointer)) {
    return refuse(StatusCode::kWorkspaceMisaligned, name, static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(pointer)),
                  "must be aligned to 256 bytes");
  }
  return {};
}

Status check_workspace(const Problem& problem, const Workspace& workspace, const fixup::WorkspaceNeed& need) noexcept {
  if (const Status s = check_memory("workspace.state", workspace.state, workspace.state_bytes, need.state_bytes); !s.ok()) return s;
  if (const Status s = check_memory("workspace.scratch", workspace.scratch, workspace.scratch_bytes, need.scratch_bytes); !s.ok()) {
    return s;
  }
  const auto state_bytes = static_cast<std::int64_t>(workspace.state_bytes);
  const auto scratch_bytes = static_cast<std::int64_t>(workspace.scratch_bytes);
  if (overlap(workspace.state, state_bytes, workspace.scratch, scratch_bytes)) {
    return refuse(StatusCode::kInvalidArgument, "workspace.scratch",
                  static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(workspace.scratch)),
                  "must not overlap workspace.state");
  }
  for (const void* tensor : {static_cast<const void*>(problem.o.data), static_cast<const void*>(problem.lse.data), problem.q.data,
                             problem.k.data, problem.v.data, problem.append.k.data, problem.append.v.data}) {
    if (tensor != nullptr &&
        (overlap(workspace.scratch, scratch_bytes, tensor, 1) || overlap(workspace.state, state_bytes, tensor, 1))) {
      return refuse(StatusCode::kInvalidArgument, "workspace", static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(tensor)),
                    "must not overlap a tensor");
    }
  }
  return {};
}

}  // namespace lean
