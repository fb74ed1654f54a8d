// Attention from its definition, in fp64, a query row at a time over all its keys: nothing of the schedule, tiles or fix-up that it
// checks.
#include "backends/reference/reference.hpp"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <span>
#include <thread>

#include "backends/reference/appended.hpp"
#include "backends/reference/load.hpp"
#include "backends/reference/visibility.hpp"
#include "base/int_math.hpp"
#include "problem/address.hpp"
#include "problem/kv_scales.hpp"
#include "problem/preconditions.hpp"
#include "problem/sequence.hpp"

namespace lean::reference {
namespace {

constexpr double kNegInf = -std::numeric_limits<double>::infinity();
constexpr std::int64_t kRowBlock = 64;     // rows whose scores are kept at once: bounds memory, no other meaning
constexpr std::int64_t kTokenBlock = 128;  // tokens converted to double at once: stays in the level 2 cache

/// sum_i f(a_i b_i) in eight independent lanes, so that the compiler may vectorise without reordering any sum.
template <typename TFunction>
double lane_sum(const double* a, const double* b, std::int64_t count, TFunction f) {
  constexpr std::int64_t kLanes = 8;
  double lanes[kLanes] = {};
  std::int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (std::int64_t lane = 0; lane < kLanes; ++lane) lanes[lane] += f(a[i + lane] * b[i + lane]);
  }
  for (; i < count; ++i) lanes[i % kLanes] += f(a[i] * b[i]);
  return ((lanes[0] + lanes[4]) + (lanes[2] + lanes[6])) + ((lanes[1] + lanes[5]) + (lanes[3] + lanes[7]));
}

/// The rows of one kv head of one sequence, kRowBlock at a time. One per thread; its buffers are reused.
class HeadOracle {
 public:
  HeadOracle(const Problem& problem, Answer& answer)
      : problem_(problem),
        answer_(answer),
        group_(problem.q_heads / problem.kv_heads),
        dv_(value_dim_of(problem)),
        scale_(problem.scores.scale != 0.0F || std::signbit(problem.scores.scale)
                   ? static_cast<double>(problem.scores.scale)
                   : 1.0 / std::sqrt(static_cast<double>(problem.head_dim))) {}

  void run(std::int64_t sequence, std::int32_t kv_head) {
    sequence_ = sequence;
    kv_head_ = kv_head;
    lengths_ = LengthSource(problem_)(sequence);
    const std::int64_t rows = static_cast<std::int64_t>(lengths_.q_tokens) * group_;
    for (std::int64_t begin = 0; begin < rows; begin += kRowBlock) run_rows(begin, min_of(rows, begin + kRowBlock));
  }

 private:
  struct Row {
    QueryRow query;
    std::int64_t answer_row = 0;
    std::vector<double> q;       // [d]
    std::vector<double> weight;  // [kv tokens]: score, then exp(s - m), then p
    std::vector<double> bias;    // [kv tokens]: b_j of RowFacts::bias_mean
    std::vector<char> seen;      // [kv tokens]
  };

  void run_rows(std::int64_t begin, std::int64_t end) {
    rows_.resize(static_cast<std::size_t>(end - begin));
    for (std::int64_t r = begin; r < end; ++r) start_row(rows_[static_cast<std::size_t>(r - begin)], r);
    for_each_token(problem_.k, problem_.head_dim, static_cast<double>(k_scale_of(problem_, kv_head_)),
                   [this](std::int64_t token, std::span<const double> k) { add_scores(token, k); });
    for (Row& row : rows_) softmax(row);
    for_each_token(problem_.v, dv_, static_cast<double>(v_scale_of(problem_, kv_head_)),
                   [this](std::int64_t token, std::span<const double> v) { add_values(token, v); });
  }

