// Finished rows, (o, lse) of two calls over disjoint keys, as one: the number-by-number arithmetic of merge_states() for every
// backend. Source of the formula: LeanAttention, "Softmax Re-scaling as Reduction".
#pragma once

#include <cmath>
#include <cstdint>

#include "base/hd.hpp"
#include "lean/problem.hpp"
#include "softmax/scale.hpp"
#include "softmax/state.hpp"

namespace lean::softmax {

/// What merge_states() was given: dense o [rows, value_dim] and lse [rows] of both; those of a become the result.
struct FinishedStates {
  void* o_a = nullptr;
  float* lse_a = nullptr;
  const void* o_b = nullptr;
  const float* lse_b = nullptr;
  std::int64_t rows = 0;
  std::int32_t value_dim = 0;
  DType dtype = DType::kFloat32;
};

/// a x b, rounded: nothing behind it is contracted with it into one rounding, so that every kernel that merges says the same bits.
LEAN_HD [[nodiscard]] inline float rounded_product(float a, float b) noexcept {
#ifdef __CUDA_ARCH__
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}

/// The lse of a row without keys is -inf here and in most libraries, +inf in FlashAttention's.
LEAN_HD [[nodiscard]] inline float known_lse(float lse) noexcept { return std::isinf(lse) ? kNegInf : lse; }

/// How the two finished states of a row combine. A finished row is the state (lse, 1) whose O is divided by l already.
class FinishedMerge {
 public:
  LEAN_HD FinishedMerge(float lse_a, float lse_b) noexcept
      : step_(merge_step(state_of(known_lse(lse_a)), state_of(known_lse(lse_b)))),
        scale_(output_scale(step_.merged)),
        lse_(log_add(known_lse(lse_a), known_lse(lse_b))) {}

  /// An element of the result's o. What an empty row's o holds is not looked at: merge_step() leaves one of two out.
  LEAN_HD [[nodiscard]] float element(float a, float b) const noexcept {
    return step_.merged.l == 0.0F ? 0.0F : scale_ * merge_element(step_, a, b);
  }
  LEAN_HD [[nodiscard]] float lse() const noexcept { return lse_; }

 private:
  LEAN_HD [[nodiscard]] static State state_of(float lse) noexcept {
    if (lse == kNegInf) return State::empty();
    return {.m = std::abs(lse) <= kBend ? rounded_product(lse, kLog2E) : to_log2(lse), .l = 1.0F};
  }

  MergeStep step_;
  float scale_;
  float lse_;
};

}  // namespace lean::softmax
