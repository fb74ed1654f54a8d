// The log2 domain. Scores are kept as s x log2(e), so that one exp2 replaces every exp; lse leaves it at the very end.
#pragma once

#include <cmath>
#include <cstdint>

#include "base/hd.hpp"

namespace lean::softmax {

inline constexpr float kLog2E = 1.44269504088896340736F;  // log2(e)
inline constexpr float kLn2 = 0.69314718055994530942F;    // ln(2)

/// A finite number of the natural log in the log2 domain: x log2(e). What would leave fp32 there is beyond every score that a
/// call may have, so its size no longer matters, but its order does: such numbers grow by half as much, and stay finite.
inline constexpr float kBend = 0x1p127F;
inline constexpr float kBendLog2 = kBend * kLog2E;
LEAN_HD [[nodiscard]] inline float to_log2(float natural) noexcept {
  const float size = std::abs(natural);
  if (size <= kBend) return natural * kLog2E;
  return std::copysign(std::fma(0.5F, size - kBend, kBendLog2), natural);
}
LEAN_HD [[nodiscard]] inline float from_log2(float log2) noexcept {
  const float size = std::abs(log2);
  if (size <= kBendLog2) return log2 * kLn2;
  return std::copysign(std::fma(2.0F, size - kBendLog2, kBend), log2);
}

/// Whether Scores::scale stands for 1 / sqrt(head_dim): 0 does, -0 is the number 0.
[[nodiscard]] inline bool is_default_scale(float scale) noexcept { return scale == 0.0F && !std::signbit(scale); }

/// The factor that turns q k into a log2-domain score.
[[nodiscard]] inline float log2_scale(float scale, std::int32_t head_dim) noexcept {
  const double natural = is_default_scale(scale) ? 1.0 / std::sqrt(static_cast<double>(head_dim)) : static_cast<double>(scale);
  return static_cast<float>(natural * 1.44269504088896340736);
}

/// Soft cap of a score: cap x tanh(score / cap), both of the log2 domain (Gemma 2, arXiv 2408.00118, sec. 2). The CPU's vectors have
/// a tanh of their own, and those of a GPU's decode steps (softmax/tanh_fit.hpp).
LEAN_HD [[nodiscard]] inline float soft_cap(float log2_score, float log2_cap) noexcept {
  return log2_cap * std::tanh(log2_score / log2_cap);
}

}  // namespace lean::softmax
