// ThreadAtomic: the arrival protocol's atomics (fixup/arrival.hpp) on CPU threads; ThreadSystem: those of an exchange
// (fixup/exchange.hpp), with threads as ranks.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>

#include "fixup/arrival.hpp"
#include "fixup/exchange.hpp"

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

struct ThreadSystem {
  using Epoch = fixup::Epoch;

  static Epoch load_acquire(Epoch& word) noexcept { return std::atomic_ref<Epoch>(word).load(std::memory_order_acquire); }
  static void store_release(Epoch& word, Epoch epoch) noexcept {
    std::atomic_ref<Epoch>(word).store(epoch, std::memory_order_release);
  }
  /// Puts the value in where there is 0.
  static void set_first(std::uint32_t& word, std::uint32_t value) noexcept {
    std::uint32_t none = 0;
    std::atomic_ref<std::uint32_t>(word).compare_exchange_strong(none, value, std::memory_order_relaxed);
  }
  static std::int64_t now_ns() noexcept {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
  }
  static void relax() noexcept { std::this_thread::yield(); }
};

}  // namespace lean::cpu
