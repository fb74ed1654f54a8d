// The launches that a plan says: the arguments of each kernel, and the calls of the runtime.
#pragma once

#include "backends/cuda/call_plan.hpp"
#include "lean/lean.hpp"

namespace lean::cuda {

/// Enqueues the call on options.stream. The plan is one of `problem` that nothing is refused of; the workspace is large enough for
/// it, aligned, and device memory.
[[nodiscard]] Status launch_call(const Problem& problem, const CallPlan& plan, const Workspace& workspace) noexcept;

}  // namespace lean::cuda
