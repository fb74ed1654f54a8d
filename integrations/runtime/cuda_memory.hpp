// Memory of a GPU by CUDA's run time, for the files of a build with the CUDA backend. What is taken is given back.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <memory>
#include <type_traits>

namespace lean::runtime::device {

/// Throws device::Error, which says what was tried, unless the call succeeded.
void check(cudaError_t error, const char* what);

struct GiveBack {
  void operator()(void* memory) const noexcept { cudaFree(memory); }
  void operator()(cudaStream_t stream) const noexcept { cudaStreamDestroy(stream); }
};
using Memory = std::unique_ptr<void, GiveBack>;
using Stream = std::unique_ptr<std::remove_pointer_t<cudaStream_t>, GiveBack>;

/// Memory of the current device, zeroed. The zeroing is done when this returns, and is part of no capture. Throws Error.
[[nodiscard]] Memory allocate_zeroed(std::size_t bytes);
/// Zeroes memory beside whatever the device does, and waits for that alone.
void zero(void* memory, std::size_t bytes);

}  // namespace lean::runtime::device
