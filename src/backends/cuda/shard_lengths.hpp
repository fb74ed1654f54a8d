// shard_lengths() on a GPU: one small kernel ahead of a call whose lengths are of whole sequences.
#pragma once

#include <cstdint>

#include "lean/exchange.hpp"

namespace lean::cuda {

/// Enqueues the kernel on options.stream; from compute capability 9.0 on it starts while the one before it ends, and lets the next
/// start as early.
[[nodiscard]] Status enqueue_shard_lengths(const std::int32_t* tokens, std::int32_t* held, std::int64_t count,
                                           const TokenShard& shard, const Options& options) noexcept;

}  // namespace lean::cuda
