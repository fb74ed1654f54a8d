// The C++ interface: validate -> select -> schedule -> launch. Every public call starts here and no check is made twice.
#include "api/backends.hpp"
#include "api/option_preconditions.hpp"
#include "api/workspace_checks.hpp"
#include "fixup/workspace.hpp"
#include "lean/lean.hpp"
#include "problem/preconditions.hpp"

namespace lean {
namespace {

/// All that is checked of a call, of resolved options, before its backend is asked.
Status check_call(const Problem& problem, const Options& options, const BackendEntry*& backend) noexcept {
  if (const Status status = option_preconditions().check(options); !status.ok()) return status;
  if (const Status status = problem_preconditions().check(problem); !status.ok()) return status;
  return find_backend(options, backend);
}

}  // namespace

Status supports(const Problem& problem, const Options& options) noexcept {
  const Options resolved = resolve(options);
  const BackendEntry* backend = nullptr;
  if (const Status status = check_call(problem, resolved, backend); !status.ok()) return status;
  return backend->supports(problem, resolved);
}

WorkspaceSize workspace_size(const Problem& problem, const Options& options) noexcept {
  const Options resolved = resolve(options);
  const BackendEntry* backend = nullptr;
  if (const Status status = check_call(problem, resolved, backend); !status.ok()) return {.status = status};
  return backend->workspace_size(problem, resolved);
}

Status decode(const Problem& problem, const Options& options, const Workspace& workspace) noexcept {
  const Options resolved = resolve(options);
  const BackendEntry* backend = nullptr;
  if (const Status status = check_call(problem, resolved, backend); !status.ok()) return status;
  return backend->decode(problem, resolved, workspace);
}

namespace {

/// The backend that owns the state, when there is one and the state is memory it could own.
Status check_state(const Workspace& workspace, const Options& options, const BackendEntry*& backend) noexcept {
  if (const Status s = check_memory("workspace.state", workspace.state, workspace.state_bytes, fixup::kStateHeaderBytes); !s.ok())
    return s;
  return find_backend(options, backend);
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
