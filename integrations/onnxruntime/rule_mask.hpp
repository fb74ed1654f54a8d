// Every rule of a call as one number for each key: for what the library's own rules do not say, which is a number of new tokens
// other than that of the queries, or a mask shorter than the keys, together with positions. One definition, of which the CPU's
// threads and a kernel fill fp32 masks.
#pragma once

#include <cstdint>
#include <limits>

#include "lean/problem.hpp"
#include "number.hpp"

namespace lean::ort {

struct RuleMask {
  // [batch, heads, queries, keys]; heads is 1 where all have the same.
  std::int64_t batch = 0;
  std::int64_t heads = 0;
  std::int64_t queries = 0;
  std::int64_t keys = 0;

  std::int64_t past_tokens = 0;         // query i stands at past_tokens + i
  const std::int32_t* valid = nullptr;  // [batch], tokens of each sequence, where the mask is filled: then at valid - queries + i
  Scores scores{};                      // causal, windows and mask
  std::int64_t mask_keys = 0;           // keys past its last extent are hidden

  [[nodiscard]] constexpr std::int64_t rows() const noexcept { return batch * heads * queries; }
};

[[nodiscard]] constexpr float mask_number(const Scores& scores, std::int64_t element) noexcept {
  constexpr float kHidden = -std::numeric_limits<float>::infinity();
  if (scores.mask_is_boolean) return static_cast<const bool*>(scores.mask)[element] ? 0.0F : kHidden;
  return load_number(scores.mask, scores.mask_dtype, element);
}

/// What is added to the score of `key` in row `row` of [batch, heads, queries]; -inf hides it.
[[nodiscard]] constexpr float mask_value(const RuleMask& rules, std::int64_t row, std::int64_t key) noexcept {
  constexpr float kHidden = -std::numeric_limits<float>::infinity();
  const std::int64_t query = row % rules.queries;
  const std::int64_t head = row / rules.queries % rules.heads;
  const std::int64_t sequence = row / (rules.heads * rules.queries);
  const std::int64_t there = rules.valid != nullptr ? rules.valid[sequence] : rules.keys;
  const std::int64_t position = (rules.valid != nullptr ? there - rules.queries : rules.past_tokens) + query;
  const Scores& scores = rules.scores;
  const bool seen = key < there && (!scores.causal || key <= position) &&
                    (scores.window_left < 0 || position - key <= scores.window_left) &&
                    (scores.window_right < 0 || key - position <= scores.window_right);
  if (!seen || scores.mask == nullptr) return seen ? 0.0F : kHidden;
  if (key >= rules.mask_keys) return kHidden;
  const Strides& strides = scores.mask_strides;
  return mask_number(scores, sequence * strides.sequence + head * strides.head + query * strides.token + key * strides.dim);
}

}  // namespace lean::ort
