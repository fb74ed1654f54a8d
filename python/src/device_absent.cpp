#include "device.hpp"
#include "python.hpp"

namespace lean::python::device {

bool built() noexcept { return false; }
int count() noexcept { return 0; }

std::int32_t index_of(const void*) { return -1; }

Guard::Guard(std::int32_t) {}
Guard::~Guard() = default;

Workspace workspace_for(std::int32_t, void*, const WorkspaceSize&) {
  raise(PyExc_NotImplementedError, "q: is on a CUDA device: this build has no CUDA backend");
}
void clear_workspaces() noexcept {}

}  // namespace lean::python::device
