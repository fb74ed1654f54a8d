// Which keys a query sees and what happens to a score before the softmax: every rule of lean::Scores in plain words,
// one statement each. Positions are absolute tokens of the sequence; query token i of n_q stands at n_kv - n_q + i.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <optional>

#include "backends/reference/load.hpp"
#include "base/int_math.hpp"
#include "problem/address.hpp"
#include "problem/sequence.hpp"

namespace lean::reference {

struct QueryRow {
  std::int64_t sequence = 0;
  std::int32_t head = 0;
  std::int32_t token = 0;
};

/// Where token `token` of (sequence, kv head) lies; nothing when its page index is outside the pool.
[[nodiscard]] inline std::optional<std::int64_t> token_offset(const Problem& problem, const Strides& strides,
                                                              const Sequence& lengths, HeadPosition at, std::int64_t token) {
  const PagedKv& pages = problem.pages;
  if (pages.page_tokens == 0) return kv_offset(strides, lengths, at, problem.cu_kv_tokens != nullptr) + token * strides.token;
  const std::int64_t page = token / pages.page_tokens;
  const std::int64_t id = pages.block_table != nullptr ? pages.block_table[at.sequence * pages.block_table_stride + page]
                                                       : pages.page_indices[lengths.first_page + page];
  if (id < 0 || id >= pages.page_count) return std::nullopt;
  return id * strides.sequence + at.head * strides.head + token % pages.page_tokens * strides.token;
}

[[nodiscard]] inline std::int64_t mask_element(const Problem& problem, const QueryRow& row, std::int64_t key) {
  return mask_offset(problem.scores.mask_strides, {row.sequence, row.head}, row.token, key);
}

[[nodiscard]] inline bool sees_in_tree(const Problem& problem, const Sequence& lengths, const QueryRow& row, std::int64_t key) {
  const std::int64_t draft = key - (static_cast<std::int64_t>(lengths.kv_end) - lengths.q_tokens);
  if (draft < 0) return true;  // the tree covers the last n_q keys only
  const std::int64_t words = ceil_div(problem.q_tokens, 32);
  const std::uint32_t word = problem.scores.tree_mask[(row.sequence * problem.q_tokens + row.token) * words + draft / 32];
  return ((word >> (draft % 32)) & 1U) != 0;
}

/// Does the query see `key`, a token in [kv_begin, kv_end)?
[[nodiscard]] inline bool sees(const Problem& problem, const Sequence& lengths, const QueryRow& row, std::int64_t key) {
  const Scores& scores = problem.scores;
  const std::int64_t position = static_cast<std::int64_t>(lengths.kv_end) - lengths.q_tokens + row.token;
  if (scores.causal && key > position) return false;
  if (scores.window_left >= 0 && key < position - scores.window_left) return false;
  if (scores.window_right >= 0 && key > position + scores.window_right) return false;
  if (scores.tree_mask != nullptr && !sees_in_tree(problem, lengths, row, key)) return false;
  if (scores.mask == nullptr) return true;
  const std::int64_t offset = mask_element(problem, row, key);
  if (scores.mask_is_boolean) return static_cast<const std::uint8_t*>(scores.mask)[offset] != 0;
  return load_element(scores.mask, scores.mask_dtype, offset) != -std::numeric_limits<double>::infinity();
}

/// Softcap, ALiBi or an additive mask.
[[nodiscard]] inline bool has_score_rules(const Scores& scores) {
  return scores.softcap > 0.0F || scores.alibi_slopes != nullptr || (scores.mask != nullptr && !scores.mask_is_boolean);
}

/// A score after softcap, ALiBi and additive mask, in this order, and the sum of the magnitudes that made it: what rounding of
/// the rules scales with; 0 where there is none of them.
struct BiasedScore {
  double score = 0.0;
  double magnitude = 0.0;
};

/// `score` is scale x q k.
[[nodiscard]] inline BiasedScore biased_score(const Problem& problem, const Sequence& lengths, const QueryRow& row,
                                              std::int64_t key, double score) {
  const Scores& scores = problem.scores;
  if (!has_score_rules(scores)) return {score, 0.0};
  if (scores.softcap > 0.0F) {
    const auto cap = static_cast<double>(scores.softcap);
    score = cap * std::tanh(score / cap);
  }
  BiasedScore biased{score, std::abs(score)};
  const auto add = [&biased](double bias) {
    biased.score += bias;
    biased.magnitude += std::abs(bias);
  };
  if (scores.alibi_slopes != nullptr) {
    const std::int64_t position = static_cast<std::int64_t>(lengths.kv_end) - lengths.q_tokens + row.token;
    const auto slope = static_cast<double>(alibi_slope(scores, {row.sequence, row.head}));
    add(-slope * static_cast<double>(std::abs(position - key)));
  }
  if (scores.mask != nullptr && !scores.mask_is_boolean)
    add(load_element(scores.mask, scores.mask_dtype, mask_element(problem, row, key)));
  return biased;
}

}  // namespace lean::reference
