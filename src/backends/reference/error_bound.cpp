// The error bound of docs/numerics.md in code, constant by constant: what any right implementation may differ from the oracle by.
#include "backends/reference/error_bound.hpp"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>

#include "backends/reference/load.hpp"
#include "base/int_math.hpp"
#include "problem/address.hpp"
#include "problem/sequence.hpp"

namespace lean::reference {
namespace {

constexpr double kU32 = 0x1p-24;       // unit roundoff of fp32
constexpr double kExpError = 0x1p-22;  // relative error of one exp2: 2 ulp, also what ex2.approx promises (PTX ISA)
constexpr double kRuleError =
    13.0 * kU32;  // of a score's magnitudes: softcap 11 roundings, sums of the three terms 2 (docs/numerics.md)
constexpr double kHalfUnderflow = 0x1p-25;   // what an fp16 p may lose: half its smallest step
constexpr double kFlushedWeight = 0x1p-126;  // a weight below it is 0
constexpr double kElementSigmas = 6.0;       // random walk of P's rounding: one element in 5e8 lies beyond
constexpr double kFloatStep = 0x1p-149;      // smallest fp32 step: what a product below the normal range loses

constexpr double kInfinity = std::numeric_limits<double>::infinity();

/// Half the smallest step of the output type: rounding of results below its normal range.
double smallest_half_step(DType dtype) {
  return dtype == DType::kFloat32 ? 0x1p-150 : (dtype == DType::kFloat16 ? 0x1p-25 : 0x1p-134);
}

/// Relative rounding of a sum of n products: n u / (1 - n u).
double gamma(std::int64_t n, double u) { return static_cast<double>(n) * u / (1.0 - static_cast<double>(n) * u); }

/// Sigmas that the root mean square of n elements is allowed. The length of n such errors exceeds sigma (sqrt(n) + t) as rarely
/// as one of them exceeds t sigma (Gaussian concentration), so the root mean square sigma (1 + t / sqrt(n)); one element is one
/// of 6 sigma.
double rms_sigmas(std::int64_t n) { return 1.0 + (kElementSigmas - 1.0) / std::sqrt(static_cast<double>(n)); }

/// What all elements of a row share.
struct RowBound {
  double relative = 0.0;  // of A: 2 (2 ds + D u32)
  double p_roundoff = 0.0;
  double absolute = 0.0;    // underflow: of products, of v where flushed, of P (fp16 only)
  double lse = 0.0;         // of the LSE, without the term in |L|
  double rules_mean = 0.0;  // mean error of a score by softcap, ALiBi and additive mask
};

RowBound row_bound(const Problem& problem, const RowFacts& facts, const Rounding& rounding) {
  const std::int64_t tiles = max_of(1, ceil_div(facts.visible_tokens, rounding.tile_tokens));
  const std::int64_t in_tile = min_of(max_of(1, facts.visible_tokens), rounding.tile_depth);
  const bool scaled = problem.k_scales != nullptr || problem.v_scales != nullptr;  // one more rounding of a score, and of O
  const double depth =
      static_cast<double>(in_tile + tiles * rounding.tile_roundings + min_of(tiles, rounding.contributors) + (scaled ? 1 : 0));
  const double score_error = gamma(problem.head_dim + (scaled ? 2 : 0), kU32) * facts.score_magnitude + kExpError +
                             rounding.query_step * facts.max_abs_query * facts.key_magnitude;
  const auto tokens = static_cast<double>(facts.visible_tokens);
  RowBound bound{.relative = 2.0 * (2.0 * score_error + depth * kU32), .p_roundoff = rounding.p_roundoff};
  bound.absolute = tokens * kFloatStep * facts.v_scale + rounding.flushed_below;
  if (facts.l > 0.0) {
    bound.absolute += tokens * (kFlushedWeight + (rounding.p_is_half ? kHalfUnderflow : 0.0)) * facts.max_abs_value / facts.l;
  }
  bound.rules_mean = kRuleError * facts.bias_mean;
  bound.lse = 2.0 * (score_error + depth * kU32) + bound.rules_mean;
  return bound;
}

enum class Class { kFinite, kNan, kPlusInfinity, kMinusInfinity };

Class class_of(double x) {
  if (std::isnan(x)) return Class::kNan;
  if (std::isinf(x)) return x > 0 ? Class::kPlusInfinity : Class::kMinusInfinity;
  return Class::kFinite;
}

double ratio_of(double error, double allowed) { return error == 0.0 ? 0.0 : (allowed > 0.0 ? error / allowed : kInfinity); }

class Comparison {
 public:
  Comparison(const Problem& problem, const Answer& answer, const Rounding& rounding)
      : problem_(problem), answer_(answer), rounding_(rounding), u_out_(unit_roundoff(problem.o.dtype)) {}

  ErrorReport run() {
    const LengthSource lengths(problem_);
    for (std::int64_t b = 0; b < problem_.batch; ++b) {
      const Sequence sequence = lengths(b);
      for (std::int32_t token = 0; token < sequence.q_tokens; ++token) {
        for (std::int32_t head = 0; head < problem_.q_heads; ++head) compare_row(sequence, {b, head}, token);
      }
    }
    if (finite_elements_ > 0) {
      report_.mean_error = sum_ / static_cast<double>(finite_elements_);
      report_.rms_error = std::sqrt(sum_of_squares_ / static_cast<double>(finite_elements_));
    }
    return report_;
  }

