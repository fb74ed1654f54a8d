// The kernel of shard_lengths(): a thread a length.
#include "backends/cuda/shard_lengths.hpp"

#include <cuda_runtime_api.h>

#include "backends/cuda/device.hpp"
#include "backends/cuda/enqueue_kernel.hpp"
#include "backends/cuda/ptx/grid.cuh"
#include "base/int_math.hpp"
#include "problem/token_shard.hpp"

namespace lean::cuda {
namespace {

constexpr std::int32_t kThreads = 128;

__global__ void __launch_bounds__(kThreads)
    shard_lengths_kernel(const std::int32_t* tokens, std::int32_t* held, const std::int64_t count, const TokenShard shard) {
  ptx::start_dependents();
  ptx::await_earlier_kernels();  // over already where this is not a dependent launch
  const std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i < count) held[i] = tokens_held(shard, tokens[i]);
}

}  // namespace

Status enqueue_shard_lengths(const std::int32_t* tokens, std::int32_t* held, std::int64_t count, const TokenShard& shard,
                             const Options& options) noexcept {
  Device device;
  if (const Status status = current_device(device); !status.ok()) return status;
  const KernelLaunch launch{.grid = dim3(static_cast<unsigned>(ceil_div(count, kThreads))),
                            .threads = kThreads,
                            .overlaps = device.launches_dependents(),
                            .stream = options.stream};
  return enqueue_kernel(launch, shard_lengths_kernel, tokens, held, count, shard);
}

}  // namespace lean::cuda
