// Which of a sequence's tokens a rank holds (lean/exchange.hpp), on host and device; python/lean_attention/distributed/_placement.py says
// the same of torch's tensors, and tests/python/test_distributed.py that both agree.
#pragma once

#include <cstdint>

#include "base/hd.hpp"
#include "base/int_math.hpp"
#include "lean/exchange.hpp"

namespace lean {

/// How many of a sequence's first `tokens` tokens the rank holds.
[[nodiscard]] LEAN_HD inline std::int32_t tokens_held(const TokenShard& shard, std::int32_t tokens) noexcept {
  if (tokens <= 0) return 0;
  const std::int64_t block = shard.block_tokens;
  const std::int64_t round = block * shard.ranks;
  const std::int64_t rounds = quotient(std::int64_t{tokens}, round);
  return static_cast<std::int32_t>(rounds * block + clamp_to(tokens - rounds * round - shard.rank * block, 0, block));
}

}  // namespace lean
