// ReadAhead: while a row is read, the row some KB further on is asked for, a cache line for each line read: the tile's K, its V,
// the next tile's K. RowsAhead: rows of the next tile are asked for while this one is computed, as many in each step of a stage.
//
// Hardware prefetchers alone are not enough: arithmetic on a late line fills the scheduler, and then too few reads are in
// flight. Line by line, because requests that come in bursts hold up the loads behind them; and into the L2, because one into
// the L1 holds one of few line-fill buffers for a whole memory latency; but for loops of few instructions a line.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "backends/cpu/token_rows.hpp"

namespace lean::cpu {

inline constexpr std::int32_t kLineBytes = 64;

/// Of what is asked for meanwhile, what each stage of a tile asks for: about its part of the time.
inline constexpr std::int32_t kScoresEighths = 3;
inline constexpr std::int32_t kSoftmaxEighths = 1;
inline constexpr std::int32_t kAccumulateEighths = 4;

/// Inlined early: GCC 12 takes a function that only prefetches for one without effects, and drops calls of it.
[[gnu::always_inline]] inline void ask_for(const std::byte* line) noexcept { __builtin_prefetch(line, 0, 2); }

/// For loops of few instructions a line, which hold up no other loads.
[[gnu::always_inline]] inline void ask_into_l1(const std::byte* line) noexcept { __builtin_prefetch(line, 0, 3); }

/// All lines of a row.
[[gnu::always_inline]] inline void ask_for_row(const std::byte* row, std::int64_t bytes) noexcept {
  for (std::int64_t byte = 0; byte < bytes; byte += kLineBytes) ask_for(row + byte);
}

/// The lines of rows that come next, asked for in steps while something else is computed. In order, because hardware prefetchers
/// then join in: alone, software's requests hold a line-fill buffer each for a whole memory
/// latency.
class RowsAhead {
 public:
  using Rows = std::array<TokenRows, 3>;

  /// What is asked for from now on, in this order.
  void begin(const Rows& rows, std::int64_t element_bytes) noexcept {
    *this = {};
    rows_ = rows;
    element_bytes_ = element_bytes;
    for (const TokenRows& one : rows) bytes_ += row_bytes(one) * one.tokens;
  }

  /// That much of it in the next steps.
  void share(std::int32_t eighths, std::int32_t steps) noexcept {
    const std::int64_t line_steps = std::int64_t{8} * kLineBytes * std::max(1, steps);
    lines_a_step_ = static_cast<std::int32_t>((bytes_ * eighths + line_steps - 1) / line_steps);
  }

  /// A step: few instructions, since a tile has hundreds.
  [[gnu::always_inline]] void ask() noexcept {
    step([](const std::byte* line) __attribute__((always_inline)) { ask_for(line); });
  }
  /// ask(line) for each line of a step.
  template <typename TAsk>
  [[gnu::always_inline]] void step(const TAsk& ask) noexcept {
    for (std::int32_t line = 0; line < lines_a_step_; ++line, next_ += kLineBytes) {
      if (next_ >= end_) {
        if (rows_left_ == 0 && !find_rows()) return;
        --rows_left_;
        next_ = row_;
        end_ = row_ + row_bytes_;
        row_ += row_stride_bytes_;
      }
      ask(next_);
    }
  }

 private:
  static constexpr std::int32_t kMostRows = 16;  // of a table, that are looked at together

  [[nodiscard]] std::int64_t row_bytes(const TokenRows& rows) const noexcept { return rows.dims * element_bytes_; }

  /// The next evenly spaced ones; side by side they are as one long row. In a table the last of some tells whether they are: where
  /// it misleads, other lines are asked for. False: there are none.
  [[gnu::noinline]] bool find_rows() noexcept {
    for (; token_ == rows_[which_].tokens; token_ = 0, ++which_) {
      if (which_ + 1 < rows_.size()) continue;
      begin({}, 0);
      return false;
    }
    const TokenRows& rows = rows_[which_];
    std::int32_t count = std::min(rows.tokens - token_, rows.table != nullptr ? kMostRows : rows.tokens);
    row_ = rows.row(token_);
    row_stride_bytes_ = rows.token_stride_bytes;
    if (rows.row(token_ + count - 1) - row_ != (count - 1) * row_stride_bytes_) count = 1;
    token_ += count;
    row_bytes_ = row_bytes(rows);
    rows_left_ = count;
    if (row_stride_bytes_ == row_bytes_) row_bytes_ *= std::exchange(rows_left_, 1);
    return true;
  }

  Rows rows_{};
  std::int64_t element_bytes_ = 0;
  std::int64_t bytes_ = 0;  // of all
  std::int32_t lines_a_step_ = 0;
  const std::byte* next_ = nullptr;  // line
  const std::byte* end_ = nullptr;   // of its row
  const std::byte* row_ = nullptr;   // the next
  std::int64_t row_bytes_ = 0;
  std::int64_t row_stride_bytes_ = 0;
  std::int32_t rows_left_ = 0;  // of those that find_rows() found
  std::int32_t token_ = 0;      // that it goes on with
  std::size_t which_ = 0;
};

/// What is read after these rows, and how far ahead to ask; for kernels that do not read row by row, what is asked for meanwhile.
struct Prefetch {
  TokenRows after{};
  std::int32_t distance_bytes = 0;  // 0: nothing is asked for
  RowsAhead* ahead = nullptr;
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

  /// row() of kCount tokens from `token` on, all of which there are.
  template <int kCount>
  [[gnu::always_inline]] void find(std::int32_t token, const std::byte** out) const noexcept {
    const std::int32_t ahead = token + distance_;
    if (ahead + kCount <= rows_.tokens) return rows_.find<kCount>(ahead, out);
    if (ahead >= rows_.tokens && ahead + kCount <= rows_.tokens + after_.tokens) {
      return after_.find<kCount>(ahead - rows_.tokens, out);
    }
    for (int i = 0; i < kCount; ++i) out[i] = row(token + i);
  }

  /// All lines of the row to ask for.
  [[gnu::always_inline]] void ask_row(std::int32_t token) const noexcept { ask_for_row(row(token), row_bytes_); }

 private:
  TokenRows rows_;
  TokenRows after_;
  std::int32_t row_bytes_;
  std::int32_t distance_;  // in rows
};

}  // namespace lean::cpu
