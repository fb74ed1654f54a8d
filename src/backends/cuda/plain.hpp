// The plain kernel: whatever the variants of the tile do not serve for its dims, or for where and how its rows lie. Written for
// clarity, several times slower: CUDA cores, fp32 all through, elements read one by one from where they lie. A CTA computes a block of
// packed rows of one kv head alone: nothing is split, so every policy and fix-up gives the same bits, whatever else the call holds.
#pragma once

#include <cstdint>

#include "backends/cuda/kernel/device_call.hpp"
#include "base/int_math.hpp"
#include "lean/problem.hpp"
#include "lean/status.hpp"
#include "problem/preconditions.hpp"
#include "tile/tile_config.hpp"

namespace lean::cuda {

inline constexpr std::int32_t kPlainWarps = 16;  // of a CTA
/// Tokens that a warp takes at once, a lane each; runs are dealt out to the warps in turn.
inline constexpr std::int32_t kPlainRunTokens = 32;

/// The widest head whose rows a CTA takes eight at once; of wider ones four.
inline constexpr std::int32_t kPlainNarrowDim = 128;

[[nodiscard]] LEAN_HD constexpr std::int32_t plain_rows(std::int32_t widest_dim) noexcept {
  return widest_dim <= kPlainNarrowDim ? 8 : 4;
}

/// How sums are rounded (docs/numerics.md): a run's products, the lanes' and warps' parts among themselves, each once a row; and for
/// each round of runs, one a warp, an addition to l and to O, and the factor of what was there.
inline constexpr std::int32_t kPlainRoundTokens = kPlainWarps * kPlainRunTokens;
inline constexpr std::int32_t kPlainRunRoundings = kPlainRunTokens + 5 + kPlainWarps;
inline constexpr std::int32_t kPlainRoundRoundings = 4;

/// What a plan says of a call of the plain kernel: products are fp32, and an output is one tile, since nothing is cut.
[[nodiscard]] constexpr tile::TileConfig plain_tile(const Problem& problem) noexcept {
  return {.q_dtype = DType::kFloat32,
          .kv_dtype = problem.k.dtype,
          .head_dim = problem.head_dim,
          .value_dim = value_dim_of(problem),
          .tile_tokens = max_of(1, problem.kv_capacity),
          .q_rows = plain_rows(max_of(problem.head_dim, value_dim_of(problem)))};
}

/// Whether a plan's tile is the plain kernel's: the variants' products are of 16 bits.
[[nodiscard]] constexpr bool is_plain(const tile::TileConfig& config) noexcept { return config.q_dtype == DType::kFloat32; }

/// Enqueues the kernel. `overlaps`: as a programmatic dependent of what is ahead of it. `stream` is a cudaStream_t.
[[nodiscard]] Status enqueue_plain(const DeviceCall& call, bool overlaps, void* stream) noexcept;

}  // namespace lean::cuda
