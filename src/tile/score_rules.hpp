// What Scores asks of a score beyond a scale, as both backends read it: softcap, ALiBi and masks as numbers of the log2 domain.
// Which scores a number is applied to is each backend's own loop: vectors of a row on the CPU, a lane's scores on a GPU. The
// order is softcap, ALiBi, mask, window. The fp64 oracle (backends/reference/visibility.hpp) is written apart on purpose.
#pragma once

#include <cstdint>

#include "base/hd.hpp"
#include "lean/problem.hpp"
#include "problem/address.hpp"
#include "problem/sequence.hpp"
#include "problem/tree_mask.hpp"
#include "softmax/scale.hpp"
#include "softmax/state.hpp"

namespace lean::tile {

/// The softcap as softmax::soft_cap() takes it; 0: none.
LEAN_HD [[nodiscard]] constexpr float log2_cap(const Scores& scores) noexcept { return scores.softcap * softmax::kLog2E; }

/// What a key loses for each token of its distance from the query (ALiBi, arXiv 2108.12409, sec. 3), where there are slopes.
LEAN_HD [[nodiscard]] inline float log2_slope(const Scores& scores, HeadPosition q_head) noexcept {
  return softmax::to_log2(alibi_slope(scores, q_head));
}

/// What the masks add to the score of query token `token` and `key`, an absolute token of the sequence that the query may see;
/// -inf hides the key. For a lane's scores on a GPU; the CPU reads a row of the mask at once, to the same numbers
/// (backends/cpu/score_rules.cpp). `additive(scores, offset)` reads an element of an additive mask, of any of its types.
template <typename TAdditive>
LEAN_HD [[nodiscard]] float mask_bias(const Problem& problem, const Sequence& lengths, HeadPosition q_head, std::int32_t token,
                                      std::int64_t key, const TAdditive& additive) noexcept {
  const Scores& scores = problem.scores;
  if (scores.tree_mask != nullptr && !sees_in_tree(problem, lengths, q_head.sequence, token, key)) return softmax::kNegInf;
  if (scores.mask == nullptr) return 0.0F;
  const std::int64_t offset = mask_offset(scores.mask_strides, q_head, token, key);
  if (!scores.mask_is_boolean) return softmax::to_log2(additive(scores, offset));
  return static_cast<const std::uint8_t*>(scores.mask)[offset] != 0 ? 0.0F : softmax::kNegInf;
}

}  // namespace lean::tile
