// StagedTile: which tokens of a sequence a stage holds.
#pragma once

#include <cstdint>

namespace lean::cuda {

struct StagedTile {
  std::int32_t token = 0;
  std::int32_t tokens = 0;

  [[nodiscard]] __device__ __forceinline__ std::int32_t end() const { return token + tokens; }
};

}  // namespace lean::cuda
