// What an embedding needs of a GPU: which one is current, which one holds some memory, and memory for workspaces. device_cuda.cpp
// in a build with the CUDA backend, device_absent.cpp in others.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>

#include "lean/lean.hpp"

namespace lean::runtime::device {

/// The GPU's runtime refused; the message says what.
struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// A GPU was asked for in a build without the CUDA backend.
struct Absent : Error {
  using Error::Error;
};

/// True when this build has the CUDA backend.
[[nodiscard]] bool built() noexcept;
/// GPUs this process sees; 0 without a driver.
[[nodiscard]] int count() noexcept;

/// The device that is current. Throws Error.
[[nodiscard]] std::int32_t current();
/// Kernels there may be programmatic dependent launches. Throws Error.
[[nodiscard]] bool launches_dependents(std::int32_t index);
/// The device that memory is on. Throws Error.
[[nodiscard]] std::int32_t index_of(const void* memory);

/// Makes a device current and the one before current again at the end. Index below 0: does nothing.
class Guard {
 public:
  explicit Guard(std::int32_t index);
  ~Guard();
  Guard(const Guard&) = delete;
  Guard& operator=(const Guard&) = delete;

 private:
  int previous_ = -1;
};

/// The workspace of a device and stream; of the per-thread default stream that of the calling thread. Memory once given out stays
/// alive, since a captured graph may hold it. Any thread may call. Throws Error when the memory cannot be had, Absent without the
/// CUDA backend.
[[nodiscard]] Workspace workspace_for(std::int32_t index, void* stream, const WorkspaceSize& need);
/// Other memory of the device and stream, of at least `bytes`: for what an embedding keeps beside a workspace until the stream has
/// passed a call. It grows as a workspace does. Throws as workspace_for().
[[nodiscard]] void* scratch_for(std::int32_t index, void* stream, std::size_t bytes);
void clear_workspaces() noexcept;

}  // namespace lean::runtime::device
