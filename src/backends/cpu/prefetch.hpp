// ReadAhead: rows are asked for a little before they are read, in the order of reading: the tile's K, its V, the next tile's K.
//
// Hardware prefetchers alone are not enough: arithmetic on a late line fills the scheduler, and then too few reads are in
// flight. Into the L2: an L1 prefetch holds one of few line-fill buffers for a whole memory latency.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "backends/cpu/token_rows.hpp"

namespace lean::cpu {

/// Rows to ask for; no tokens: nothing.
struct Prefetch {
  TokenRows rows{};
  std::int32_t row_bytes = 0;
};

class ReadAhead {
 public:
  /// `rows` of elements of that size are being read, `after` next.
  ReadAhead(const TokenRows& rows, std::int32_t element_bytes, const Prefetch& after) noexcept
      : rows_{rows, rows.dims * element_bytes},
        after_(after),
        distance_(std::max(1, kDistanceBytes / std::max(1, rows_.row_bytes))),
        asked_(distance_) {}

  /// Rows up to `token` are about to be read. Asks for each row once, however often a pass over the rows repeats.
  void reach(std::int32_t token) noexcept {
    for (const std::int32_t end = token + distance_; asked_ < end; ++asked_) {
      if (asked_ < rows_.rows.tokens) {
        ask(rows_, asked_);
      } else if (asked_ - rows_.rows.tokens < after_.rows.tokens) {
        ask(after_, asked_ - rows_.rows.tokens);
      }
    }
  }

 private:
  static constexpr std::int32_t kLineBytes = 64;
  static constexpr std::int32_t kDistanceBytes = 8192;

  static void ask(const Prefetch& from, std::int32_t token) noexcept {
    const std::byte* row = from.rows.row(token);
    for (std::int32_t byte = 0; byte < from.row_bytes; byte += kLineBytes) __builtin_prefetch(row + byte, 0, 2);
  }

  Prefetch rows_;
  Prefetch after_;
  std::int32_t distance_;  // in rows
  std::int32_t asked_;     // rows, from the tile's first
};

}  // namespace lean::cpu
