// The softmax state and its algebra: LeanAttention, "Softmax Re-scaling as Reduction".
//
// A state (m, l) of a set of scores, log2 domain: m = max, l = sum of exp2(s - m). Together with the un-scaled output
// O = sum of exp2(s - m) v it stands for attention over the set. merge() is the paper's f(x, y). Laws, tested:
// empty() is the identity, whatever stands in its O; bitwise commutative (one fma, the larger maximum always in the addend);
// associative within rounding; never NaN from empty states. The one guard against (-inf) - (-inf) lives here.
#pragma once

#include <cmath>
#include <functional>
#include <limits>

#include "base/hd.hpp"
#include "softmax/scale.hpp"

namespace lean::softmax {

inline constexpr float kNegInf = -std::numeric_limits<float>::infinity();

struct State {
  float m = kNegInf;  // log2 domain
  float l = 0.0F;

  [[nodiscard]] static LEAN_HD constexpr State empty() noexcept { return {}; }
};

/// How two partial results combine: O = fma(O_small, factor, O_big) for every element, big and small chosen by m.
struct MergeStep {
  State merged;
  float factor = 0.0F;  // exp2(m_small - m_big), in [0, 1]
  bool first_is_big = true;
  bool small_is_empty = false;  // its O is left out, by selection: 0 x NaN is NaN
};

/// exp2(m_small - m_big) for m_small <= m_big, with exp2(-inf - -inf) = 0: an empty side adds nothing.
LEAN_HD [[nodiscard]] inline float rescale_factor(float m_small, float m_big) noexcept {
  return m_small == kNegInf ? 0.0F : std::exp2(m_small - m_big);
}

LEAN_HD [[nodiscard]] inline MergeStep merge_step(State a, State b) noexcept {
  const bool first_is_big = !(b.m > a.m);
  const State big = first_is_big ? a : b;
  const State small = first_is_big ? b : a;
  const float factor = rescale_factor(small.m, big.m);
  return {.merged = {.m = big.m, .l = std::fma(small.l, factor, big.l)},
          .factor = factor,
          .first_is_big = first_is_big,
          .small_is_empty = small.m == kNegInf && small.l == 0.0F};
}

LEAN_HD [[nodiscard]] inline State merge(State a, State b) noexcept { return merge_step(a, b).merged; }

/// One element of O under a merge step.
LEAN_HD [[nodiscard]] inline float merge_element(const MergeStep& step, float a, float b) noexcept {
  const float big = step.first_is_big ? a : b;
  const float small = step.first_is_big ? b : a;
  return step.small_is_empty ? big : std::fma(small, step.factor, big);
}

/// A finished row: o = O x scale, lse in natural log.
struct Finished {
  float scale = 0.0F;
  float lse = kNegInf;
};

/// A row's state with its sink (natural-log logit), which takes part in the denominator only (GPT-OSS); -inf means none.
LEAN_HD [[nodiscard]] inline State with_sink(State state, float sink) noexcept {
  return sink == kNegInf ? state : merge(state, {.m = to_log2(sink), .l = 1.0F});
}

/// What ends a row: its un-scaled O is multiplied by this. Empty: 0, exactly. `divide`: a / b, as exactly as the caller has it.
template <typename TDivide = std::divides<>>
LEAN_HD [[nodiscard]] inline float output_scale(State state, float sink = kNegInf, const TDivide& divide = {}) noexcept {
  if (state.l == 0.0F) return 0.0F;
  const State whole = with_sink(state, sink);
  return divide(rescale_factor(state.m, whole.m), whole.l);
}

/// log(exp(a) + exp(b)); the other one, exactly, where one is -inf.
LEAN_HD [[nodiscard]] inline float log_add(float a, float b) noexcept {
  const float big = b > a ? b : a;
  const float small = b > a ? a : b;
  return small == kNegInf ? big : big + std::log1p(std::exp(small - big));
}

/// A row's log-sum-exp, natural log. Empty: the sink, exactly.
LEAN_HD [[nodiscard]] inline float natural_lse(State state, float sink = kNegInf) noexcept {
  if (state.l == 0.0F) return sink;
  const float log_l = std::log(state.l);
  return log_add(std::abs(state.m) <= kBendLog2 ? std::fma(state.m, kLn2, log_l) : from_log2(state.m) + log_l, sink);
}

/// Ends a row. A sink enters here and nowhere else.
LEAN_HD [[nodiscard]] inline Finished finalize(State state, float sink = kNegInf) noexcept {
  return {.scale = output_scale(state, sink), .lse = natural_lse(state, sink)};
}

}  // namespace lean::softmax
