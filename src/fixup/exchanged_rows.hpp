// ExchangedRows: how finished rows of O and log-sum-exp lie in an exchange's words (fixup/exchange.hpp), 8 bytes of O a word, the row's
// log-sum-exp beside them, and the epoch: whoever has a word can merge it.
#pragma once

#include <cstdint>

#include "base/hd.hpp"
#include "base/int_math.hpp"
#include "fixup/exchange.hpp"
#include "lean/problem.hpp"

namespace lean::fixup {

inline constexpr std::int64_t kMaxExchangedRows = (std::int64_t{1} << 31) - 1;
inline constexpr std::int32_t kPieceBytes = 8;  // of O, in a word

struct ExchangedRows {
  std::int64_t rows = 0;
  std::int32_t row_words = 0;  // the last of a row may be half full

  [[nodiscard]] static constexpr ExchangedRows of(std::int64_t rows, std::int32_t value_dim, DType dtype) noexcept {
    return {.rows = rows, .row_words = static_cast<std::int32_t>(ceil_div(value_dim * bytes_of(dtype), kPieceBytes))};
  }
  [[nodiscard]] LEAN_HD constexpr std::int64_t words() const noexcept { return rows * row_words; }
  [[nodiscard]] LEAN_HD constexpr std::int64_t blocks() const noexcept { return ceil_div(words(), ExchangeLayout::kBlockWords); }
};

}  // namespace lean::fixup
