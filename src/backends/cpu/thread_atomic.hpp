// ThreadAtomic: the atomics of arrivals (fixup/arrival.hpp) and of sticky faults (fixup/sticky.hpp) on CPU threads; ThreadSystem: those of an exchange
// (fixup/exchange.hpp), with threads as ranks.
#pragma once

#include <atomic>
#include <bit>
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
  static Counter fetch_add_relaxed(Counter& counter, Counter amount) noexcept {
    return std::atomic_ref<Counter>(counter).fetch_add(amount, std::memory_order_relaxed);
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
  static Counter load_relaxed(Counter& counter) noexcept {
    return std::atomic_ref<Counter>(counter).load(std::memory_order_relaxed);
  }
  static bool replace_relaxed(Counter& counter, Counter expected, Counter value) noexcept {
    return std::atomic_ref<Counter>(counter).compare_exchange_strong(expected, value, std::memory_order_relaxed);
  }
  static void relax() noexcept { std::this_thread::yield(); }
};

struct ThreadSystem {
  /// Stored and loaded as one number.
  struct Word {
    std::uint32_t data = 0;
    fixup::Epoch epoch = 0;
  };

  static Word load(std::uint64_t& from) noexcept {
    return std::bit_cast<Word>(std::atomic_ref<std::uint64_t>(from).load(std::memory_order_relaxed));
  }
  static void store(std::uint64_t& to, const Word& word) noexcept {
    std::atomic_ref<std::uint64_t>(to).store(std::bit_cast<std::uint64_t>(word), std::memory_order_relaxed);
  }
  static std::int64_t now_ns() noexcept {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
  }
  static void relax() noexcept { std::this_thread::yield(); }
};

}  // namespace lean::cpu
