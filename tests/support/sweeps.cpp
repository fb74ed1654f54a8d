#include "support/sweeps.hpp"

#include <gtest/gtest.h>

#include "support/run_and_check.hpp"
#include "support/tables.hpp"

namespace lean::support {

void expect_right_on_every_isa(const Case& c) {
  const TestExecutor executor(c.executor, 4, c.seed);
  TestProblem built(c);
  if (!served(built, options_of(c, executor))) return;
  const reference::Answer answer = reference::decode(built.problem());
  for (const CpuIsa isa : available_isas()) {
    SCOPED_TRACE(name_of(isa));
    Options options = options_of(c, executor);
    options.cpu_isa = isa;
    EXPECT_TRUE(run_and_check(built, answer, options));
  }
}

void expect_right_however_shared_out(const Case& c, const std::vector<std::int32_t>& worker_counts) {
  const TestExecutor executor(ExecutorKind::kPool, 4);
  TestProblem built(c);
  const reference::Answer answer = reference::decode(built.problem());
  for (const Policy& policy : all_policies()) {
    for (const Fixup fixup : kFixups) {
      if (!pairs(policy, fixup)) continue;
      for (const std::int32_t workers : worker_counts) {
        Options options = options_of(c, executor);
        options.policy = policy;
        options.fixup = fixup;
        options.workers = workers;
        if (!served(built, options)) continue;
        Case shown = c;
        shown.policy = policy;
        shown.fixup = fixup;
        shown.workers = workers;
        EXPECT_TRUE(run_and_check(built, answer, options)) << to_text(shown);
      }
    }
  }
}

}  // namespace lean::support
