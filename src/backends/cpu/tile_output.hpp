// TileOutput: the output a run of tiles belongs to, and what its rows are and see.
#pragma once

#include <cstdint>

#include "lean/problem.hpp"
#include "problem/address.hpp"
#include "problem/reach.hpp"
#include "problem/sequence.hpp"

namespace lean::cpu {

struct TileOutput {
  Sequence lengths;
  HeadPosition kv_head;
  std::int64_t first_row = 0;  // packed row of the row block's first
  std::int32_t rows = 0;
  std::int32_t group = 1;  // G
  Reach reach{};

  /// Rows [first, first + count) of the block, as far as it has them.
  [[nodiscard]] TileOutput part(std::int32_t first, std::int32_t count) const noexcept {
    TileOutput some = *this;
    some.first_row += first;
    some.rows = count < rows - first ? count : rows - first;
    return some;
  }

  /// Which query row r of the block is.
  [[nodiscard]] PackedRow row(std::int32_t r) const noexcept { return packed_row(first_row + r, group); }
  [[nodiscard]] HeadPosition q_head(PackedRow at) const noexcept {
    return {kv_head.sequence, kv_head.head * group + at.head_in_group};
  }

  /// Tokens of the sequence that a query token sees, and that any row of the block sees.
  [[nodiscard]] KeySpan seen_by(std::int32_t token) const noexcept { return visible_span(lengths, token, token, reach); }
  [[nodiscard]] KeySpan seen() const noexcept { return visible_span(lengths, row(0).token, row(rows - 1).token, reach); }
};

}  // namespace lean::cpu
