// Append: which tokens of a sequence are new in this call, and the rotary embedding of queries and new keys. New token i is query
// token i and stands at kv_end - n_q + i. Everything is fp32 arithmetic with a fixed order, so that every backend writes the
// same bits into a cache.
#pragma once

#include <cmath>
#include <cstdint>

#include "base/hd.hpp"
#include "base/int_math.hpp"
#include "lean/problem.hpp"
#include "problem/address.hpp"
#include "problem/sequence.hpp"

namespace lean {

LEAN_HD [[nodiscard]] constexpr bool appends(const Problem& problem) noexcept { return problem.append.k.data != nullptr; }

/// Writes the length of a sequence where the call is told how many tokens were there before it. For the caller: the call itself
/// reads what it was told.
LEAN_HD inline void count_new_tokens(const Problem& problem, std::int64_t sequence) noexcept {
  if (problem.append.cached_lengths == nullptr) return;
  const LengthSource lengths(problem);
  const_cast<std::int32_t*>(problem.kv_lengths)[sequence] = lengths.given_tokens(sequence, lengths.q_tokens(sequence));
}

/// Of all sequences, whose arrays the host can reach.
inline void count_new_tokens(const Problem& problem) noexcept {
  if (problem.append.cached_lengths == nullptr || problem.kv_lengths == nullptr) return;
  for (std::int64_t b = 0; b < problem.batch; ++b) count_new_tokens(problem, b);
}

/// The first new token of the sequence, kv_end where there is none. A sequence whose lengths had to be clamped gets none: its new
/// tokens would take the place of old ones.
LEAN_HD [[nodiscard]] constexpr std::int32_t first_new_token(const Problem& problem, const Sequence& lengths) noexcept {
  if (!appends(problem) || lengths.clamped) return lengths.kv_end;
  return static_cast<std::int32_t>(max_of(lengths.kv_begin, std::int64_t{lengths.kv_end} - lengths.q_tokens));
}

/// Offset of the row that token `token` has in tensors packed as the queries are: append.k and append.v, q, o.
LEAN_HD [[nodiscard]] constexpr std::int64_t append_offset(const Problem& problem, const Strides& strides, const Sequence& lengths,
                                                           HeadPosition head, std::int64_t token) noexcept {
  const std::int64_t query = token - (std::int64_t{lengths.kv_end} - lengths.q_tokens);
  return q_offset(strides, lengths, head, problem.cu_q_tokens != nullptr) + query * strides.token;
}

/// Whether a row block, packed rows [first_row, first_row + rows) of a kv head, is the one that writes new token `token` to the
/// cache: every new token has a query of its own, which sees it, and whose first row one block holds.
LEAN_HD [[nodiscard]] constexpr bool writes_new_token(const Sequence& lengths, std::int32_t group, std::int64_t first_row,
                                                      std::int32_t rows, std::int64_t token) noexcept {
  const std::int64_t row = (token - (std::int64_t{lengths.kv_end} - lengths.q_tokens)) * group;
  return row >= first_row && row < first_row + rows;
}

/// Whether queries of the sequence are rotated; those of one without keys see nothing, and the tables may have no row at all.
LEAN_HD [[nodiscard]] constexpr bool rotates_queries(const Append& append, const Sequence& lengths) noexcept {
  return append.rotary_dim > 0 && lengths.kv_tokens() > 0;
}

/// The row of the rotary tables that token `token` of the sequence is rotated by.
LEAN_HD [[nodiscard]] constexpr std::int64_t rotary_position(const Append& append, const Sequence& lengths,
                                                             std::int64_t token) noexcept {
  return max_of(0, append.rotary_absolute ? token : token - lengths.kv_begin);
}

/// Two elements of a row that are rotated together, by angle `angle` of the tables.
struct RotaryPair {
  std::int32_t first = 0;
  std::int32_t second = 0;
  std::int32_t angle = 0;
};

/// Neighbours, or an element of the first half and its like in the second.
LEAN_HD [[nodiscard]] constexpr RotaryPair rotary_pair(const Append& append, std::int32_t angle) noexcept {
  if (append.rotary_interleaved) return {2 * angle, 2 * angle + 1, angle};
  return {angle, append.rotary_dim / 2 + angle, angle};
}

/// The pair that element `dim` < rotary_dim belongs to.
LEAN_HD [[nodiscard]] constexpr RotaryPair rotary_pair_of(const Append& append, std::int32_t dim) noexcept {
  const std::int32_t half = append.rotary_dim / 2;
  if (append.rotary_interleaved) return rotary_pair(append, dim / 2);
  return rotary_pair(append, dim < half ? dim : dim - half);
}

struct Rotated {
  float first = 0.0F;
  float second = 0.0F;
};

/// (a, b) -> (a cos - b sin, a sin + b cos) (RoFormer, arXiv 2104.09864, eq. 34).
LEAN_HD [[nodiscard]] inline Rotated rotate(float cos, float sin, float a, float b) noexcept {
  return {std::fma(a, cos, -(b * sin)), std::fma(a, sin, b * cos)};
}

/// Where the tables have the angles of a position.
LEAN_HD [[nodiscard]] constexpr std::int64_t rotary_row(const Append& append, std::int64_t position) noexcept {
  return position * (append.rotary_dim / 2);
}

/// Rotates the first rotary_dim elements of a row.
LEAN_HD inline void rotate_row(const Append& append, std::int64_t position, float* row) noexcept {
  const float* const cos = append.rotary_cos + rotary_row(append, position);
  const float* const sin = append.rotary_sin + rotary_row(append, position);
  for (std::int32_t angle = 0; angle < append.rotary_dim / 2; ++angle) {
    const RotaryPair pair = rotary_pair(append, angle);
    const Rotated rotated = rotate(cos[angle], sin[angle], row[pair.first], row[pair.second]);
    row[pair.first] = rotated.first;
    row[pair.second] = rotated.second;
  }
}

}  // namespace lean
