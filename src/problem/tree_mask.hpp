// The tree mask of speculative decoding: which of a sequence's last n_q keys, the draft tokens, each of its queries sees.
#pragma once

#include <cstdint>

#include "base/hd.hpp"
#include "lean/problem.hpp"
#include "problem/sequence.hpp"

namespace lean {

/// The first key that the tree mask is about; all before it are seen.
LEAN_HD [[nodiscard]] constexpr std::int64_t first_draft(const Sequence& lengths) noexcept { return query_position(lengths, 0); }

/// Whether query token `token` sees `key`, an absolute token of the sequence, as far as the tree mask goes.
LEAN_HD [[nodiscard]] constexpr bool sees_in_tree(const Problem& problem, const Sequence& lengths, std::int64_t sequence,
                                                  std::int32_t token, std::int64_t key) noexcept {
  const std::int64_t draft = key - first_draft(lengths);
  if (draft < 0) return true;
  const std::int64_t words = (std::int64_t{problem.q_tokens} + 31) / 32;  // of a query
  const std::uint32_t word = problem.scores.tree_mask[(sequence * problem.q_tokens + token) * words + draft / 32];
  return ((word >> (draft % 32)) & 1U) != 0;
}

}  // namespace lean
