// device.hpp in a build without the CUDA backend.
#include "integrations/runtime/device.hpp"

namespace lean::runtime::device {

bool built() noexcept { return false; }
int count() noexcept { return 0; }

std::int32_t current() { return -1; }
bool launches_dependents(std::int32_t) { return false; }
std::int32_t index_of(const void*) { return -1; }

Guard::Guard(std::int32_t) {}
Guard::~Guard() = default;

Workspace workspace_for(std::int32_t, void*, const WorkspaceSize&) { throw Absent("this build has no CUDA backend"); }
void* scratch_for(std::int32_t, void*, std::size_t) { throw Absent("this build has no CUDA backend"); }
void clear_workspaces() noexcept {}

}  // namespace lean::runtime::device
