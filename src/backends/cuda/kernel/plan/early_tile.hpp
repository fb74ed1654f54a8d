// Which tiles a worker has fetched into the L2 before there is a plan: near where its share would begin if all sequences were
// alike.
#pragma once

#include <cstdint>

#include "backends/cuda/kernel/device_call.hpp"
#include "backends/cuda/kernel/tuning.hpp"
#include "base/hd.hpp"
#include "base/int_math.hpp"
#include "problem/reach.hpp"

namespace lean::cuda {

/// An output, and how much of it lies before the place, in [0, 1).
struct EarlyPlace {
  std::int32_t sequence = 0;
  std::int32_t kv_head = 0;
  float part = 0.0F;
};

LEAN_HD [[nodiscard]] constexpr EarlyPlace early_place(const AlikeShares& shares, std::int32_t worker, std::int32_t batch,
                                                       std::int32_t kv_heads) noexcept {
  const float place = static_cast<float>(worker) * shares.outputs_a_worker;
  const auto output = static_cast<std::int32_t>(place);
  const auto sequence = min_of(static_cast<std::int32_t>(place * shares.sequences_an_output), batch - 1);
  const std::int32_t kv_head = min_of(max_of(output - sequence * kv_heads, 0), kv_heads - 1);  // the products are rounded
  return {sequence, kv_head, place - static_cast<float>(output)};
}

/// Whether shares have so many tiles or more, if all sequences had as many tokens as are seen of this one.
LEAN_HD [[nodiscard]] constexpr bool is_long_share(const AlikeShares& shares, const KeySpan& seen, std::int32_t tile_tokens,
                                                   std::int32_t tiles = kLongShareTiles) noexcept {
  return shares.outputs_a_worker * static_cast<float>(seen.end - seen.begin) >= static_cast<float>(tiles * tile_tokens);
}

/// The tokens of `seen`, which is not empty, to prefetch: the tile that holds the place, of a long share the next one too. Tiles are
/// counted from `first_token` on. What a short share waits for is its first (docs/notebook/first-read.md).
LEAN_HD [[nodiscard]] constexpr KeySpan early_tokens(const AlikeShares& shares, const EarlyPlace& place, const KeySpan& seen,
                                                     std::int32_t first_token, std::int32_t tile_tokens) noexcept {
  const std::int32_t tokens = seen.end - seen.begin;
  const std::int32_t near = seen.begin + min_of(static_cast<std::int32_t>(place.part * static_cast<float>(tokens)), tokens - 1);
  const std::int32_t begin = max_of(near - (near - first_token) % tile_tokens, seen.begin);
  const std::int32_t most = is_long_share(shares, seen, tile_tokens) ? 2 * tile_tokens : tile_tokens;
  return {begin, begin + min_of(most, seen.end - begin)};
}

}  // namespace lean::cuda
