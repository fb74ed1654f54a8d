// The CUDA backend as the API asks it: a call refused or decided, how it is cut up, a state cleared, its header read.
#include "backends/cuda/cuda_backend.hpp"

#include <cuda_runtime_api.h>

#include "backends/cuda/device.hpp"
#include "backends/cuda/refusals.hpp"
#include "base/int_math.hpp"
#include "fixup/workspace.hpp"

namespace lean::cuda {

Status decide(const Problem& problem, const Options& options, CallPlan& plan) noexcept {
  if (const Status status = refuse_problem(problem); !status.ok()) return status;
  Device device;
  if (const Status status = current_device(device); !status.ok()) return status;
  plan = plan_call(problem, options, device);
  return refuse_plan(problem, plan);
}

tile::Tiling tiling_of(const Problem& problem, const Options& options) noexcept {
  Device device;
  if (!current_device(device).ok()) return {.workers = max_of(1, options.workers)};
  const CallPlan plan = plan_call(problem, options, device);
  return plan.has_kernel() ? plan.tiling() : tile::Tiling{.workers = plan.options.workers};
}

Status clear_state(const Workspace& workspace, const Options& options) noexcept {
  return cuda_status(cudaMemsetAsync(workspace.state, 0, workspace.state_bytes, static_cast<cudaStream_t>(options.stream)),
                     "cudaMemsetAsync");
}

Status read_header(const Workspace& workspace, const Options& options, fixup::StateHeader& header) noexcept {
  auto* const stream = static_cast<cudaStream_t>(options.stream);
  const cudaError_t error = cudaMemcpyAsync(&header, workspace.state, sizeof(header), cudaMemcpyDeviceToHost, stream);
  if (error != cudaSuccess) return cuda_status(error, "cudaMemcpyAsync");
  return cuda_status(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
}

}  // namespace lean::cuda
