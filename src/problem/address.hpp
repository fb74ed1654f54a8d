// Address rules: where the element of a tensor lies, in elements from its data pointer, always in 64 bits.
// One set for host and device; no backend computes an offset by itself.
#pragma once

#include <cstdint>

#include "base/hd.hpp"
#include "base/int_math.hpp"
#include "lean/problem.hpp"
#include "problem/reach.hpp"
#include "problem/sequence.hpp"

namespace lean {

/// Which sequence and head, and the lengths that go with them.
struct HeadPosition {
  std::int64_t sequence = 0;
  std::int32_t head = 0;
};

/// Offset of query or output token 0 of (sequence, query head).
LEAN_HD [[nodiscard]] constexpr std::int64_t q_offset(const Strides& strides, const Sequence& lengths, HeadPosition at,
                                                      bool cumulative) noexcept {
  const std::int64_t start = cumulative ? lengths.q_first_token * strides.token : at.sequence * strides.sequence;
  return start + at.head * strides.head;
}

/// Offset of key or value token 0 of (sequence, kv head), contiguous and ragged layouts.
LEAN_HD [[nodiscard]] constexpr std::int64_t kv_offset(const Strides& strides, const Sequence& lengths, HeadPosition at,
                                                       bool cumulative) noexcept {
  const std::int64_t start = cumulative ? lengths.kv_first_token * strides.token : at.sequence * strides.sequence;
  return start + at.head * strides.head;
}

/// A packed row of a kv head: rows are ordered token by token, the G query heads of a token side by side, so that a
/// row block covers neighbouring tokens and a causal limit cuts whole tiles.
struct PackedRow {
  std::int32_t token = 0;          // query token, in [0, n_q)
  std::int32_t head_in_group = 0;  // query head = kv_head * G + head_in_group
};

LEAN_HD [[nodiscard]] constexpr PackedRow packed_row(std::int64_t row, std::int32_t group) noexcept {
  if (row < group) return {0, static_cast<std::int32_t>(row)};  // decode: no division
  const std::int64_t token = quotient(row, std::int64_t{group});
  return {static_cast<std::int32_t>(token), static_cast<std::int32_t>(row - token * group)};
}

/// The keys that query tokens [token, last_token] see together, as absolute tokens of the sequence.
LEAN_HD [[nodiscard]] constexpr KeySpan visible_span(const Sequence& lengths, std::int32_t token, std::int32_t last_token,
                                                     Reach reach) noexcept {
  const KeySpan span = keys_seen(reach, lengths.kv_tokens(), lengths.q_tokens, token, last_token);
  return {lengths.kv_begin + span.begin, lengths.kv_begin + span.end};
}

/// One past the last key that query token `token` sees (bottom-right causal), as an absolute token of the sequence.
LEAN_HD [[nodiscard]] constexpr std::int32_t visible_end(const Sequence& lengths, std::int32_t token, bool causal) noexcept {
  return visible_span(lengths, token, token, {.right = causal ? 0 : -1}).end;
}

/// The ALiBi slope of a query head, where there are slopes.
LEAN_HD [[nodiscard]] constexpr float alibi_slope(const Scores& scores, HeadPosition q_head) noexcept {
  return scores.alibi_slopes[q_head.sequence * scores.alibi_sequence_stride + q_head.head];
}

/// Offset of the mask element of (sequence, query head, query token, key), the key as an absolute token of the sequence.
LEAN_HD [[nodiscard]] constexpr std::int64_t mask_offset(const Strides& strides, HeadPosition at, std::int32_t token,
                                                         std::int64_t key) noexcept {
  return at.sequence * strides.sequence + at.head * strides.head + token * strides.token + key * strides.dim;
}

}  // namespace lean
