// TestWorkspace: exactly the bytes workspace_size() asks for, guarded on both sides; state zeroed as documented,
// scratch filled with what a careless reader would notice.
#pragma once

#include "lean/lean.hpp"
#include "support/case.hpp"
#include "support/workspace_buffer.hpp"

namespace lean::support {

class TestWorkspace {
 public:
  TestWorkspace(const Problem& problem, const Options& options, Fill scratch_fill = Fill::kNan)
      : size_(workspace_size(problem, options)), state_(size_.state_bytes), scratch_(size_.scratch_bytes) {
    state_.fill(0);
    if (scratch_fill != Fill::kNan) scratch_.fill(scratch_fill == Fill::kZero ? 0 : 0x7F800000U);
  }

  [[nodiscard]] const Status& status() const { return size_.status; }
  [[nodiscard]] const WorkspaceSize& size() const { return size_; }
  [[nodiscard]] Workspace get() const { return {state_.data(), size_.state_bytes, scratch_.data(), size_.scratch_bytes}; }
  [[nodiscard]] bool intact() const { return state_.intact() && scratch_.intact(); }
  [[nodiscard]] const WorkspaceBuffer& state() const { return state_; }

 private:
  WorkspaceSize size_;
  WorkspaceBuffer state_;
  WorkspaceBuffer scratch_;
};

}  // namespace lean::support
