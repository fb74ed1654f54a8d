// Tokens that a call appends, and the rotary embedding of them and of the queries: a kernel ahead of the call's own, which then is
// one that only reads.
#pragma once

#include "lean/problem.hpp"
#include "lean/status.hpp"

namespace lean::cuda {

/// Enqueues a kernel that writes the rows of new tokens to the cache and, where there is a rotary embedding, every query to its row
/// of the output, rotated: nobody stores a row there before all who read its queries are done. Tokens whose page lies outside the
/// pool are left out. The kernel lets dependents start when all that is ahead of it has ended, so they wait for new tokens and queries alone:
/// it writes no lengths but what append.cached_lengths makes of kv_lengths, which they do not read. `dependent_launch`: as
/// Options::dependent_launch. `stream` is a cudaStream_t.
[[nodiscard]] Status enqueue_append(const Problem& problem, bool dependent_launch, void* stream) noexcept;

/// Where queries lie then: rotated ones in the output.
[[nodiscard]] TensorView queries_after_append(const Problem& problem) noexcept;

/// What is left of a call then: the same, but it only reads.
[[nodiscard]] Problem after_append(const Problem& problem) noexcept;

}  // namespace lean::cuda
