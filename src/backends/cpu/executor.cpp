// What both executors of the library share: whether a fork took the threads away, and how many the system still gives.
#include "backends/cpu/executor.hpp"

#include <pthread.h>

#include <atomic>
#include <exception>
#include <thread>
#include <vector>

namespace lean::cpu {
namespace {

std::atomic<bool> g_lost_its_threads = false;

}  // namespace

void note_threads() noexcept {
  [[maybe_unused]] static const int registered = pthread_atfork(nullptr, nullptr, [] { g_lost_its_threads = true; });
}

bool lost_its_threads() noexcept { return g_lost_its_threads.load(std::memory_order_relaxed); }

std::int32_t threads_to_be_had(std::int32_t wanted) noexcept {
  std::atomic<bool> released = false;
  std::vector<std::thread> threads;
  try {
    threads.reserve(static_cast<std::size_t>(wanted));
    while (static_cast<std::int32_t>(threads.size()) < wanted) threads.emplace_back([&released] { released.wait(false); });
  } catch (const std::exception&) {  // no memory, or no thread: so many there are
  }
  released = true;
  released.notify_all();
  for (std::thread& thread : threads) thread.join();
  return static_cast<std::int32_t>(threads.size());
}

}  // namespace lean::cpu
