// Executors that a test can steer: which worker starts when, on which thread, after which delay. All but the default
// are made of std::thread, which TSan understands.
//   kPool: each thread takes its workers in descending order, as Fixup::kHostBlock wants it.
//   kPermuted: threads take workers in an order drawn anew for every call.    kDelayed: kPool, with random delays.
//   kAscending, kDescending: one after the other on the calling thread.       kDefault: the library's own.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

#include "lean/options.hpp"
#include "support/case.hpp"
#include "support/random.hpp"

namespace lean::support {

class TestExecutor {
 public:
  explicit TestExecutor(ExecutorKind kind, std::int32_t threads = 4, std::uint64_t seed = 1);
  ~TestExecutor();
  TestExecutor(const TestExecutor&) = delete;
  TestExecutor& operator=(const TestExecutor&) = delete;

  [[nodiscard]] const Executor* get() const { return kind_ == ExecutorKind::kDefault ? nullptr : &executor_; }

 private:
  struct Call {
    std::int32_t worker_count = 0;
    void (*body)(void* argument, std::int32_t worker) = nullptr;
    void* argument = nullptr;
  };

  static void run(void* context, std::int32_t worker_count, void (*body)(void* argument, std::int32_t worker), void* argument);
  void run_call(const Call& call);
  void serve(std::int32_t thread);
  void run_share(const Call& call, std::int32_t thread);
  void shuffle(std::int32_t worker_count);
  void delay(std::int32_t worker) const;

  ExecutorKind kind_;
  Stream random_;
  Executor executor_;
  std::uint64_t call_key_ = 0;         // delays of the current call
  std::vector<std::int32_t> order_;    // kPermuted: workers in the order they start
  std::atomic<std::int32_t> next_{0};  // kPermuted: place in order_

  std::mutex mutex_;
  std::condition_variable wake_, done_;
  Call call_;
  std::uint64_t calls_ = 0;
  std::int32_t busy_ = 0;
  bool stop_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace lean::support
