// Compiles lean_tile-inl.hpp once per vector instruction set (Highway's foreach_target) and hands out the tables.
// Targets kept: 128 bits (SSE4 or NEON), AVX2 and AVX-512; those between gain nothing here.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>

#include "backends/cpu/highway_targets.hpp"
#include "backends/cpu/tile_kernels.hpp"
#include "lean/float_types.hpp"
#include "softmax/state.hpp"

#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_AVX3_DL)
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backends/cpu/lean_tile-inl.hpp"
#include "hwy/foreach_target.h"
//
#include "backends/cpu/lean_tile-inl.hpp"

#if HWY_ONCE
#if HWY_ARCH_X86_64
#include <cpuid.h>
#endif

namespace lean::cpu {
namespace {

// Asked before a target's table is made: making it already runs that target's code. Not hwy::SupportedTargets(): that would be
// the one call that needs libhwy at run time. The features are those Highway compiles each target for.
#if HWY_ARCH_X86_64
/// cpuid leaf 1, ecx bit 29; g++ 12 does not know the name "f16c".
bool has_f16c() noexcept {
  unsigned eax = 0;
  unsigned ebx = 0;
  unsigned ecx = 0;
  unsigned edx = 0;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx >> 29 & 1U) != 0;
}
bool runs_sse4() noexcept {
  return __builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("ssse3") && __builtin_cpu_supports("pclmul");
}
bool runs_avx2() noexcept {
  return runs_sse4() && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi") &&
         __builtin_cpu_supports("bmi2") && has_f16c();
}
bool runs_avx512() noexcept {
  return runs_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512cd");
}
#endif

}  // namespace

const TileKernels* native128_kernels() noexcept {
#if HWY_TARGETS & HWY_SSE4
  static const std::optional<TileKernels> kernels = runs_sse4() ? std::optional(N_SSE4::tile_kernels()) : std::nullopt;
  return kernels ? &*kernels : nullptr;
#elif HWY_ARCH_ARM
  static const TileKernels kernels = HWY_NAMESPACE::tile_kernels();  // the baseline is NEON
  return &kernels;
#else
  return nullptr;
#endif
}

const TileKernels* avx2_kernels() noexcept {
#if HWY_TARGETS & HWY_AVX2
  static const std::optional<TileKernels> kernels = runs_avx2() ? std::optional(N_AVX2::tile_kernels()) : std::nullopt;
  return kernels ? &*kernels : nullptr;
#else
  return nullptr;
#endif
}

const TileKernels* avx512_kernels() noexcept {
#if HWY_TARGETS & HWY_AVX3
  static const std::optional<TileKernels> kernels = runs_avx512() ? std::optional(N_AVX3::tile_kernels()) : std::nullopt;
  return kernels ? &*kernels : nullptr;
#else
  return nullptr;
#endif
}

}  // namespace lean::cpu
#endif  // HWY_ONCE
