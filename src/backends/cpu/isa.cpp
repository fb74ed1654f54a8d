// Which instruction sets this machine runs, and the kernels of each.
#include <initializer_list>

#include "backends/cpu/elements.hpp"
#include "backends/cpu/highway_targets.hpp"
#include "lean/lean.hpp"
#include "problem/preconditions.hpp"
#include "schedule/line_shape.hpp"

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
    case CpuIsa::kAmxBf16: return amx_bf16_kernels();
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

bool is_bf16_in_place(const Problem& problem) noexcept {
  const DType bf16 = DType::kBFloat16;
  return problem.q.dtype == bf16 && problem.k.dtype == bf16 && problem.v.dtype == bf16 && in_place(problem.k) &&
         in_place(problem.v);
}

/// A product of tiles takes as long for one row as for 16: with fewer rows AVX-512 is faster (docs/cpu-backend.md, "AMX").
constexpr std::int64_t kAmxRows = 4;

}  // namespace

const TileKernels& kernels_for(CpuIsa isa) noexcept {
  const TileKernels* table = table_of(isa);
  return table != nullptr ? *table : *scalar_kernels();
}

std::int32_t read_ahead_bytes() noexcept {
#if defined(__x86_64__)
  return __builtin_cpu_is("intel") != 0 ? 4096 : 8192;
#else
  return 4096;
#endif
}

bool in_chunks(const Options& options) noexcept {
  return options.policy.kind == Policy::Kind::kFixedChunk || options.determinism == Determinism::kBatchInvariant;
}

CpuIsa isa_of(const Options& options, const Problem& problem) noexcept {
  if (options.cpu_isa != CpuIsa::kBest) return options.cpu_isa;
  const bool serves = is_bf16_in_place(problem) && amx_bf16_kernels() != nullptr;
  const std::int64_t rows = in_chunks(options) ? problem.q_heads / problem.kv_heads : schedule::row_capacity(problem);
  return serves && rows >= kAmxRows ? CpuIsa::kAmxBf16 : best_cpu_isa();
}

const TurnedTile* turned_tile_of(const Options& options, const Problem& problem, std::int32_t q_rows) noexcept {
  const TurnedTile* turned = kernels_for(isa_of(options, problem)).turned[table_index(problem.k.dtype)];
  const bool serves = turned != nullptr && q_rows >= turned->from_rows && in_place(problem.k) && in_place(problem.v) &&
                      (turned->keeps_order || !in_chunks(options)) && turned->serves(problem.head_dim) &&
                      turned->serves(value_dim_of(problem));
  return serves ? turned : nullptr;
}

bool rounds_probabilities(const Options& options, const Problem& problem) noexcept {
  if (problem.v.dtype != DType::kBFloat16) return false;
  const CpuIsa isa = isa_of(options, problem);
  return isa == CpuIsa::kAvx512Bf16 || isa == CpuIsa::kAmxBf16;
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
  return isa >= CpuIsa::kBest && isa <= CpuIsa::kAmxBf16 && cpu::table_of(isa) != nullptr;
}

const char* name_of(CpuIsa isa) noexcept {
  switch (isa) {
    case CpuIsa::kBest: return "best";
    case CpuIsa::kScalar: return "scalar";
    case CpuIsa::kNative128: return "native128";
    case CpuIsa::kAvx2: return "avx2";
    case CpuIsa::kAvx512: return "avx512";
    case CpuIsa::kAvx512Bf16: return "avx512_bf16";
    case CpuIsa::kAmxBf16: return "amx_bf16";
  }
  return "unknown";
}

}  // namespace lean
