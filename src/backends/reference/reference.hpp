// The oracle: attention in fp64 straight from its definition, without tiles, workers or online softmax.
// Scores of all visible keys, one softmax, one weighted sum; inputs are taken as rounded in their own type and found
// through the same address rules and length clamping as everywhere. Called by tests, fuzzing and `lean run`'s check;
// allocates, and may use a few threads, because it is no part of a decode call.
#pragma once

#include <cstdint>
#include <vector>

#include "lean/problem.hpp"

namespace lean::reference {

/// What error_bound.hpp needs to know of a row besides its result. Letters as in docs/numerics.md.
struct RowFacts {
  std::int64_t visible_tokens = 0;  // n_kv as this row sees it
  double l = 0.0;                   // sum of exp(s - m)
  double score_magnitude = 0.0;     // |scale| max_j sum_i |q_i k_ji|
  double max_abs_query = 0.0;       // max_i |q_i|
  double key_magnitude = 0.0;       // |scale| max_j sum_i |k_ji|
  double max_abs_value = 0.0;       // max |v| over the visible tokens
  double v_scale = 1.0;             // of fp8 values: what is lost below fp32's range is lost before it
  double bias_mean = 0.0;           // sum_j p_j b_j, b_j the magnitudes added up in a score by softcap, ALiBi and mask
};

/// Rows are (sequence, query token, query head), the head running fastest; sequences with fewer tokens have fewer rows.
struct Answer {
  std::int32_t q_heads = 0;
  std::int32_t value_dim = 0;
  std::vector<std::int64_t> first_row;  // [B + 1]
  std::vector<double> o;                // [rows, dv]
  std::vector<double> lse;              // [rows], natural logarithm
  std::vector<double> abs_weighted;     // [rows, dv]: A = sum_j p_j |v_j|
  std::vector<double> squares;          // [rows, dv]: sum_j p_j^2 v_j^2
  std::vector<double> bias_weighted;    // [rows, dv]: sum_j p_j b_j |v_j|; empty without such rules
  std::vector<RowFacts> facts;          // [rows]

  [[nodiscard]] std::int64_t rows() const { return first_row.empty() ? 0 : first_row.back(); }
  [[nodiscard]] std::int64_t row(std::int64_t sequence, std::int64_t token, std::int64_t head) const {
    return first_row[static_cast<std::size_t>(sequence)] + token * q_heads + head;
  }
};

/// `problem` must satisfy problem_preconditions() and all its arrays must be host-readable; o and lse are not touched.
/// Serves all of Problem. Work is shared by `threads` threads.
[[nodiscard]] Answer decode(const Problem& problem, int threads = 1);

}  // namespace lean::reference
