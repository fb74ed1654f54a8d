// Host workspaces, one a thread, that end with it; those of devices are device_cuda.cpp's.
#include "integrations/runtime/workspaces.hpp"

#include <cstring>
#include <new>

#include "integrations/runtime/device.hpp"

namespace lean::runtime {
namespace {

/// Aligned host memory that grows by replacement.
class HostBuffer {
 public:
  HostBuffer() = default;
  ~HostBuffer() { release(); }
  HostBuffer(const HostBuffer&) = delete;
  HostBuffer& operator=(const HostBuffer&) = delete;

  /// True when the memory is new.
  bool reserve(std::size_t bytes) {
    if (bytes <= bytes_) return false;
    release();
    data_ = ::operator new(bytes, kAlignment);
    bytes_ = bytes;
    return true;
  }
  void release() noexcept {
    ::operator delete(data_, kAlignment);
    data_ = nullptr;
    bytes_ = 0;
  }
  [[nodiscard]] void* data() const noexcept { return data_; }
  [[nodiscard]] std::size_t bytes() const noexcept { return bytes_; }

 private:
  static constexpr std::align_val_t kAlignment{kWorkspaceAlignment};
  void* data_ = nullptr;
  std::size_t bytes_ = 0;
};

struct HostWorkspace {
  HostBuffer state;
  HostBuffer scratch;
};

HostWorkspace& of_this_thread() noexcept {
  thread_local HostWorkspace workspace;
  return workspace;
}

}  // namespace

namespace {

Workspace host_workspace_for(const WorkspaceSize& need) {
  HostWorkspace& host = of_this_thread();
  if (host.state.reserve(need.state_bytes)) std::memset(host.state.data(), 0, need.state_bytes);
  host.scratch.reserve(need.scratch_bytes);
  return {.state = host.state.data(),
          .state_bytes = host.state.bytes(),
          .scratch = host.scratch.data(),
          .scratch_bytes = host.scratch.bytes()};
}

}  // namespace

Workspace workspace_for(const Options& options, std::int32_t device_index, const WorkspaceSize& need) {
  if (options.backend == Backend::kCuda) return device::workspace_for(device_index, options.stream, need);
  return host_workspace_for(need);
}

void clear_workspaces() noexcept {
  of_this_thread().state.release();
  of_this_thread().scratch.release();
  device::clear_workspaces();
}

}  // namespace lean::runtime
