// bf16 queries beside fp8 keys: products are of fp16 there, so a row is multiplied by a power of two that brings its largest
// magnitude to [2^14, 2^15), and its scores by the inverse. docs/numerics.md says what the smallest elements lose.
#pragma once

#include <cstdint>

#include "backends/cuda/kernel_config.hpp"
#include "base/hd.hpp"
#include "lean/problem.hpp"

namespace lean::cuda {

/// What an element may lose, of its row's largest: half the smallest step of fp16, 2^-25, of 2^14.
inline constexpr double kQueryStep = 0x1p-39;

/// kQueryStep for a call whose products' factors are of this type; 0 where queries are multiplied as they are.
[[nodiscard]] constexpr double query_step_of(const Problem& problem, DType factors) noexcept {
  return problem.q.dtype == DType::kBFloat16 && factors == DType::kFloat16 ? kQueryStep : 0.0;
}

/// A row's factor and its inverse, each as the exponent field of an fp32.
struct QueryPower {
  std::uint32_t up;
  std::uint32_t down;
};

/// `largest` is the largest of the row's elements without their signs, as bits of a bf16.
LEAN_HD [[nodiscard]] constexpr QueryPower query_power(std::uint32_t largest) noexcept {
  constexpr std::uint32_t kBias = 127;
  constexpr std::uint32_t kMost = 2 * kBias - 1;  // the inverse is no subnormal: tiny rows stay below 2^14, and lose nothing
  const std::uint32_t wanted = 2 * kBias + 14 - (largest >> 7);
  const std::uint32_t up = wanted < kMost ? wanted : kMost;
  return {up, 2 * kBias - up};
}

}  // namespace lean::cuda
