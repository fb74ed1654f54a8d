// Compiles lean_tile-inl.hpp once per vector instruction set (Highway's foreach_target) and hands out the tables.
// Targets kept: 128 bits (SSE4 or NEON), AVX2 and AVX-512; those between gain nothing here.
#include <cstddef>
#include <cstdint>
#include <optional>

#include "backends/cpu/highway_targets.hpp"
#include "backends/cpu/tile_kernels.hpp"
#include "base/float_types.hpp"
#include "softmax/state.hpp"

#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_AVX3_DL)
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backends/cpu/lean_tile-inl.hpp"
#include "hwy/foreach_target.h"
//
#include "backends/cpu/lean_tile-inl.hpp"

#if HWY_ONCE
namespace lean::cpu {
namespace {

/// Asked before a target's table is made: making it already runs that target's code.
bool runs_here(std::int64_t target) noexcept { return (hwy::SupportedTargets() & target) != 0; }

}  // namespace

const TileKernels* native128_kernels() noexcept {
#if HWY_TARGETS & HWY_SSE4
  static const std::optional<TileKernels> kernels = runs_here(HWY_SSE4) ? std::optional(N_SSE4::tile_kernels()) : std::nullopt;
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
  static const std::optional<TileKernels> kernels = runs_here(HWY_AVX2) ? std::optional(N_AVX2::tile_kernels()) : std::nullopt;
  return kernels ? &*kernels : nullptr;
#else
  return nullptr;
#endif
}

const TileKernels* avx512_kernels() noexcept {
#if HWY_TARGETS & HWY_AVX3
  static const std::optional<TileKernels> kernels = runs_here(HWY_AVX3) ? std::optional(N_AVX3::tile_kernels()) : std::nullopt;
  return kernels ? &*kernels : nullptr;
#else
  return nullptr;
#endif
}

}  // namespace lean::cpu
#endif  // HWY_ONCE