  void start_row(Row& row, std::int64_t packed) {
    const PackedRow place = packed_row(packed, group_);
    const std::int32_t head = kv_head_ * group_ + place.head_in_group;
    row.query = {.sequence = sequence_, .head = head, .token = place.token};
    row.answer_row = answer_.row(sequence_, place.token, head);
    RowFacts& facts = answer_.facts[static_cast<std::size_t>(row.answer_row)];
    facts.v_scale = std::max(1.0, std::abs(static_cast<double>(v_scale_of(problem_, kv_head_))));
    row.q.resize(static_cast<std::size_t>(problem_.head_dim));
    const Strides& strides = problem_.q.strides;
    const std::int64_t offset =
        q_offset(strides, lengths_, {sequence_, head}, problem_.cu_q_tokens != nullptr) + place.token * strides.token;
    load_run(problem_.q.data, problem_.q.dtype, offset, strides.dim, problem_.head_dim, row.q.data());
    rotate_query(problem_, lengths_, place.token, row.q);
    for (const double x : row.q) {
      if (std::isfinite(x)) facts.max_abs_query = std::max(facts.max_abs_query, std::abs(x));
    }
    row.weight.assign(static_cast<std::size_t>(lengths_.kv_tokens()), kNegInf);
    row.bias.assign(static_cast<std::size_t>(lengths_.kv_tokens()), 0.0);
    row.seen.assign(static_cast<std::size_t>(lengths_.kv_tokens()), 0);
  }

  /// Calls use(token counted from kv_begin, its `dims` elements as double) for every token that has an address.
  template <typename TUse>
  void for_each_token(const TensorView& tensor, std::int64_t dims, double scale, TUse use) {
    block_.resize(static_cast<std::size_t>(kTokenBlock * dims));
    for (std::int64_t begin = lengths_.kv_begin; begin < lengths_.kv_end; begin += kTokenBlock) {
      const std::int64_t end = min_of(lengths_.kv_end, begin + kTokenBlock);
      for (std::int64_t token = begin; token < end; ++token) {
        const auto offset = token_offset(problem_, tensor.strides, lengths_, {sequence_, kv_head_}, token);
        if (!offset) continue;  // a page outside the pool: skipped
        double* out = block_.data() + (token - begin) * dims;
        if (token < first_new_token(problem_, lengths_)) {
          load_run(tensor.data, tensor.dtype, *offset, tensor.strides.dim, dims, out);
        } else {
          const NewRow which = &tensor == &problem_.k ? NewRow::kKey : NewRow::kValue;
          const std::vector<double> row = appended_row(problem_, lengths_, {sequence_, kv_head_}, token, which);
          std::copy(row.begin(), row.end(), out);
        }
        for (std::int64_t i = 0; i < dims; ++i) out[i] *= scale;
        use(token - lengths_.kv_begin, std::span<const double>(out, static_cast<std::size_t>(dims)));
      }
    }
  }

  void add_scores(std::int64_t index, std::span<const double> k) {
    const std::int64_t token = lengths_.kv_begin + index;
    double key_magnitude = 0.0;
    for (const double x : k) key_magnitude += std::abs(x);
    for (Row& row : rows_) {
      if (!sees(problem_, lengths_, row.query, token)) continue;
      const double dot = lane_sum(row.q.data(), k.data(), problem_.head_dim, [](double x) { return x; });
      const double magnitude = lane_sum(row.q.data(), k.data(), problem_.head_dim, [](double x) { return std::abs(x); });
      const BiasedScore biased = biased_score(problem_, lengths_, row.query, token, scale_ * dot);
      row.weight[static_cast<std::size_t>(index)] = biased.score;
      row.bias[static_cast<std::size_t>(index)] = biased.magnitude;
      row.seen[static_cast<std::size_t>(index)] = 1;
      RowFacts& facts = answer_.facts[static_cast<std::size_t>(row.answer_row)];
      ++facts.visible_tokens;
      if (std::isfinite(magnitude)) facts.score_magnitude = std::max(facts.score_magnitude, std::abs(scale_) * magnitude);
      if (std::isfinite(key_magnitude)) facts.key_magnitude = std::max(facts.key_magnitude, std::abs(scale_) * key_magnitude);
    }
  }

