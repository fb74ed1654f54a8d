// The life of a call, whatever the backend: decided once, given memory, carried out. A backend has a plan of its own kind, with the
// need() of a workspace; `kDecide` fills it or refuses the call, `kRun` carries it out.
#pragma once

#include "api/workspace_checks.hpp"
#include "lean/lean.hpp"

namespace lean {

template <typename TPlan, Status (*kDecide)(const Problem&, const Options&, TPlan&) noexcept,
          Status (*kRun)(const Problem&, const TPlan&, const Workspace&) noexcept>
struct PlannedCall {
  static WorkspaceSize workspace_size(const Problem& problem, const Options& options) noexcept {
    TPlan plan;
    if (const Status status = kDecide(problem, options, plan); !status.ok()) return {.status = status};
    return plan.need();
  }

  static Status decode(const Problem& problem, const Options& options, const Workspace& workspace) noexcept {
    TPlan plan;
    if (const Status status = kDecide(problem, options, plan); !status.ok()) return status;
    if (problem.batch == 0) return {};
    if (const Status status = check_workspace(problem, workspace, plan.need()); !status.ok()) return status;
    return kRun(problem, plan, workspace);
  }
};

}  // namespace lean
