// A call allocates nothing: operator new counts, on every thread of this program, and malloc, for what the OpenMP runtime takes.
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <new>

#include "support/random.hpp"
#include "support/reduced.hpp"
#include "support/run_and_check.hpp"
#include "support/sanitized.hpp"
#include "support/tables.hpp"

#if defined(__GLIBC__) && !defined(LEAN_TEST_SANITIZED)
#define LEAN_TEST_COUNTS_MALLOC
#endif

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

#ifdef LEAN_TEST_COUNTS_MALLOC
extern "C" {
void* __libc_malloc(std::size_t bytes);
void* __libc_memalign(std::size_t alignment, std::size_t bytes);
void* malloc(std::size_t bytes) noexcept {
  ++allocations;
  return __libc_malloc(bytes);
}
void* memalign(std::size_t alignment, std::size_t bytes) noexcept {  // libgomp takes its teams from here
  ++allocations;
  return __libc_memalign(alignment, bytes);
}
}
#endif

namespace lean::support {
namespace {

// A plan has as many workers as the lengths are worth; the threads of a caller stay the same.
TEST(Conformance, CallsOfManyLengthsAllocateNothing) {
  if (on_cuda()) GTEST_SKIP() << "the CUDA runtime's allocations are its own";
  const Case c{.q_heads = 2, .kv_heads = 1, .head_dim = 64, .lens = {4096}};
  TestProblem built(c);
  Problem problem = built.problem();
  std::int32_t length = 4096;
  problem.kv_lengths = &length;
  for (const std::int32_t workers : {0, 4}) {
    const Options options{.workers = workers};
    const TestWorkspace workspace(problem, options);
    ASSERT_TRUE(decode(problem, options, workspace.get()).ok());
    Stream random(1);
    const long before = allocations;
    int failures = 0;
    for (int call = 0; call < full_or_reduced(400, 40); ++call) {
      length = static_cast<std::int32_t>(random.between(1, 4096));
      failures += decode(problem, options, workspace.get()).ok() ? 0 : 1;
    }
    EXPECT_EQ(allocations - before, 0) << "options.workers = " << workers;
    EXPECT_EQ(failures, 0);
  }
}

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
