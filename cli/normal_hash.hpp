// Which quantile of N(0, 1) an element gets: one rule for the threads of normal_fill.cpp and the kernel of cuda/fill.cu.
#pragma once

#include <cstdint>

#include "base/hd.hpp"

namespace lean::cli {

inline constexpr std::int64_t kQuantiles = 65536;
inline constexpr std::int64_t kPerHash = 4;  // elements drawn from one 64-bit hash, 16 bits each

/// SplitMix64: a bijection of the counter, every output bit depends on every input bit.
LEAN_HD [[nodiscard]] constexpr std::uint64_t normal_hash(std::uint64_t x) noexcept {
  x += 0x9E3779B97F4A7C15U;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9U;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBU;
  return x ^ (x >> 31);
}

/// The bits of elements [group x kPerHash, (group + 1) x kPerHash), the first lowest.
LEAN_HD [[nodiscard]] constexpr std::uint64_t quantile_bits(std::uint64_t key, std::int64_t group) noexcept {
  return normal_hash(key ^ static_cast<std::uint64_t>(group));
}

}  // namespace lean::cli
