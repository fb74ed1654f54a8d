// PipelineState: which of a ring's buffers is next and in which phase its barriers are, as producer and consumers each keep it.
#pragma once

#include <cstdint>

namespace lean::cuda {

struct PipelineState {
  std::int32_t count;       // buffers of the ring
  std::int32_t index = 0;   // the next
  std::uint32_t phase = 0;  // parity of the phase that ends this use of it

  __device__ explicit PipelineState(std::int32_t buffers) : count(buffers) {}

  __device__ __forceinline__ void advance() {
    if (++index == count) {
      index = 0;
      phase ^= 1U;
    }
  }
};

}  // namespace lean::cuda
