// ThreadAtomic: the arrival protocol's atomics (fixup/arrival.hpp) on CPU threads.
#pragma once

#include <atomic>
#include <thread>

#include "fixup/arrival.hpp"

namespace lean::cpu {

struct ThreadAtomic {
  using Counter = fixup::Counter;

  static Counter fetch_add_acq_rel(Counter& counter, Counter amount) noexcept {
    return std::atomic_ref<Counter>(counter).fetch_add(amount, std::memory_order_acq_rel);
  }
  static Counter load_acquire(Counter& counter) noexcept {
    return std::atomic_ref<Counter>(counter).load(std::memory_order_acquire);
  }
  static void store_release(Counter& counter, Counter value) noexcept {
    std::atomic_ref<Counter>(counter).store(value, std::memory_order_release);
  }
  static void store_relaxed(Counter& counter, Counter value) noexcept {
    std::atomic_ref<Counter>(counter).store(value, std::memory_order_relaxed);
  }
  static void relax() noexcept { std::this_thread::yield(); }
};

}  // namespace lean::cpu