 private:
  void compare_row(const Sequence& lengths, HeadPosition at, std::int32_t token) {
    const auto row = static_cast<std::size_t>(answer_.row(at.sequence, token, at.head));
    const RowBound bound = row_bound(problem_, answer_.facts[row], rounding_);
    ErrorReport::Worst place{.sequence = at.sequence, .token = token, .head = at.head};
    compare_output(lengths, place, bound, row * static_cast<std::size_t>(answer_.value_dim));
    if (problem_.lse.data == nullptr) return;
    const Strides strides{problem_.lse.sequence_stride, problem_.lse.head_stride, problem_.lse.token_stride, 0};
    place.quantity = Quantity::kLse;
    place.measured = static_cast<double>(problem_.lse.data[offset(strides, lengths, place)]);
    place.expected = answer_.lse[row];
    place.allowed = bound.lse + 2.0 * kU32 * std::abs(place.expected);
    if (same_class(place)) note(place, std::abs(place.measured - place.expected));
  }

  void compare_output(const Sequence& lengths, ErrorReport::Worst place, const RowBound& bound, std::size_t first) {
    const std::int64_t start = offset(problem_.o.strides, lengths, place);
    double error_squares = 0.0;
    double allowed_squares = 0.0;
    bool all_finite = true;
    for (std::int64_t dim = 0; dim < answer_.value_dim; ++dim) {
      const std::size_t element = first + static_cast<std::size_t>(dim);
      place.dim = dim;
      place.measured = load_element(problem_.o.data, problem_.o.dtype, start + dim * problem_.o.strides.dim);
      place.expected = answer_.o[element];
      place.allowed = allowed(bound, element, kElementSigmas);
      if (!same_class(place)) return;
      all_finite = all_finite && std::isfinite(place.expected);
      if (!std::isfinite(place.expected)) continue;
      const double error = std::abs(place.measured - place.expected);
      note(place, error);
      count(error);
      error_squares += error * error;
      const double of_rms = allowed(bound, element, rms_sigmas(answer_.value_dim));
      allowed_squares += of_rms * of_rms;
    }
    if (!all_finite) return;
    place.quantity = Quantity::kOutputRms;
    place.dim = -1;
    place.measured = std::sqrt(error_squares / answer_.value_dim);
    place.expected = 0.0;
    place.allowed = std::sqrt(allowed_squares / answer_.value_dim);
    note(place, place.measured);
  }

  [[nodiscard]] double allowed(const RowBound& bound, std::size_t element, double sigmas) const {
    const double bias_weighted = answer_.bias_weighted.empty() ? 0.0 : answer_.bias_weighted[element];
    const double rules = bound.rules_mean * answer_.abs_weighted[element] + kRuleError * bias_weighted;
    return bound.relative * answer_.abs_weighted[element] + rules +
           sigmas * bound.p_roundoff * std::sqrt(answer_.squares[element]) + bound.absolute +
           u_out_ * std::abs(answer_.o[element]) + smallest_half_step(problem_.o.dtype);
  }

  [[nodiscard]] std::int64_t offset(const Strides& strides, const Sequence& lengths, const ErrorReport::Worst& at) const {
    const HeadPosition head{at.sequence, static_cast<std::int32_t>(at.head)};
    return q_offset(strides, lengths, head, problem_.cu_q_tokens != nullptr) + at.token * strides.token;
  }

  bool same_class(const ErrorReport::Worst& place) {
    if (class_of(place.measured) == class_of(place.expected)) return true;
    ++report_.class_mismatches;
    if (report_.error_ratio < kInfinity) report_.worst = place;
    report_.error_ratio = kInfinity;
    return false;
  }

  void note(const ErrorReport::Worst& place, double error) {
    if (!std::isfinite(place.expected)) return;
    const double ratio = ratio_of(error, place.allowed);
    if (ratio <= report_.error_ratio && report_.worst.sequence >= 0) return;
    report_.error_ratio = ratio;
    report_.worst = place;
  }

  void count(double error) {
    report_.max_error = std::max(report_.max_error, error);
    sum_ += error;
    sum_of_squares_ += error * error;
    ++finite_elements_;
  }

  const Problem& problem_;
  const Answer& answer_;
  const Rounding& rounding_;
  double u_out_;
  ErrorReport report_;
  double sum_ = 0.0;
  double sum_of_squares_ = 0.0;
  std::int64_t finite_elements_ = 0;
};

}  // namespace

double unit_roundoff(DType dtype) {
  switch (dtype) {
    case DType::kFloat32: return kU32;
    case DType::kFloat16: return 0x1p-11;
    case DType::kBFloat16: return 0x1p-8;
    case DType::kFloat8E4M3:
    case DType::kFloat8E5M2: break;  // never an output type
  }
  return 0.0;
}

ErrorReport compare(const Problem& problem, const Answer& answer, const Rounding& rounding) {
  return Comparison(problem, answer, rounding).run();
}

std::string describe(const ErrorReport& report) {
  static constexpr const char* kNames[] = {"o", "rms(o)", "lse"};
  char text[400];
  const ErrorReport::Worst& worst = report.worst;
  std::snprintf(
      text, sizeof(text),
      "error / bound %.3g, max %.3g, mean %.3g, rms %.3g, %lld values of another class; worst %s[sequence %lld, token %lld, "
      "head %lld, dim %lld] = %.9g, oracle %.9g, allowed +-%.3g",
      report.error_ratio, report.max_error, report.mean_error, report.rms_error, static_cast<long long>(report.class_mismatches),
      kNames[static_cast<int>(worst.quantity)], static_cast<long long>(worst.sequence), static_cast<long long>(worst.token),
      static_cast<long long>(worst.head), static_cast<long long>(worst.dim), worst.measured, worst.expected, worst.allowed);
  return text;
}

}  // namespace lean::reference
