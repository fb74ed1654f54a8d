// The one way conformance tests run a case: build it, ask supports(), run decode() on exact guarded memory, look at
// memory, compare with the oracle. A failure says what is wrong and the line that repeats it.
#pragma once

#include <gtest/gtest.h>

#include "backends/reference/error_bound.hpp"
#include "backends/reference/reference.hpp"
#include "lean/lean.hpp"
#include "support/case.hpp"
#include "support/executors.hpp"
#include "support/test_problem.hpp"
#include "support/test_workspace.hpp"

namespace lean::support {

/// The case's Options; `executor` must outlive them.
[[nodiscard]] Options options_of(const Case& c, const TestExecutor& executor);

/// How the CPU backend rounds this problem on these options.
[[nodiscard]] reference::Rounding rounding_of(const Problem& problem, const Options& options);

/// Poisons the outputs, runs decode() on a fresh workspace, checks canaries, the sticky code and that the state is left
/// as it was found; `built` afterwards holds the result.
[[nodiscard]] testing::AssertionResult run(TestProblem& built, const Options& options, Fill scratch = Fill::kNan);

/// run(), then the comparison with the oracle's answer.
[[nodiscard]] testing::AssertionResult run_and_check(TestProblem& built, const reference::Answer& answer, const Options& options);

/// The whole of it, with the executor and the options the case asks for.
[[nodiscard]] testing::AssertionResult run_and_check(const Case& c);

/// The suite's proof of itself: for this problem the bound must refuse an output of zeros, one that missed a LeanTile
/// and one that took a LeanTile twice. Sequences too short to tell are left out; fails if none is left.
[[nodiscard]] testing::AssertionResult bound_refuses_wrong_results(const TestProblem& built, const reference::Answer& answer,
                                                                   const Options& options);

}  // namespace lean::support
