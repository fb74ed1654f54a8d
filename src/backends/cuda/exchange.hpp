// Results of several GPUs of one host merged on each of them over peer memory (lean/exchange.hpp): one kernel behind a call.
#pragma once

#include "lean/exchange.hpp"
#include "lean/options.hpp"
#include "lean/status.hpp"

namespace lean::cuda {

/// Enqueues the kernel on options.stream; from compute capability 9.0 on it starts while the one before it ends. What the API
/// checks holds; rows are 1 or more.
[[nodiscard]] Status enqueue_exchange(const Exchange& exchange, const ExchangedStates& states, const Options& options) noexcept;

}  // namespace lean::cuda
