// The build with the CUDA backend.
#include "api/backends.hpp"
#include "api/planned_call.hpp"
#include "backends/cuda/cuda_backend.hpp"
#include "backends/cuda/exchange.hpp"
#include "backends/cuda/exchange_memory.hpp"
#include "backends/cuda/merge_states.hpp"
#include "backends/cuda/shard_lengths.hpp"

namespace lean {

const BackendEntry* cuda_backend() noexcept {
  using Call = PlannedCall<cuda::CallPlan, cuda::decide, cuda::launch_call>;
  static constexpr ExchangeMemory kMemory{.create = cuda::create_exchange,
                                          .open = cuda::open_exchange,
                                          .join = cuda::join_exchange,
                                          .clear = cuda::clear_exchange,
                                          .close = cuda::close_exchange};
  static constexpr BackendEntry kCuda{.supports = Call::supports,
                                      .workspace_size = Call::workspace_size,
                                      .decode = Call::decode,
                                      .clear_state = cuda::clear_state,
                                      .read_header = cuda::read_header,
                                      .tiling_of = cuda::tiling_of,
                                      .merge_states = cuda::merge_states,
                                      .shard_lengths = cuda::enqueue_shard_lengths,
                                      .exchange = cuda::enqueue_exchange,
                                      .exchange_memory = &kMemory};
  return &kCuda;
}

}  // namespace lean
