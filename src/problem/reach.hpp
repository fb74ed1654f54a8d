// Reach: which keys a query may see by position alone (causal limit, sliding window). Positions are counted from the sequence's
// first valid key; query token i of n_q stands at n_kv - n_q + i, so the last query stands at the last key.
// Used by the schedule, which leaves tiles that nobody sees off the line, and by the backends' worker loops.
#pragma once

#include <cstdint>

#include "base/hd.hpp"
#include "base/int_math.hpp"
#include "lean/problem.hpp"

namespace lean {

/// Keys seen to the left and to the right of the query's own position; -1: all.
struct Reach {
  std::int32_t left = -1;
  std::int32_t right = -1;

  [[nodiscard]] LEAN_HD constexpr bool limited() const noexcept { return left >= 0 || right >= 0; }
};

/// The causal limit is a window that ends at the query itself.
LEAN_HD [[nodiscard]] constexpr Reach reach_of(const Scores& scores) noexcept {
  return {.left = scores.window_left, .right = scores.causal ? 0 : scores.window_right};
}

/// Keys [begin, end); empty where end <= begin.
struct KeySpan {
  std::int32_t begin = 0;
  std::int32_t end = 0;
};

/// What query tokens [token, last_token] of a sequence see together. Windows move with the query, so the first one sees the
/// first key and the last one the last.
LEAN_HD [[nodiscard]] constexpr KeySpan keys_seen(Reach reach, std::int32_t kv_tokens, std::int32_t q_tokens, std::int32_t token,
                                                  std::int32_t last_token) noexcept {
  KeySpan span{.begin = 0, .end = kv_tokens};
  const std::int64_t first_query = std::int64_t{kv_tokens} - q_tokens;
  if (reach.right >= 0) {
    span.end = static_cast<std::int32_t>(clamp_to(first_query + last_token + reach.right + 1, 0, kv_tokens));
  }
  if (reach.left >= 0) span.begin = static_cast<std::int32_t>(clamp_to(first_query + token - reach.left, 0, span.end));
  return span;
}

}  // namespace lean
