// Enqueues a kernel other than the variants' own (launch.cpp has those): what is before, after or in place of them.
#pragma once

#include <cuda_runtime.h>

#include <type_traits>

#include "backends/cuda/device.hpp"
#include "lean/status.hpp"

namespace lean::cuda {

struct KernelLaunch {
  dim3 grid{};
  unsigned threads = 0;    // of a CTA
  bool overlaps = false;   // as a programmatic dependent of what is ahead of it
  void* stream = nullptr;  // a cudaStream_t
};

template <typename... TParameters>
[[nodiscard]] Status enqueue_kernel(const KernelLaunch& launch, void (*kernel)(TParameters...),
                                    const std::type_identity_t<TParameters>&... arguments) noexcept {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = launch.grid;
  config.blockDim = dim3(launch.threads);
  config.stream = static_cast<cudaStream_t>(launch.stream);
  config.attrs = &attribute;
  config.numAttrs = launch.overlaps ? 1 : 0;
  return cuda_status(cudaLaunchKernelEx(&config, kernel, arguments...), "cudaLaunchKernelEx");
}

}  // namespace lean::cuda
