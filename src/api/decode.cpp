// The C++ interface: validate -> select -> schedule -> launch. Every public call starts here and no check is made twice.
#include "api/backends.hpp"
#include "api/exchange_checks.hpp"
#include "api/option_preconditions.hpp"
#include "api/workspace_checks.hpp"
#include "fixup/workspace.hpp"
#include "lean/lean.hpp"
#include "problem/length_fault_text.hpp"
#include "problem/preconditions.hpp"

namespace lean {
namespace {

/// Of a call that is one rank's part of an exchange: what is sent of it has room.
Status check_part(const Problem& problem, const Options& options) noexcept {
  if (options.exchange == nullptr) return {};
  if (options.backend != Backend::kCuda)
    return refuse(StatusCode::kUnsupported, "options.exchange", options.exchange->ranks,
                  "ranks; peer memory is of GPUs: results in host memory are merged by merge_states()");
  const std::int64_t rows = problem.batch * problem.q_heads * problem.q_tokens;
  return check_exchange(*options.exchange, rows, value_dim_of(problem), problem.o.dtype);
}

/// All that is checked of a call, of resolved options, before its backend is asked.
Status check_call(const Problem& problem, const Options& options, const BackendEntry*& backend) noexcept {
  if (const Status status = option_preconditions().check(options); !status.ok()) return status;
  if (const Status status = problem_preconditions().check(problem); !status.ok()) return status;
  if (const Status status = check_part(problem, options); !status.ok()) return status;
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

/// Where the state does not say which entry it was: it changed meanwhile, and check_lengths() may still name it.
const char* text_without_entry(StatusCode code) noexcept {
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

Status status_of_sticky(const fixup::StateHeader& header) noexcept {
  auto code = static_cast<StatusCode>(header.sticky_code);
  if (code == StatusCode::kBadLengths || code == StatusCode::kBadPageIndex) {
    const Status named =
        status_of(header.fault, code == StatusCode::kBadPageIndex ? "; its tokens were skipped" : "; it was clamped");
    if (named.code == code) return named;
  } else if (code != StatusCode::kWorkspaceInUse) {
    code = StatusCode::kWorkspaceDirty;  // whatever else the state holds, if nobody has zeroed it
  }
  Status status{.code = code};
  std::snprintf(status.message, sizeof(status.message), "%s", text_without_entry(code));
  return status;
}

}  // namespace

Status sticky_status(const Workspace& workspace, const Options& options) noexcept {
  const BackendEntry* backend = nullptr;
  if (const Status status = check_state(workspace, options, backend); !status.ok()) return status;
  fixup::StateHeader header;
  if (const Status status = backend->read_header(workspace, options, header); !status.ok()) return status;
  return header.sticky_code == 0 ? Status{} : status_of_sticky(header);
}

}  // namespace lean
