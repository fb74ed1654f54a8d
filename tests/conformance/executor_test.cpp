// Executors: what the library's own promise at the edges of a process, and what a call says of one that breaks its promise.
#include <gtest/gtest.h>
#include <pthread.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <fstream>
#include <stdexcept>
#include <string>
#include <thread>

#include "support/run_and_check.hpp"
#include "support/sanitized.hpp"
#include "support/tables.hpp"

namespace lean::support {
namespace {

using Body = void (*)(void* argument, std::int32_t worker);

/// A call of three outputs on two workers; the executor is the test's.
class SmallCall {
 public:
  explicit SmallCall(Executor executor, const Case& c = {.q_heads = 2, .kv_heads = 1, .head_dim = 16, .lens = {300, 300}})
      : executor_(executor), built_(c), workspace_(built_.problem(), options()) {}
  SmallCall(const SmallCall&) = delete;
  SmallCall& operator=(const SmallCall&) = delete;

  [[nodiscard]] Status decode() const { return lean::decode(built_.problem(), options(), workspace_.get()); }

 private:
  [[nodiscard]] Options options() const { return {.workers = 2, .executor = &executor_}; }

  Executor executor_;
  TestProblem built_;
  TestWorkspace workspace_;
};

TEST(ConformanceExecutor, AWorkerLeftOutOrRunTwiceIsTold) {
  if (on_cuda()) GTEST_SKIP() << "the CPU's alone";
  const auto all = [](void*, std::int32_t workers, Body body, void* argument) {
    for (std::int32_t w = 0; w < workers; ++w) body(argument, w);
  };
  const auto none = [](void*, std::int32_t, Body, void*) {};
  const auto but_one = [](void*, std::int32_t workers, Body body, void* argument) {
    for (std::int32_t w = 1; w < workers; ++w) body(argument, w);
  };
  const auto one_twice = [](void*, std::int32_t workers, Body body, void* argument) {
    for (std::int32_t w = -1; w < workers; ++w) body(argument, w < 0 ? 0 : w);
  };
  EXPECT_TRUE(SmallCall({.run = all, .worker_count = 2}).decode().ok());
  for (const auto run : {static_cast<decltype(Executor::run)>(none), static_cast<decltype(Executor::run)>(but_one),
                         static_cast<decltype(Executor::run)>(one_twice)}) {
    const Status status = SmallCall({.run = run, .worker_count = 2}).decode();
    EXPECT_EQ(status.code, StatusCode::kBackendError);
    EXPECT_NE(std::string(status.message).find("outputs written = "), std::string::npos) << status.message;
  }
}

/// New tokens of several row blocks are written ahead of the call, by an executor's first run of two.
TEST(ConformanceExecutor, AWorkerLeftOutOfTheFirstOfTwoRunsIsTold) {
  if (on_cuda()) GTEST_SKIP() << "the CPU's alone";
  Case c{.q_heads = 2, .kv_heads = 1, .head_dim = 16, .lens = {300, 300}, .n_q = {200}};
  c.causal = c.append = true;
  static int runs;
  static int leaves_out;  // in this run
  const auto run = [](void*, std::int32_t workers, Body body, void* argument) {
    ++runs;
    for (std::int32_t w = runs == leaves_out ? 1 : 0; w < workers; ++w) body(argument, w);
  };
  for (leaves_out = 0; leaves_out <= 2; ++leaves_out) {
    runs = 0;
    const Status status = SmallCall({.run = run, .worker_count = 2}, c).decode();
    EXPECT_EQ(runs, leaves_out == 1 ? 1 : 2);
    EXPECT_EQ(status.code, leaves_out == 0 ? StatusCode::kOk : StatusCode::kBackendError) << status.message;
    const char* const told = leaves_out == 1 ? "workers that wrote new tokens once = 1 of 2" : "outputs written = ";
    if (leaves_out == 0) continue;
    EXPECT_NE(std::string(status.message).find(told), std::string::npos) << status.message;
  }
}

TEST(ConformanceExecutor, WhatAnExecutorThrowsBecomesAStatus) {
  if (on_cuda()) GTEST_SKIP() << "the CPU's alone";
  const auto throws = [](void*, std::int32_t, Body, void*) { throw std::runtime_error("no thread"); };
  const Status status = SmallCall({.run = throws, .worker_count = 2}).decode();
  EXPECT_EQ(status.code, StatusCode::kBackendError);
  EXPECT_NE(std::string(status.message).find("options.executor"), std::string::npos) << status.message;
}

/// One call on the library's own executor, within the bound.
bool right_on_default_executor(std::int32_t workers) {
  Case c{.lens = {1511, 97, 613}, .workers = workers};
  c.executor = ExecutorKind::kDefault;
  return static_cast<bool>(run_and_check(c));
}

TEST(ConformanceExecutor, AChildOfForkComputesOnItsOwn) {
  if (on_cuda()) GTEST_SKIP() << "the CPU's alone";
  for (const std::int32_t parents : {0, 4}) ASSERT_TRUE(right_on_default_executor(parents));
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    alarm(60);  // a child that hangs is killed
    for (const std::int32_t workers : {0, 1, 4}) {
      if (!right_on_default_executor(workers)) _exit(1);
    }
    _exit(0);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << "status " << status;
}

/// exit() while another thread, which nobody joins, makes one call after the other.
[[noreturn]] void exit_during_a_call() {
  alarm(60);
  std::atomic<int>& calls = *new std::atomic<int>(0);
  std::thread([&calls] {
    while (true) {
      if (!right_on_default_executor(4)) std::_Exit(1);
      ++calls;
    }
  }).detach();
  while (calls < 3) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  std::exit(0);
}

TEST(ConformanceExecutorDeathTest, ExitDoesNotWaitForAThreadThatIsLeftBehind) {
  if (on_cuda()) GTEST_SKIP() << "the CPU's alone";
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  EXPECT_EXIT(exit_during_a_call(), testing::ExitedWithCode(0), "");
}

#if defined(__GLIBC__) && !defined(LEAN_TEST_SANITIZED)
/// A first call where a thread's stack finds no room. libgomp would print that, and end the process.
[[noreturn]] void compute_without_threads() {
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  pthread_attr_setstacksize(&attributes, std::size_t{1} << 30);
  pthread_setattr_default_np(&attributes);
  std::int64_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  const auto room = static_cast<rlim_t>(pages * sysconf(_SC_PAGESIZE) + (std::int64_t{1} << 28));
  const rlimit limit{room, room};
  setrlimit(RLIMIT_AS, &limit);
  std::_Exit(right_on_default_executor(4) ? 0 : 1);
}

TEST(ConformanceExecutorDeathTest, AMachineWithoutThreadsComputesOnTheCallers) {
  if (on_cuda()) GTEST_SKIP() << "the CPU's alone";
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  EXPECT_EXIT(compute_without_threads(), testing::ExitedWithCode(0), "");
}
#endif

}  // namespace
}  // namespace lean::support
