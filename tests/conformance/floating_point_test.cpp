// Floating-point exceptions: a call raises none for what no row sees, so that who traps them (feenableexcept) can use the library.
#include <gtest/gtest.h>

#include <cfenv>

#include "support/run_and_check.hpp"
#include "support/tables.hpp"

namespace lean::support {
namespace {

void expect_no_exception(const Case& c, Fill scratch) {
  const TestExecutor serial(ExecutorKind::kDescending);
  const Options options = options_of(c, serial);
  TestProblem built(c);
  const TestWorkspace workspace(built.problem(), options, scratch);
  std::feclearexcept(FE_ALL_EXCEPT);
  ASSERT_TRUE(decode(built.problem(), options, workspace.get()).ok());
  EXPECT_EQ(std::fetestexcept(FE_INVALID | FE_DIVBYZERO | FE_OVERFLOW), 0) << name_of(c.isa) << ' ' << reproducer(c);
}

TEST(Conformance, WhatIsNotSeenRaisesNoFloatingPointException) {
  if (on_cuda()) GTEST_SKIP() << "the CPU's flags";
  for (const DType dtype : kDTypes) {
    for (const CpuIsa isa : available_isas()) {
      for (const std::vector<std::int32_t>& lens : std::vector<std::vector<std::int32_t>>{{700, 0}, {1}, {5, 256, 257}}) {
        for (const Policy& policy : {Policy::lean(), Policy::fixed_chunk(64)}) {
          expect_no_exception({.dtype = dtype, .lens = lens, .n_q = {2}, .causal = true, .policy = policy, .isa = isa}, Fill::kNan);
        }
      }
    }
  }
}

/// Short prompts with rules: scores that no row sees are not computed, and what scratch holds in their place is no operand.
TEST(Conformance, WhatScratchHoldsRaisesNoFloatingPointException) {
  if (on_cuda()) GTEST_SKIP() << "the CPU's flags";
  for (const DType dtype : kDTypes) {
    for (const CpuIsa isa : available_isas()) {
      for (const Fill scratch : {Fill::kZero, Fill::kInfinity}) {
        for (const Policy& policy : {Policy::lean(), Policy::fixed_chunk(256)}) {
          for (const float softcap : {0.0F, 3.0F}) {
            Case c{.dtype = dtype, .lens = {70, 200, 300}, .n_q = {70, 200, 70}, .causal = true, .policy = policy, .isa = isa};
            c.softcap = softcap;
            c.alibi = softcap == 0.0F;
            c.q_layout = "shd";
            expect_no_exception(c, scratch);
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace lean::support
