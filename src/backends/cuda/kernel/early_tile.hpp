// Which tile a worker has fetched into the L2 before there is a plan: near where its share would begin if all sequences were alike.
#pragma once

#include <cstdint>

#include "base/hd.hpp"
#include "base/int_math.hpp"
#include "problem/reach.hpp"

namespace lean::cuda {

/// Shares as they would be then. In floating point, since a place need be near only; what is read is held to what exists.
struct AlikeShares {
  float outputs_a_worker = 0.0F;
  float sequences_an_output = 0.0F;  // 1 / kv heads
  std::int32_t least_tokens = 1;     // of a sequence, for it to pay; 1 at least
};

/// `outputs`: kv heads of all sequences. It pays from two tiles of a share on, from six where workers share outputs
/// (docs/cuda-backend.md, "tried").
[[nodiscard]] constexpr AlikeShares alike_shares(std::int64_t outputs, std::int32_t kv_heads, std::int32_t workers,
                                                 std::int32_t tile_tokens) noexcept {
  const float outputs_a_worker = static_cast<float>(outputs) / static_cast<float>(workers);
  const float tokens = static_cast<float>(tile_tokens * (outputs_a_worker < 0.5F ? 6 : 2));
  return {.outputs_a_worker = outputs_a_worker,
          .sequences_an_output = 1.0F / static_cast<float>(kv_heads),
          .least_tokens = most_of(1, static_cast<std::int32_t>(tokens / outputs_a_worker))};
}

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
  const auto sequence = least_of(static_cast<std::int32_t>(place * shares.sequences_an_output), batch - 1);
  const std::int32_t kv_head = least_of(most_of(output - sequence * kv_heads, 0), kv_heads - 1);  // the products are rounded
  return {sequence, kv_head, place - static_cast<float>(output)};
}

/// Tokens of `seen`, which has some: up to a tile, from the beginning of one that tiles counted from `first_token` on make.
LEAN_HD [[nodiscard]] constexpr KeySpan early_tokens(const KeySpan& seen, float part, std::int32_t first_token,
                                                     std::int32_t tile_tokens) noexcept {
  const std::int32_t tokens = seen.end - seen.begin;
  const std::int32_t near = seen.begin + least_of(static_cast<std::int32_t>(part * static_cast<float>(tokens)), tokens - 1);
  const std::int32_t begin = most_of(near - (near - first_token) % tile_tokens, seen.begin);
  return {begin, begin + least_of(tile_tokens, seen.end - begin)};
}

}  // namespace lean::cuda
