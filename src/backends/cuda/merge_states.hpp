// merge_states() on a device: two finished results over disjoint keys, where the GPU has them.
#pragma once

#include "lean/options.hpp"
#include "lean/status.hpp"
#include "softmax/finished_states.hpp"

namespace lean::cuda {

/// Enqueues one kernel on options.stream of the current device; nothing is allocated, and graphs may capture it.
[[nodiscard]] Status merge_states(const softmax::FinishedStates& states, const Options& options) noexcept;

}  // namespace lean::cuda
