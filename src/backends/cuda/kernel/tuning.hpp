// Numbers chosen by measurement that belong to no one variant: each with its unit and its source, a file below bench/results, whose
// rows docs/notebook explains. All are of one H200. The kernel's stages read them, and the host where
// it plans a call.
#pragma once

#include <cstdint>

#include "backends/cuda/kernel_config.hpp"

namespace lean::cuda {

/// Bytes. Pages below this are copied row by row: bulk copies that a warp's lanes ask for go one after the other, 60 cycles each
/// (h200-pages.jsonl).
inline constexpr std::int32_t kMinRunBytes = 2048;

/// Bytes. In a decode step shorter pages come by tensor copies where they can, as rows with gaps do (h200-narrow-fp8.jsonl).
inline constexpr std::int32_t kMinStepRunBytes = 8192;

/// Tokens. Longer pages are copied by threads page by page; of shorter ones each lane looks a row up (h200-pages.jsonl).
inline constexpr std::int32_t kMinPageRows = 64;

/// Bytes of a ring that TMA fills: more in flight brings no bandwidth, less where pages lie apart, and whatever else asks the
/// memory for something waits longer (h200-ring-bytes.jsonl). Copies by threads take all there is.
inline constexpr std::int32_t kTmaRingBytes = 96 * 1024;

/// The same of each of two CTAs of a multiprocessor: with 80 KB each nothing was gained (experiments/h200-paired.jsonl).
inline constexpr std::int32_t kPairedRingBytes = 64 * 1024;

[[nodiscard]] constexpr std::int32_t tma_ring_bytes(const KernelConfig& config) noexcept {
  return config.ctas() > 1 ? kPairedRingBytes : kTmaRingBytes;
}

/// Bytes of a wide kernel's ring: two tiles of K and two of V, of 128 dims, so that those of the next are there before the products
/// of one end. Five tiles made up to 5 % more of long calls, and less of short ones (experiments/h100-wide-tile.jsonl).
inline constexpr std::int32_t kWideRingBytes = 128 * 1024;

/// Tiles of keys and of values, together, that a wide kernel's ring holds whatever their size.
inline constexpr std::int32_t kWideStages = 4;

/// Bytes of a latent kernel's ring: two tiles of 64 tokens of 576 dims, one that is read while the other comes. Beside its queries
/// the shared memory holds no more.
inline constexpr std::int32_t kLatentRingBytes = 144 * 1024;

/// Stages that a ring has at most.
[[nodiscard]] constexpr std::int32_t max_stages(const KernelConfig& config) noexcept {
  if (config.latent()) return kLatentRingBytes / (config.tile_tokens * config.stage_row_bytes(config.head_dim));
  if (!config.copies_runs()) return 16;
  return tma_ring_bytes(config) / (config.tile_tokens * config.stage_row_bytes(config.head_dim));
}

/// Sequences a lane. A flat line of up to a sequence a lane is built by each warp that walks it, for itself, and where it may be
/// even, of up to so many a lane; any other is summed by the whole CTA (h200-early-and-whole.jsonl).
inline constexpr std::int32_t kLaneSequences = 4;

/// Sequences of a call whose launches run side by side, at most: a warp reads the lengths of all, 32 at a time, before it does anything
/// else.
inline constexpr std::int64_t kSideBySideSequences = 1024;

/// Tiles. From such shares on a worker's first read is of two tiles (h200-l2-warming.jsonl).
inline constexpr std::int32_t kLongShareTiles = 6;

/// Tiles. Even lines with shares below so many are not walked, and the K of a worker's first tile comes before V, whatever is sent
/// for. Longer calls gain nothing by it: 8 x 8k took 0.3 % more, fp8 3 % (h200-even-line.jsonl).
inline constexpr std::int32_t kEvenShareTiles = 12;

/// The same of latent calls of few rows: any. 1 x 8k of 16 heads, a tile a worker, took 19.9 us instead of 21.0, and 16 x 8k and 32 x 4k,
/// with 16 and 32 tiles, what they took (experiments/h200-latent-even.jsonl).
inline constexpr std::int32_t kEvenLatentShareTiles = 1 << 20;

/// Cycles of a multiprocessor's clock, 0.53 us at 1.87 GHz. The workers of an even line all ask for their first keys at once, and
/// for values no sooner than so many cycles after: asked for together they would come together, and keys are needed first. with
/// 800, 1,000, 1,600 and 2,400 1 x 1k took 7.50, 7.13, 7.27 and 7.92 us, P1 11.7, 11.5, 11.6 and 12.2 (h200-even-line.jsonl).
inline constexpr std::uint32_t kValuesAfterCycles = 1000;

}  // namespace lean::cuda
