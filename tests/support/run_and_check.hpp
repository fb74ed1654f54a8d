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

/// The case's Options, on the target; `executor` must outlive them.
[[nodiscard]] Options options_of(const Case& c, const TestExecutor& executor);

/// How the options' backend rounds this problem.
[[nodiscard]] reference::Rounding rounding_of(const Problem& problem, const Options& options);

/// Whether the target computes this. Only a GPU may decline, and only as unsupported; run() fails on any other refusal.
[[nodiscard]] bool served(const TestProblem& built, const Options& options);
/// Whether the target serves a case; declining is not counted.
[[nodiscard]] bool target_serves(const Case& c);

/// Calls that run() made, and those that served() declined.
struct Tally {
  std::int64_t served = 0;
  std::int64_t refused = 0;
};
[[nodiscard]] Tally tally();

/// decode(), and the target's work done.
[[nodiscard]] Status decode_and_wait(const Problem& problem, const Options& options, const Workspace& workspace);

/// Poisons the outputs, runs decode() on a fresh workspace, checks canaries, the sticky code and that the state is left
/// as it was found; `built` afterwards holds the result.
[[nodiscard]] testing::AssertionResult run(TestProblem& built, const Options& options, Fill scratch = Fill::kNan);

/// run(), then the comparison with the oracle's answer.
[[nodiscard]] testing::AssertionResult run_and_check(TestProblem& built, const reference::Answer& answer, const Options& options);

/// The whole of it, with the executor and the options the case asks for; success if the target declines.
[[nodiscard]] testing::AssertionResult run_and_check(const Case& c);

/// R26: the same with an id outside the pool for a page of the case's last sequence, whose tokens count as not there. True where the
/// case is not served.
[[nodiscard]] testing::AssertionResult skips_page(const Case& c, std::int32_t page);

/// The same with another scale of the first kv head's keys. True where the case is not served.
[[nodiscard]] testing::AssertionResult takes_key_scale(const Case& c, float scale);

/// The suite's proof of itself: for this problem the bound must refuse an output of zeros, one that missed a LeanTile
/// and one that took a LeanTile twice. Sequences too short to tell are left out; fails if none is left.
[[nodiscard]] testing::AssertionResult bound_refuses_wrong_results(const TestProblem& built, const reference::Answer& answer,
                                                                   const Options& options);

}  // namespace lean::support
