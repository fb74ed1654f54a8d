// Which instruction sets this machine runs, and the kernels of each.
#include <initializer_list>

#include "backends/cpu/highway_targets.hpp"
#include "lean/lean.hpp"

namespace lean {
namespace cpu {
namespace {

const TileKernels* table_of(CpuIsa isa) noexcept {
  switch (isa) {
    case CpuIsa::kScalar: return scalar_kernels();
    case CpuIsa::kNative128: return native128_kernels();
    case CpuIsa::kAvx2: return avx2_kernels();
    case CpuIsa::kAvx512: return avx512_kernels();
    case CpuIsa::kAvx512Bf16: return avx512_bf16_kernels();
    case CpuIsa::kBest: return table_of(best_cpu_isa());
  }
  return nullptr;
}

/// vdpbf16ps does 32 multiply-adds a cycle on AMD's Zen 4, twice its fp32 rate, but on Intel's Sapphire Rapids no more than two
/// fp32 FMAs do (measured there, one core, 8 rows: 8 GB/s against 10), and it rounds P: there plain AVX-512 is the better one.
bool bf16_multiply_pays() noexcept {
#if defined(__x86_64__)
  return __builtin_cpu_is("amd") != 0;
#else
  return false;
#endif
}

}  // namespace

const TileKernels& kernels_for(CpuIsa isa) noexcept {
  const TileKernels* table = table_of(isa);
  return table != nullptr ? *table : *scalar_kernels();
}

bool rounds_probabilities(CpuIsa isa, DType dtype) noexcept {
  return dtype == DType::kBFloat16 && (isa == CpuIsa::kBest ? best_cpu_isa() : isa) == CpuIsa::kAvx512Bf16;
}

}  // namespace cpu

CpuIsa best_cpu_isa() noexcept {
  static const CpuIsa best = [] {
    for (const CpuIsa isa : {CpuIsa::kAvx512Bf16, CpuIsa::kAvx512, CpuIsa::kAvx2, CpuIsa::kNative128}) {
      if (cpu::table_of(isa) != nullptr && (isa != CpuIsa::kAvx512Bf16 || cpu::bf16_multiply_pays())) return isa;
    }
    return CpuIsa::kScalar;
  }();
  return best;
}

bool cpu_isa_available(CpuIsa isa) noexcept {
  return isa >= CpuIsa::kBest && isa <= CpuIsa::kAvx512Bf16 && cpu::table_of(isa) != nullptr;
}

const char* name_of(CpuIsa isa) noexcept {
  switch (isa) {
    case CpuIsa::kBest: return "best";
    case CpuIsa::kScalar: return "scalar";
    case CpuIsa::kNative128: return "native128";
    case CpuIsa::kAvx2: return "avx2";
    case CpuIsa::kAvx512: return "avx512";
    case CpuIsa::kAvx512Bf16: return "avx512_bf16";
  }
  return "unknown";
}

}  // namespace lean
