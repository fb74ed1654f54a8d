// What the code is compiled for. LEAN_CUDA_SM80_PATH: for sm_90 too as for sm_80, so that the older path is tested on newer
// hardware.
#pragma once

#if defined(__CUDA_ARCH__) && defined(LEAN_CUDA_SM80_PATH) && __CUDA_ARCH__ > 800
#define LEAN_CUDA_ARCH 800
#elif defined(__CUDA_ARCH__)
#define LEAN_CUDA_ARCH __CUDA_ARCH__
#endif

// Products of warpgroups and registers handed over between them are sm_90a's: code for that GPU alone, which no newer one runs.
#if defined(LEAN_CUDA_ARCH) && LEAN_CUDA_ARCH >= 900 && defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define LEAN_CUDA_WARPGROUPS
#endif

// Functions that are called, not inlined, so that loops keep their registers and code is there once; but for sm_90a, where
// registers are not handed from warps to others in a kernel that calls functions.
#ifdef LEAN_CUDA_WARPGROUPS
#define LEAN_CUDA_CALLED __forceinline__
#else
#define LEAN_CUDA_CALLED __noinline__ inline
#endif

#include "backends/cuda/architecture.hpp"

namespace lean::cuda::ptx {

#if defined(LEAN_CUDA_ARCH)
inline constexpr Architecture kCompiledFor = architecture_of(LEAN_CUDA_ARCH / 100, LEAN_CUDA_ARCH / 10 % 10);
#else
inline constexpr Architecture kCompiledFor = kArchitectures[0];  // host code, of which nothing is left out
#endif

}  // namespace lean::cuda::ptx
