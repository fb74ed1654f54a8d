// The C++ interface: validate -> select -> schedule -> launch. Every public call starts here and no check is made twice.
#include <cstdio>
#include <initializer_list>

#include "api/backends.hpp"
#include "api/option_preconditions.hpp"
#include "base/message.hpp"
#include "fixup/workspace.hpp"
#include "lean/lean.hpp"
#include "problem/preconditions.hpp"

namespace lean {
namespace {

/// `options` are resolved.
Status check(const Problem& problem, const Options& options) noexcept {
  if (const Status status = option_preconditions().check(options); !status.ok()) return status;
  if (const Status status = problem_preconditions().check(problem); !status.ok()) return status;
  const BackendEntry* backend = backend_of(options.backend);
  if (backend == nullptr) {
    return refuse(StatusCode::kUnsupported, "options.backend", static_cast<std::int64_t>(options.backend), "not in this build");
  }
  return backend->supports(problem, options);
}

bool misaligned(const void* pointer) noexcept { return reinterpret_cast<std::uintptr_t>(pointer) % kWorkspaceAlignment != 0; }

bool overlaps(const void* a, std::size_t a_bytes, const void* b) noexcept {
  const auto begin = reinterpret_cast<std::uintptr_t>(a);
  const auto at = reinterpret_cast<std::uintptr_t>(b);
  return at >= begin && at - begin < a_bytes;
}

Status check_memory(const char* name, const void* pointer, std::size_t bytes, std::size_t needed) noexcept {
  if (needed == 0) return {};  // then it may be null
  if (pointer == nullptr || bytes < needed) {
    Status status{.code = StatusCode::kWorkspaceTooSmall};
    std::snprintf(status.message, sizeof(status.message), "%s_bytes = %zu%s: %zu needed", name, bytes,
                  pointer == nullptr ? " (null)" : "", needed);
    return status;
  }
  if (misaligned(pointer)) {
    return refuse(StatusCode::kWorkspaceMisaligned, name, static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(pointer)),
                  "must be aligned to 256 bytes");
  }
  return {};
}

Status check_workspace(const Problem& problem, const Workspace& workspace, const WorkspaceSize& need) noexcept {
  if (const Status s = check_memory("workspace.state", workspace.state, workspace.state_bytes, need.state_bytes); !s.ok()) return s;
  if (const Status s = check_memory("workspace.scratch", workspace.scratch, workspace.scratch_bytes, need.scratch_bytes); !s.ok())
    return s;
  if (overlaps(workspace.state, workspace.state_bytes, workspace.scratch) ||
      overlaps(workspace.scratch, workspace.scratch_bytes, workspace.state)) {
    return refuse(StatusCode::kInvalidArgument, "workspace.scratch",
                  static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(workspace.scratch)),
                  "must not overlap workspace.state");
  }
  for (const void* tensor : {static_cast<const void*>(problem.o.data), static_cast<const void*>(problem.lse.data), problem.q.data,
                             problem.k.data, problem.v.data, problem.append.k.data, problem.append.v.data}) {
    if (tensor != nullptr && (overlaps(workspace.scratch, workspace.scratch_bytes, tensor) ||
                              overlaps(workspace.state, workspace.state_bytes, tensor))) {
      return refuse(StatusCode::kInvalidArgument, "workspace", static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(tensor)),
                    "must not overlap a tensor");
    }
  }
  return {};
}

}  // namespace

Status supports(const Problem& problem, const Options& options) noexcept { return check(problem, resolve(options)); }

WorkspaceSize workspace_size(const Problem& problem, const Options& options) noexcept {
  const Options resolved = resolve(options);
  if (const Status status = check(problem, resolved); !status.ok()) return {.status = status, .state_bytes = 0, .scratch_bytes = 0};
  return backend_of(resolved.backend)->workspace_size(problem, resolved);
}

Status decode(const Problem& problem, const Options& options, const Workspace& workspace) noexcept {
  const Options resolved = resolve(options);
  if (const Status status = check(problem, resolved); !status.ok()) return status;
  if (problem.batch == 0) return {};
  const BackendEntry& backend = *backend_of(resolved.backend);
  const WorkspaceSize need = backend.workspace_size(problem, resolved);
  if (!need.status.ok()) return need.status;
  if (const Status status = check_workspace(problem, workspace, need); !status.ok()) return status;
  return backend.decode(problem, resolved, workspace);
}

namespace {

/// The backend that owns the state, when there is one and the state is memory it could own.
Status check_state(const Workspace& workspace, const Options& options, const BackendEntry*& backend) noexcept {
  if (const Status s = check_memory("workspace.state", workspace.state, workspace.state_bytes, fixup::kStateHeaderBytes); !s.ok())
    return s;
  backend = backend_of(options.backend);
  if (backend != nullptr) return {};
  return refuse(StatusCode::kUnsupported, "options.backend", static_cast<std::int64_t>(options.backend), "not in this build");
}

}  // namespace

Status reset_workspace(const Workspace& workspace, const Options& options) noexcept {
  const BackendEntry* backend = nullptr;
  if (const Status status = check_state(workspace, options, backend); !status.ok()) return status;
  return backend->clear_state(workspace, options);
}

namespace {

/// What was seen is in the caller's arrays, on a device perhaps: check_lengths() names the entry.
const char* text_of_sticky(StatusCode code) noexcept {
  switch (code) {
    case StatusCode::kBadPageIndex:
      return "pages: an id lay outside [0, page_count); its tokens were skipped; check_lengths() on a copy in host memory names it";
    case StatusCode::kWorkspaceDirty:
      return "workspace.state: counters were not 0 when a call began: zero the state or call reset_workspace()";
    case StatusCode::kWorkspaceInUse:
      return "workspace.state: served two calls in flight; or reset_workspace() after an aborted one";
    default: return "lengths: a value lay outside [0, capacity]; it was clamped; check_lengths() on copies in host memory names it";
  }
}

}  // namespace

Status sticky_status(const Workspace& workspace, const Options& options) noexcept {
  const BackendEntry* backend = nullptr;
  if (const Status status = check_state(workspace, options, backend); !status.ok()) return status;
  StatusCode code = StatusCode::kOk;
  if (const Status status = backend->read_sticky(workspace, options, code); !status.ok()) return status;
  if (code == StatusCode::kOk) return {};
  Status status{.code = code};
  std::snprintf(status.message, sizeof(status.message), "%s", text_of_sticky(code));
  return status;
}

}  // namespace lean
