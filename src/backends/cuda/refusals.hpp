// What the CUDA backend does not do, by name: a table of what a problem may not ask of any device, and what a plan lacks.
#pragma once

#include "backends/cuda/call_plan.hpp"
#include "lean/options.hpp"
#include "lean/problem.hpp"
#include "lean/status.hpp"

namespace lean::cuda {

/// What is refused of the problem alone. A plan may only be made of one that this takes.
[[nodiscard]] Status refuse_problem(const Problem& problem) noexcept;

/// What is refused of the plan made of the problem: what this build, this device or these options lack.
[[nodiscard]] Status refuse_plan(const Problem& problem, const CallPlan& plan) noexcept;

}  // namespace lean::cuda
