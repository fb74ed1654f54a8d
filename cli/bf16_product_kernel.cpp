// The bf16 dot-product instructions, of vectors and of tiles, which Highway 1.0.3 does not have: intrinsics, as in
// backends/cpu/avx512_bf16.cpp and amx_bf16.cpp.
#include "cli/machine_kernels.hpp"
#include "lean/lean.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace lean::cli {
namespace {

#if defined(__x86_64__)
constexpr int kChains = 12;        // as fp32_product_kernel()
constexpr int kProducts = 16 * 2;  // of one instruction

__attribute__((target("avx512f,avx512bf16"))) std::int64_t dot_products(std::int64_t steps, float* sink) noexcept {
  const __m512bh a = _mm512_cvtne2ps_pbh(_mm512_set1_ps(*sink), _mm512_set1_ps(*sink));
  __m512 chains[kChains];
  for (int i = 0; i < kChains; ++i) chains[i] = _mm512_set1_ps(static_cast<float>(i));
  for (std::int64_t step = 0; step < steps; ++step) {
    for (int i = 0; i < kChains; ++i) chains[i] = _mm512_dpbf16_ps(chains[i], a, a);
  }
  for (int i = 1; i < kChains; ++i) chains[0] = _mm512_add_ps(chains[0], chains[i]);
  *sink = _mm512_cvtss_f32(chains[0]);
  return steps * kChains * kProducts;
}

constexpr int kTileChains = 4;                   // more than its latency asks for
constexpr int kTileProducts = 16 * 16 * 16 * 2;  // of one instruction

/// All tiles are zeros: their products take as long as others.
__attribute__((target("amx-tile,amx-bf16"))) std::int64_t tile_products(std::int64_t steps, float* sink) noexcept {
  struct alignas(64) {
    std::uint8_t palette = 1;
    std::uint8_t reserved[15] = {};
    std::uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64};
    std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16};
  } const shapes;
  _tile_loadconfig(&shapes);
  for (std::int64_t step = 0; step < steps; ++step) {
    _tile_dpbf16ps(0, 4, 5);
    _tile_dpbf16ps(1, 4, 5);
    _tile_dpbf16ps(2, 4, 5);
    _tile_dpbf16ps(3, 4, 5);
  }
  float sums[16 * 16];
  _tile_stored(0, sums, 64);
  _tile_release();
  *sink = sums[0];
  return steps * kTileChains * kTileProducts;
}
#endif

}  // namespace

ProductKernel bf16_product_kernel() {
#if defined(__x86_64__)
  if (cpu_isa_available(CpuIsa::kAvx512Bf16)) return {dot_products};
#endif
  return {nullptr};
}

ProductKernel bf16_tile_product_kernel() {
#if defined(__x86_64__)
  if (cpu_isa_available(CpuIsa::kAmxBf16)) return {tile_products};
#endif
  return {nullptr};
}

}  // namespace lean::cli
