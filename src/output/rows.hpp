// Output: where a finished row goes, and its log-sum-exp. Called by a backend once per output, by the one worker that holds
// the merged result. Every row of every query is written, empty ones included.
#pragma once

#include <cstdint>

#include "base/hd.hpp"
#include "lean/problem.hpp"
#include "problem/address.hpp"
#include "softmax/state.hpp"

namespace lean::output {

/// Offset in elements of the packed row's first output element, from o.data. `group` = q_heads / kv_heads.
LEAN_HD [[nodiscard]] constexpr std::int64_t row_offset(const Problem& problem, std::int32_t group, const Sequence& lengths,
                                                        HeadPosition kv_head, PackedRow at) noexcept {
  const HeadPosition q_head{kv_head.sequence, kv_head.head * group + at.head_in_group};
  return q_offset(problem.o.strides, lengths, q_head, problem.cu_q_tokens != nullptr) + at.token * problem.o.strides.token;
}

/// The sink that takes part in the row's denominator; -inf where there is none.
LEAN_HD [[nodiscard]] constexpr float row_sink(const Problem& problem, std::int32_t group, HeadPosition kv_head,
                                               PackedRow at) noexcept {
  if (problem.scores.sinks == nullptr) return softmax::kNegInf;
  return problem.scores.sinks[kv_head.head * group + at.head_in_group];
}

/// Writes the row's lse where the caller asked for it, from its state and sink.
LEAN_HD inline void write_lse(const Problem& problem, std::int32_t group, const Sequence& lengths, HeadPosition kv_head,
                              PackedRow at, softmax::State state, float sink) noexcept {
  if (problem.lse.data == nullptr) return;
  const Strides strides{problem.lse.sequence_stride, problem.lse.head_stride, problem.lse.token_stride, 0};
  const HeadPosition q_head{kv_head.sequence, kv_head.head * group + at.head_in_group};
  problem.lse.data[q_offset(strides, lengths, q_head, problem.cu_q_tokens != nullptr) + at.token * strides.token] =
      softmax::natural_lse(state, sink);
}

}  // namespace lean::output
