// The call that every embedding makes: tried in the workspace there is, once more in a larger one where it did not suffice.
#include "integrations/runtime/call.hpp"

#include "integrations/runtime/workspaces.hpp"

namespace lean::runtime {
namespace {

/// Whether a call that ended so may have left something in its workspace.
bool may_have_begun(StatusCode code) noexcept {
  return code == StatusCode::kWorkspaceDirty || code == StatusCode::kWorkspaceInUse || code == StatusCode::kBackendError;
}

}  // namespace

Status decode(const Problem& problem, const Options& options, std::int32_t device_index) {
  Workspace workspace = workspace_for(options, device_index, {});
  Status status = lean::decode(problem, options, workspace);
  if (status.code == StatusCode::kWorkspaceTooSmall) {
    const WorkspaceSize need = workspace_size(problem, options);
    if (!need.status.ok()) return need.status;
    workspace = workspace_for(options, device_index, need);
    status = lean::decode(problem, options, workspace);
  }
  if (may_have_begun(status.code) && workspace.state != nullptr) static_cast<void>(reset_workspace(workspace, options));
  return status;
}

}  // namespace lean::runtime