  /// Turns scores into probabilities. A score of -inf weighs exactly 0, also in a row that has no other.
  void softmax(Row& row) {
    const double sink = problem_.scores.sinks != nullptr ? static_cast<double>(problem_.scores.sinks[row.query.head]) : kNegInf;
    double m = sink;
    for (const double s : row.weight) {
      if (s > m) m = s;
    }
    double l = sink == kNegInf ? 0.0 : std::exp(sink - m);
    for (double& w : row.weight) {
      w = w == kNegInf ? 0.0 : std::exp(w - m);
      l += w;
    }
    const auto r = static_cast<std::size_t>(row.answer_row);
    answer_.facts[r].l = l;
    answer_.lse[r] = l == 0.0 ? kNegInf : m + std::log(l);
    if (l == 0.0) return;
    RowFacts& facts = answer_.facts[r];
    for (std::size_t i = 0; i < row.weight.size(); ++i) {
      row.weight[i] /= l;
      if (row.weight[i] > 0.0) facts.bias_mean += row.weight[i] * row.bias[i];
    }
  }

  void add_values(std::int64_t index, std::span<const double> v) {
    double max_abs = 0.0;
    for (const double x : v) max_abs = std::max(max_abs, std::abs(x));
    for (const Row& row : rows_) {
      if (row.seen[static_cast<std::size_t>(index)] == 0) continue;  // by selection: what is not seen may be NaN
      const double p = row.weight[static_cast<std::size_t>(index)];
      const auto first = static_cast<std::size_t>(row.answer_row * dv_);
      double* const o = &answer_.o[first];
      double* const a = &answer_.abs_weighted[first];
      double* const squares = &answer_.squares[first];
      for (std::size_t i = 0; i < v.size(); ++i) {
        const double pv = p * v[i];
        o[i] += pv;
        a[i] += std::abs(pv);
        squares[i] += pv * pv;
      }
      if (p > 0.0 && !answer_.bias_weighted.empty()) {
        const double bias = row.bias[static_cast<std::size_t>(index)];
        for (std::size_t i = 0; i < v.size(); ++i) answer_.bias_weighted[first + i] += bias * std::abs(p * v[i]);
      }
      RowFacts& facts = answer_.facts[static_cast<std::size_t>(row.answer_row)];
      facts.max_abs_value = std::max(facts.max_abs_value, max_abs);
    }
  }

  const Problem& problem_;
  Answer& answer_;
  std::int32_t group_;
  std::int32_t dv_;
  double scale_;
  std::int64_t sequence_ = 0;
  std::int32_t kv_head_ = 0;
  Sequence lengths_;
  std::vector<Row> rows_;
  std::vector<double> block_;
};

Answer empty_answer(const Problem& problem) {
  Answer answer;
  answer.q_heads = problem.q_heads;
  answer.value_dim = value_dim_of(problem);
  const LengthSource lengths(problem);
  answer.first_row.assign(1, 0);
  for (std::int64_t b = 0; b < problem.batch; ++b) {
    answer.first_row.push_back(answer.first_row.back() + static_cast<std::int64_t>(lengths(b).q_tokens) * problem.q_heads);
  }
  const auto rows = static_cast<std::size_t>(answer.rows());
  const std::size_t elements = rows * static_cast<std::size_t>(answer.value_dim);
  answer.o.assign(elements, 0.0);
  answer.abs_weighted.assign(elements, 0.0);
  answer.squares.assign(elements, 0.0);
  if (has_score_rules(problem.scores)) answer.bias_weighted.assign(elements, 0.0);
  answer.lse.assign(rows, kNegInf);
  answer.facts.assign(rows, {});
  return answer;
}

}  // namespace

Answer decode(const Problem& problem, int threads) {
  count_new_tokens(problem);
  Answer answer = empty_answer(problem);
  const std::int64_t items = problem.batch * problem.kv_heads;
  std::atomic<std::int64_t> next{0};
  const auto work = [&] {
    HeadOracle oracle(problem, answer);
    for (std::int64_t item = next++; item < items; item = next++) {
      oracle.run(item / problem.kv_heads, static_cast<std::int32_t>(item % problem.kv_heads));
    }
  };
  std::vector<std::thread> helpers;
  for (int i = 1; i < threads; ++i) helpers.emplace_back(work);
  work();
  for (std::thread& helper : helpers) helper.join();
  return answer;
}

}  // namespace lean::reference
