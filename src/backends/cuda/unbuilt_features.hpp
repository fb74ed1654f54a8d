// What Problem has a place for and the CPU backend computes, and this backend does not yet. A feature that is built loses its row.
#pragma once

#include "lean/problem.hpp"
#include "problem/preconditions.hpp"

namespace lean::cuda {

[[nodiscard]] PreconditionTable<Problem> unbuilt_features() noexcept;

}  // namespace lean::cuda
