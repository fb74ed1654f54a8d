// The life of a call, whatever the backend: decided once, given memory, carried out. A backend has a plan of its own kind, with the
// need() of a workspace; `kDecide` fills it or refuses the call, `kRun` carries it out.
#pragma once

#include <cstddef>

#include "api/workspace_checks.hpp"
#include "fixup/workspace_size.hpp"
#include "lean/lean.hpp"

namespace lean {

template <typename TPlan, Status (*kDecide)(const Problem&, const Options&, TPlan&) noexcept,
          Status (*kRun)(const Problem&, const TPlan&, const Workspace&) noexcept>
struct PlannedCall {
  static Status supports(const Problem& problem, const Options& options) noexcept {
    TPlan plan;
    return kDecide(problem, options, plan);
  }

  static WorkspaceSize workspace_size(const Problem& problem, const Options& options) noexcept {
    TPlan plan;
    if (const Status status = kDecide(problem, options, plan); !status.ok()) return {.status = status};
    const fixup::WorkspaceNeed need = plan.need();
    return {.state_bytes = static_cast<std::size_t>(need.state_bytes),
            .scratch_bytes = static_cast<std::size_t>(need.scratch_bytes)};
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
