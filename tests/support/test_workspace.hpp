// TestWorkspace: exactly the bytes workspace_size() asks for, guarded on both sides; state zeroed as documented,
// scratch filled with what a careless reader would notice.
#pragma once

#include "lean/lean.hpp"
#include "support/case.hpp"
#include "support/guarded_buffer.hpp"

namespace lean::support {

class TestWorkspace {
 public:
  TestWorkspace(const Problem& problem, const Options& options, Fill scratch_fill = Fill::kNan)
      : size_(workspace_size(problem, options)), state_(size_.state_bytes), scratch_(size_.scratch_bytes) {
    state_.fill(std::byte{0});
    fill_scratch(scratch_fill);
  }

  [[nodiscard]] const Status& status() const { return size_.status; }
  [[nodiscard]] const WorkspaceSize& size() const { return size_; }
  [[nodiscard]] Workspace get() const { return {state_.data(), size_.state_bytes, scratch_.data(), size_.scratch_bytes}; }
  [[nodiscard]] bool intact() const { return state_.intact() && scratch_.intact(); }
  [[nodiscard]] const GuardedBuffer& state() const { return state_; }
  [[nodiscard]] const GuardedBuffer& scratch() const { return scratch_; }

  void fill_scratch(Fill fill) const {
    if (fill != Fill::kInfinity) return scratch_.fill(fill == Fill::kNan ? kPoison : std::byte{0});
    for (std::size_t i = 0; i < size_.scratch_bytes / sizeof(std::uint32_t); ++i) scratch_.as<std::uint32_t>()[i] = 0x7F800000U;
  }

 private:
  WorkspaceSize size_;
  GuardedBuffer state_;
  GuardedBuffer scratch_;
};

}  // namespace lean::support
