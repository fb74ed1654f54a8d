// The build with the CUDA backend.
#include "api/backends.hpp"
#include "backends/cuda/cuda_backend.hpp"
#include "backends/cuda/kernel_config.hpp"

namespace lean {

const BackendEntry* cuda_backend() noexcept {
  static constexpr BackendEntry kCuda{.supports = cuda::supports,
                                      .workspace_size = cuda::workspace_size,
                                      .decode = cuda::decode,
                                      .clear_state = cuda::clear_state,
                                      .read_sticky = cuda::read_sticky,
                                      .select_tile = cuda::select_tile,
                                      .cost_model = cuda::cost_model,
                                      .worker_count = cuda::worker_count};
  return &kCuda;
}

}  // namespace lean
