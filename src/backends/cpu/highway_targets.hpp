// One table of TileKernels per compiled instruction set; null where this machine does not run it or the build lacks it.
#pragma once

#include "backends/cpu/tile_kernels.hpp"

namespace lean::cpu {

[[nodiscard]] const TileKernels* scalar_kernels() noexcept;     // scalar_target.cpp
[[nodiscard]] const TileKernels* native128_kernels() noexcept;  // SSE4 on x86-64, NEON on AArch64
[[nodiscard]] const TileKernels* avx2_kernels() noexcept;
[[nodiscard]] const TileKernels* avx512_kernels() noexcept;
[[nodiscard]] const TileKernels* avx512_bf16_kernels() noexcept;  // avx512_bf16.cpp
[[nodiscard]] const TileKernels* amx_bf16_kernels() noexcept;     // amx_bf16.cpp

}  // namespace lean::cpu
