// How each backend rounds a call, for the acceptance test (backends/reference/error_bound.hpp): what tests and the command hold results
// against. A room of its own, since backends know nothing of the oracle, nor it of them.
#pragma once

#include <algorithm>
#include <cstdint>

#include "backends/cpu/tile_kernels.hpp"
#include "backends/cuda/kernel/tile/bf16_queries.hpp"
#include "backends/cuda/kernel_rows.hpp"
#include "backends/cuda/plain.hpp"
#include "backends/reference/error_bound.hpp"
#include "lean/options.hpp"
#include "lean/problem.hpp"
#include "tile/tiling.hpp"

namespace lean::acceptance {

/// Warps of a CTA that share a row's tokens, at most: each merges its own segment of every tile (kernel/fixup/parts.cuh).
inline constexpr std::int32_t kWarpsOfWorker = 8;

/// P and V are multiplied as 16-bit matrices; subnormals are kept (PTX ISA, mma).
[[nodiscard]] inline reference::Rounding cuda_rounding(const Problem& problem, const Options& options, const tile::Tiling& tiling) {
  if (cuda::is_plain(tiling.config)) {
    return {.tile_tokens = cuda::kPlainRoundTokens,
            .tile_depth = cuda::kPlainRunRoundings,
            .tile_roundings = cuda::kPlainRoundRoundings};
  }
  const DType factors = tiling.config.q_dtype;
  return {.p_roundoff = reference::unit_roundoff(factors),
          .p_is_half = factors == DType::kFloat16,
          .query_step = cuda::query_step_of(problem, factors),
          .tile_tokens = tiling.config.tile_tokens,
          .tile_depth = cuda::kProductRoundings,
          .tile_roundings = cuda::sum_roundings(tiling.config),
          .contributors = std::max(tiling.workers, options.policy.splits) * kWarpsOfWorker};
}

/// vdpbf16ps and tdpbf16ps take subnormals as 0 (Intel SDM).
[[nodiscard]] inline reference::Rounding cpu_rounding(const Problem& problem, const Options& options, const tile::Tiling& tiling) {
  const bool bf16_probabilities = cpu::rounds_probabilities(options, problem);
  return {.p_roundoff = bf16_probabilities ? reference::unit_roundoff(DType::kBFloat16) : 0.0,
          .flushed_below = bf16_probabilities ? 0x1p-126 : 0.0,
          .tile_tokens = tiling.config.tile_tokens,
          .tile_depth = tiling.config.tile_tokens,
          .contributors = std::max(tiling.workers, options.policy.splits)};
}

/// `tiling`: how the backend of `options` cuts the call up.
[[nodiscard]] inline reference::Rounding rounding_of(const Problem& problem, const Options& options, const tile::Tiling& tiling) {
  return options.backend == Backend::kCuda ? cuda_rounding(problem, options, tiling) : cpu_rounding(problem, options, tiling);
}

}  // namespace lean::acceptance
