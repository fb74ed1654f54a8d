// default_executor() on std::thread: a pool made at first use, whose threads end at exit. One call at a time uses it; calls from
// several host threads take turns.
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "backends/cpu/executor.hpp"

namespace lean {
namespace {

class ThreadPool {
 public:
  ThreadPool() {
    cpu::note_threads();
    const auto wanted = static_cast<std::int32_t>(std::thread::hardware_concurrency()) - 1;
    const std::int32_t threads = wanted > 0 ? cpu::threads_to_be_had(wanted) : 0;
    for (std::int32_t i = 1; i <= threads; ++i) threads_.emplace_back([this, i, threads] { serve(i, threads + 1); });
  }
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  void run(std::int32_t worker_count, void (*body)(void*, std::int32_t), void* argument) {
    if (cpu::lost_its_threads()) return cpu::run_alone(worker_count, body, argument);
    std::unique_lock turn(one_call_);
    if (stopping_) {
      turn.unlock();
      return cpu::run_alone(worker_count, body, argument);
    }
    {
      const std::lock_guard lock(mutex_);
      job_ = {worker_count, body, argument};
      busy_ = static_cast<std::int32_t>(threads_.size());
      ++generation_;
    }
    wake_.notify_all();
    job_.run_share(0, thread_count());
    std::unique_lock lock(mutex_);
    done_.wait(lock, [this] { return busy_ == 0; });
  }

  /// Ends the threads, after the call that they are in. The pool stays: calls of threads that outlive main() run on those alone.
  void stop() {
    stopping_ = true;
    const std::lock_guard turn(one_call_);
    {
      const std::lock_guard lock(mutex_);
      ending_ = true;
    }
    wake_.notify_all();
    for (std::thread& thread : threads_) thread.join();
    threads_.clear();
  }

  [[nodiscard]] std::int32_t thread_count() const noexcept { return static_cast<std::int32_t>(threads_.size()) + 1; }

 private:
  struct Job {
    std::int32_t worker_count = 0;
    void (*body)(void*, std::int32_t) = nullptr;
    void* argument = nullptr;

    /// Highest worker first, as Fixup::kHostBlock needs.
    void run_share(std::int32_t thread, std::int32_t threads) const {
      for (std::int32_t w = worker_count - 1 - thread; w >= 0; w -= threads) body(argument, w);
    }
  };

  void serve(std::int32_t thread, std::int32_t threads) {
    std::uint64_t seen = 0;
    while (true) {
      Job job;
      {
        std::unique_lock lock(mutex_);
        wake_.wait(lock, [&] { return ending_ || generation_ != seen; });
        if (ending_) return;
        seen = generation_;
        job = job_;
      }
      job.run_share(thread, threads);
      const std::lock_guard lock(mutex_);
      if (--busy_ == 0) done_.notify_one();
    }
  }

  std::mutex one_call_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::condition_variable done_;
  std::vector<std::thread> threads_;
  Job job_;
  std::uint64_t generation_ = 0;
  std::int32_t busy_ = 0;
  bool ending_ = false;
  std::atomic<bool> stopping_ = false;  // before the calls that wait for their turn get it
};

/// Never destroyed: a thread that main() leaves behind may be in a call, or begin one.
ThreadPool& pool() {
  struct StopAtExit {
    ThreadPool& pool;
    ~StopAtExit() {
      if (!cpu::lost_its_threads()) pool.stop();
    }
  };
  static ThreadPool& instance = *new ThreadPool;
  static const StopAtExit stop{instance};
  return instance;
}

void run_on_pool(void*, std::int32_t worker_count, void (*body)(void*, std::int32_t), void* argument) {
  pool().run(worker_count, body, argument);
}

}  // namespace

const Executor& default_executor() noexcept {
  static const Executor executor{.run = run_on_pool, .worker_count = pool().thread_count(), .descending_or_concurrent = true};
  return executor;
}

}  // namespace lean
