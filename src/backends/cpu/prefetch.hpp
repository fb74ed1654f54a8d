// ReadAhead: while a row is read, the row some KB further on is asked for, a cache line for each line read: the tile's K, its V,
// the next tile's K.
//
// Hardware prefetchers alone are not enough: arithmetic on a late line fills the scheduler, and then too few reads are in
// flight. Line by line, because requests that come in bursts hold up the loads behind them; and into the L2, because one into
// the L1 holds one of few line-fill buffers for a whole memory latency.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "backends/cpu/token_rows.hpp"

namespace lean::cpu {

inline constexpr std::int32_t kLineBytes = 64;

/// What is read after these rows, and how far ahead to ask.
struct Prefetch {
  TokenRows after{};
  std::int32_t distance_bytes = 0;  // 0: nothing is asked for
};

class ReadAhead {
 public:
  /// `rows` of elements of that size are being read.
  ReadAhead(const TokenRows& rows, std::int32_t element_bytes, const Prefetch& prefetch) noexcept
      : rows_(rows),
        after_(prefetch.after),
        row_bytes_(rows.dims * element_bytes),
        distance_(prefetch.distance_bytes == 0 ? 0 : std::max(1, prefetch.distance_bytes / std::max(1, row_bytes_))) {}

  /// The row to ask for while `token`'s is read; at the end of what is known, or without a distance, that row itself.
  [[nodiscard]] const std::byte* row(std::int32_t token) const noexcept {
    const std::int32_t ahead = token + distance_;
    if (ahead < rows_.tokens) return rows_.row(ahead);
    if (ahead - rows_.tokens < after_.tokens) return after_.row(ahead - rows_.tokens);
    return rows_.row(std::min(token, rows_.tokens - 1));
  }

  /// Inlined early: GCC 12 takes a function that only prefetches for one without effects, and drops calls of it.
  [[gnu::always_inline]] static void ask(const std::byte* line) noexcept { __builtin_prefetch(line, 0, 2); }
  [[gnu::always_inline]] static void ask_lines(const std::byte* row, std::int32_t bytes) noexcept {
    for (std::int32_t byte = 0; byte < bytes; byte += kLineBytes) ask(row + byte);
  }
  /// All lines of the row to ask for.
  [[gnu::always_inline]] void ask_row(std::int32_t token) const noexcept { ask_lines(row(token), row_bytes_); }

 private:
  TokenRows rows_;
  TokenRows after_;
  std::int32_t row_bytes_;
  std::int32_t distance_;  // in rows
};

}  // namespace lean::cpu
