#include "backends/cpu/highway_targets.hpp"
namespace lean::cpu { const TileKernels* avx512_bf16_kernels() noexcept { return nullptr; } }
