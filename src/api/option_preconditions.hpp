// Preconditions of Options, in the same form as those of Problem. Called by the API before any backend.
#pragma once

#include "lean/options.hpp"
#include "problem/preconditions.hpp"

namespace lean {

[[nodiscard]] PreconditionTable<Options> option_preconditions() noexcept;

/// The options a backend sees: Determinism::kBatchInvariant with the default policy asks for Policy::fixed_chunk.
[[nodiscard]] Options resolve(const Options& options) noexcept;

}  // namespace lean
