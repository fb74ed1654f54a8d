// A call allocates nothing: operator new counts, on every thread of this program.
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <new>

#include "support/run_and_check.hpp"
#include "support/tables.hpp"

namespace {
std::atomic<long> allocations{0};

void* counted(std::size_t bytes) {
  ++allocations;
  void* memory = std::malloc(bytes > 0 ? bytes : 1);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
}  // namespace

// Inlined, g++ would see free() called on what new returned, and warn.
[[gnu::noinline]] void* operator new(std::size_t bytes) { return counted(bytes); }
[[gnu::noinline]] void* operator new[](std::size_t bytes) { return counted(bytes); }
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete[](void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete[](void* memory, std::size_t) noexcept { std::free(memory); }

namespace lean::support {
namespace {

TEST(Conformance, ACallAllocatesNothing) {
  if (on_cuda()) GTEST_SKIP() << "the CUDA runtime's allocations are its own";
  for (const Policy& policy : all_policies()) {
    for (const Fixup fixup : kFixups) {
      if (!pairs(policy, fixup)) continue;
      const Case c{.lens = {1511, 0, 97}, .n_q = {2}, .k_layout = "bshd~inner2", .policy = policy, .fixup = fixup, .workers = 40};
      const TestExecutor executor(c.executor);
      const Options options = options_of(c, executor);
      TestProblem built(c);
      const TestWorkspace workspace(built.problem(), options);
      const long before = allocations;
      const Status supported = supports(built.problem(), options);
      const WorkspaceSize size = workspace_size(built.problem(), options);
      const Status status = decode(built.problem(), options, workspace.get());
      EXPECT_EQ(allocations - before, 0) << reproducer(c);
      EXPECT_TRUE(supported.ok() && size.status.ok() && status.ok());
    }
  }
  EXPECT_GT(allocations, 0);
}

}  // namespace
}  // namespace lean::support
