// Numbers of what backends serve fastest, for embeddings that choose an attention before they have a problem to ask supports() of.
#pragma once

#include <cstdint>

namespace lean {

/// Widest head_dim, of multiples of 8, that the CUDA backend's matrix units serve; others go to its plain kernel.
inline constexpr std::int32_t kWidestCudaHead = 256;

}  // namespace lean
