// Turn: a place in a ring of buffers and the parity of its barriers' phase, as producer and consumers each keep it.
#pragma once

#include <cstdint>

namespace lean::cuda {

struct Turn {
  std::int32_t places;
  std::int32_t place = 0;
  std::uint32_t parity = 0;  // of the phase that ends this use of the place

  __device__ explicit Turn(std::int32_t count) : places(count) {}

  __device__ __forceinline__ void advance() {
    if (++place == places) {
      place = 0;
      parity ^= 1U;
    }
  }
};

}  // namespace lean::cuda
