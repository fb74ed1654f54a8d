// What a call that is part of an exchange must keep (lean/exchange.hpp), whether by exchange_states() or by decode().
#pragma once

#include "lean/exchange.hpp"
#include "lean/problem.hpp"
#include "lean/status.hpp"

namespace lean {

/// That there are so many ranks, and the exchange is of one of them: its memory can be looked up by rank.
[[nodiscard]] Status check_ranks(const Exchange& exchange) noexcept;

/// One's own side: ranks, memory for so many rows, the fault word.
[[nodiscard]] Status check_exchange(const Exchange& exchange, std::int64_t rows, std::int32_t value_dim, DType dtype) noexcept;

}  // namespace lean
