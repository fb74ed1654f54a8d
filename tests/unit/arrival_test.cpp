// The arrival protocol on threads: whoever comes last, exactly one merges, sees everything and leaves nothing behind.
// Contributors write plain memory, so that ThreadSanitizer reports any order that is too weak. LEAN_WEAK_ORDER=relaxed,
// acquire, release or signal in the environment runs the same rounds with that order and must end in such a report.
#include "fixup/arrival.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "backends/cpu/thread_atomic.hpp"
#include "support/executors.hpp"
#include "support/random.hpp"
#include "support/reduced.hpp"

namespace lean::fixup {
namespace {

using cpu::ThreadAtomic;
using support::ExecutorKind;
using support::full_or_reduced;
using support::Stream;
using support::TestExecutor;

/// cpu::ThreadAtomic with the two orders that matter as parameters.
template <std::memory_order kCount, std::memory_order kSignal>
struct WeakAtomic : ThreadAtomic {
  static Counter fetch_add_acq_rel(Counter& counter, Counter amount) noexcept {
    return std::atomic_ref<Counter>(counter).fetch_add(amount, kCount);
  }
  static void store_release(Counter& counter, Counter value) noexcept { std::atomic_ref<Counter>(counter).store(value, kSignal); }
};

/// Runs body(place) for every place in [0, places), on the executor's threads.
template <typename TBody>
void run_on(const TestExecutor& executor, std::int32_t places, TBody body) {
  const auto call = [](void* opaque, std::int32_t place) { (*static_cast<TBody*>(opaque))(place); };
  executor.get()->run(executor.get()->context, places, call, &body);
}

/// A partial as plain memory. Merging is neither commutative nor associative: the order shows.
struct Plain {
  std::array<std::uint64_t, 4> words{};

  static Plain of(std::uint64_t key) {
    Plain p;
    for (std::size_t i = 0; i < p.words.size(); ++i) p.words[i] = support::mix(key + i);
    return p;
  }
  void take_in(const Plain& other) {
    for (std::size_t i = 0; i < words.size(); ++i) words[i] = 31 * words[i] + other.words[i];
  }
  friend bool operator==(const Plain&, const Plain&) = default;
};

/// One call's fix-up of one output, as the CPU backend does it, over memory that outlives the call.
struct Output {
  static constexpr std::size_t kSlots = 512;

  std::array<Plain, kSlots> slots;
  std::array<Plain, kSlots> bundle_slots;
  std::array<Counter, kSlots> counters{};
  std::array<Counter, kSlots> second_counters{};
  Plain result;
  std::int32_t merges = 0;

  [[nodiscard]] Plain merged(const std::array<Plain, kSlots>& from, std::int32_t begin, std::int32_t end, std::int32_t step) const {
    Plain whole = from[static_cast<std::size_t>(begin)];
    for (std::int32_t i = begin + step; i < end; i += step) whole.take_in(from[static_cast<std::size_t>(i)]);
    return whole;
  }

  template <typename TAtomic>
  void contribute(std::int32_t contributor, std::int32_t contributors, const Bundling& bundling, std::uint64_t key) {
    slots[static_cast<std::size_t>(contributor)] = Plain::of(key + static_cast<std::uint64_t>(contributor));
    const std::int32_t bundle = contributor / bundling.size;
    const std::int32_t begin = bundling.begin(bundle);
    const std::int32_t end = bundling.end(bundle, contributors);
    if (!arrive_last<TAtomic>(counters[static_cast<std::size_t>(begin)], end - begin)) return;
    Plain whole = merged(slots, begin, end, 1);
    if (bundling.bundles > 1) {
      bundle_slots[static_cast<std::size_t>(begin)] = whole;
      if (!arrive_last<TAtomic>(second_counters[0], bundling.bundles)) return;
      whole = merged(bundle_slots, 0, contributors, bundling.size);
    }
    result = whole;
    ++merges;
  }

  [[nodiscard]] static Plain expected(std::int32_t contributors, const Bundling& bundling, std::uint64_t key) {
    Plain whole;
    for (std::int32_t bundle = 0; bundle < bundling.bundles; ++bundle) {
      Plain part = Plain::of(key + static_cast<std::uint64_t>(bundling.begin(bundle)));
      for (std::int32_t c = bundling.begin(bundle) + 1; c < bundling.end(bundle, contributors); ++c) {
        part.take_in(Plain::of(key + static_cast<std::uint64_t>(c)));
      }
      if (bundle == 0) {
        whole = part;
      } else {
        whole.take_in(part);
      }
    }
    return whole;
  }

  [[nodiscard]] bool counters_are_zero() const {
    const auto zero = [](Counter c) { return c == 0; };
    return std::all_of(counters.begin(), counters.end(), zero) && std::all_of(second_counters.begin(), second_counters.end(), zero);
  }
};

std::vector<std::int32_t> shuffled(std::int32_t count, Stream& random) {
  std::vector<std::int32_t> order(static_cast<std::size_t>(count));
  std::iota(order.begin(), order.end(), 0);
  for (std::size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[static_cast<std::size_t>(random.bits() % i)]);
  return order;
}

/// Nothing half of the time, else up to some microseconds or a few turns for the other threads.
void delay(std::uint64_t key) {
  const std::int64_t turns = support::pick(key, 8) - 4;
  for (std::int64_t i = 0; i < turns; ++i) std::this_thread::yield();
  std::uint64_t spin = key;
  for (std::int64_t i = support::pick(key + 1, 400) - 200; i > 0; --i) spin = support::mix(spin);
  if (spin == 0) std::this_thread::yield();
}

/// One round: contributors start in an order drawn from the seed and are held up before they store.
template <typename TAtomic>
void run_round(const TestExecutor& executor, Output& output, std::int32_t contributors, std::uint64_t seed) {
  Stream random(seed);
  const std::vector<std::int32_t> order = shuffled(contributors, random);
  const Bundling bundling = bundling_of(contributors);
  const std::uint64_t key = random.bits();
  output.merges = 0;
  run_on(executor, contributors, [&](std::int32_t place) {
    delay(key ^ static_cast<std::uint64_t>(place));
    output.contribute<TAtomic>(order[static_cast<std::size_t>(place)], contributors, bundling, key);
  });
  ASSERT_EQ(output.merges, 1) << "contributors " << contributors << ", seed " << seed;
  ASSERT_EQ(output.result, Output::expected(contributors, bundling, key)) << "contributors " << contributors << ", seed " << seed;
  ASSERT_TRUE(output.counters_are_zero()) << "contributors " << contributors << ", seed " << seed;
}

template <typename TAtomic>
void run_rounds(std::int32_t threads, std::int32_t low, std::int32_t high, std::uint64_t rounds) {
  const TestExecutor executor(ExecutorKind::kPool, threads);
  const auto output = std::make_unique<Output>();  // one memory for all rounds: nothing is cleared between calls
  for (std::uint64_t seed = 1; seed <= rounds && !testing::Test::HasFatalFailure(); ++seed) {
    Stream random(seed);
    run_round<TAtomic>(executor, *output, static_cast<std::int32_t>(random.between(low, high)), seed);
  }
}

TEST(Arrival, R41_ExactlyOneIsLastAndSeesEveryPartialForAnyStartOrderAndDelay) {
  run_rounds<ThreadAtomic>(4, 1, 12, full_or_reduced(10'000U, 1'500U));
}

TEST(Arrival, R41_TwoLevelsMergeInIndexOrderForAnyStartOrderAndDelay) {
  run_rounds<ThreadAtomic>(4, kMaxOneLevel + 1, 200, full_or_reduced(2'000U, 150U));
}

TEST(Arrival, R40_CompletesWithFewerThreadsThanContributors) {
  for (const std::int32_t threads : {1, 2, 3, 7}) run_rounds<ThreadAtomic>(threads, 1, 64, full_or_reduced(500U, 50U));
}

TEST(Arrival, R42_AWeakOrderIsFoundByThreadSanitizer) {
  const char* order = std::getenv("LEAN_WEAK_ORDER");
  if (order == nullptr) GTEST_SKIP() << "set LEAN_WEAK_ORDER=relaxed, acquire, release or signal in a ThreadSanitizer build";
  const std::string name = order;
  constexpr auto kRelease = std::memory_order_release;
  if (name == "relaxed") return run_rounds<WeakAtomic<std::memory_order_relaxed, kRelease>>(4, 2, 8, 2'000);
  if (name == "acquire") return run_rounds<WeakAtomic<std::memory_order_acquire, kRelease>>(4, 2, 8, 2'000);
  if (name == "release") return run_rounds<WeakAtomic<kRelease, kRelease>>(4, 2, 8, 2'000);
  FAIL() << "unknown order " << name;
}

// ---- every interleaving -----------------------------------------------------------------------------------------------

struct SequentialAtomic {
  static Counter fetch_add_acq_rel(Counter& counter, Counter amount) noexcept { return (counter += amount) - amount; }
  static void store_relaxed(Counter& counter, Counter value) noexcept { counter = value; }
};

/// The protocol step by step: workers are admitted in `admission` order as places fall free, and any running one may
/// take the next step.
class Interleavings {
 public:
  Interleavings(std::int32_t running_at_once, const Bundling& bundling) : running_at_once_(running_at_once), bundling_(bundling) {}

  /// How many interleavings there are; each ends with one ordered merge and counters at 0.
  std::int64_t explore(const std::vector<std::int32_t>& admission) {
    admission_ = admission;
    endings_ = 0;
    State start;
    start.steps.assign(admission.size(), 0);
    start.slots.resize(admission.size());
    start.bundle_slots.resize(admission.size());
    start.counters.assign(admission.size(), 0);
    continue_from(start);
    return endings_;
  }

 private:
  static constexpr int kDone = 99;

  struct State {
    std::vector<int> steps;          // next step of each contributor
    std::vector<std::string> slots;  // which contributors a partial stands for, in order
    std::vector<std::string> bundle_slots;
    std::vector<Counter> counters;
    Counter second_counter = 0;
    std::vector<std::string> results;
  };

  void continue_from(const State& state) {
    std::int32_t running = 0;
    bool moved = false;
    for (const std::int32_t contributor : admission_) {
      if (state.steps[static_cast<std::size_t>(contributor)] == kDone) continue;
      if (++running > running_at_once_) break;
      State next = state;
      step(next, contributor);
      continue_from(next);
      moved = true;
    }
    if (!moved) check_ending(state);
  }

  void step(State& state, std::int32_t contributor) const {
    const auto own = static_cast<std::size_t>(contributor);
    const auto contributors = static_cast<std::int32_t>(state.slots.size());
    const std::int32_t bundle = contributor / bundling_.size;
    const auto begin = static_cast<std::size_t>(bundling_.begin(bundle));
    const auto end = static_cast<std::size_t>(bundling_.end(bundle, contributors));
    int& next = state.steps[own];
    switch (next++) {
      case 0: state.slots[own] = static_cast<char>('a' + contributor); return;
      case 1:
        if (!arrive_last<SequentialAtomic>(state.counters[begin], static_cast<std::int32_t>(end - begin))) next = kDone;
        return;
      case 2: {
        std::string whole;
        for (std::size_t c = begin; c < end; ++c) whole += state.slots[c];
        state.bundle_slots[begin] = whole;
        if (bundling_.bundles > 1) return;
        break;
      }
      case 3:
        if (!arrive_last<SequentialAtomic>(state.second_counter, bundling_.bundles)) next = kDone;
        return;
      default: break;
    }
    std::string whole;
    for (const std::string& part : state.bundle_slots) whole += part;
    state.results.push_back(whole);
    next = kDone;
  }

  void check_ending(const State& state) {
    ++endings_;
    std::string in_order;
    for (std::size_t c = 0; c < state.slots.size(); ++c) in_order += static_cast<char>('a' + static_cast<int>(c));
    EXPECT_EQ(state.results, std::vector<std::string>{in_order});
    EXPECT_TRUE(std::all_of(state.counters.begin(), state.counters.end(), [](Counter c) { return c == 0; }));
    EXPECT_EQ(state.second_counter, 0U);
  }

  std::int32_t running_at_once_;
  Bundling bundling_;
  std::vector<std::int32_t> admission_;
  std::int64_t endings_ = 0;
};

TEST(Arrival, R40_EveryAdmissionOrderAndInterleavingOfFewContributorsEndsInOneOrderedMerge) {
  std::int64_t endings = 0;
  for (std::int32_t contributors = 1; contributors <= full_or_reduced(5, 4); ++contributors) {
    for (const std::int32_t size : {contributors, 2}) {
      if (contributors == 5 && size == 2) continue;  // 4 shows two levels; 5 would be 10^7 interleavings
      const Bundling bundling{.size = size, .bundles = (contributors + size - 1) / size};
      for (std::int32_t running = 1; running <= (contributors == 5 ? 2 : contributors); ++running) {
        std::vector<std::int32_t> admission(static_cast<std::size_t>(contributors));
        std::iota(admission.begin(), admission.end(), 0);
        do {
          endings += Interleavings(running, bundling).explore(admission);
        } while (running < contributors && std::next_permutation(admission.begin(), admission.end()));
      }
    }
  }
  EXPECT_GT(endings, full_or_reduced(100'000, 10'000));
}

// ---- the paper's signal and wait --------------------------------------------------------------------------------------

/// The host takes in its peers in order, as they signal; flags are used again by the next round.
template <typename TAtomic>
void run_host_rounds(std::uint64_t rounds) {
  constexpr std::int32_t kPeers = 4;  // as many as threads: every peer runs
  const TestExecutor executor(ExecutorKind::kPool, kPeers);
  std::array<Plain, kPeers> slots;
  std::array<Counter, kPeers> flags{};
  for (std::uint64_t seed = 1; seed <= rounds; ++seed) {
    const std::uint64_t key = support::mix(seed);
    Plain whole;
    run_on(executor, kPeers, [&](std::int32_t contributor) {
      delay(key ^ static_cast<std::uint64_t>(contributor));
      const Plain own = Plain::of(key + static_cast<std::uint64_t>(contributor));
      if (contributor != 0) {
        slots[static_cast<std::size_t>(contributor)] = own;
        signal<TAtomic>(flags[static_cast<std::size_t>(contributor)]);
        return;
      }
      whole = own;
      for (std::size_t c = 1; c < kPeers; ++c) {
        wait_for<TAtomic>(flags[c]);
        whole.take_in(slots[c]);
      }
    });
    ASSERT_EQ(whole, Output::expected(kPeers, {.size = kPeers, .bundles = 1}, key)) << "seed " << seed;
    ASSERT_EQ(flags, (std::array<Counter, kPeers>{})) << "seed " << seed;
  }
}

TEST(Arrival, R41_TheHostSeesEveryPeersPartialAndLowersItsFlag) { run_host_rounds<ThreadAtomic>(full_or_reduced(10'000U, 1'500U)); }

TEST(Arrival, R42_AWeakSignalIsFoundByThreadSanitizer) {
  const char* order = std::getenv("LEAN_WEAK_ORDER");
  if (order == nullptr || std::string(order) != "signal") GTEST_SKIP() << "set LEAN_WEAK_ORDER=signal in a ThreadSanitizer build";
  run_host_rounds<WeakAtomic<std::memory_order_acq_rel, std::memory_order_relaxed>>(2'000);
}

// ---- bundles -----------------------------------------------------------------------------------------------------------

TEST(Bundling, EveryContributorIsInExactlyOneBundle) {
  for (std::int32_t contributors = 1; contributors <= 5000; ++contributors) {
    const Bundling bundling = bundling_of(contributors);
    ASSERT_EQ(bundling.begin(0), 0);
    for (std::int32_t bundle = 0; bundle < bundling.bundles; ++bundle) {
      const std::int32_t end = bundling.end(bundle, contributors);
      ASSERT_LT(bundling.begin(bundle), end) << contributors;  // nobody would arrive in an empty bundle
      ASSERT_EQ(end, bundle + 1 < bundling.bundles ? bundling.begin(bundle + 1) : contributors) << contributors;
    }
  }
}

TEST(Bundling, TwoLevelsOnlyAboveTheLimitAndBothAboutTheSquareRoot) {
  for (std::int32_t contributors = 1; contributors <= 5000; ++contributors) {
    const Bundling bundling = bundling_of(contributors);
    ASSERT_EQ(bundling.bundles == 1, contributors <= kMaxOneLevel) << contributors;
    if (bundling.bundles == 1) continue;
    ASSERT_GE(bundling.size * bundling.size, contributors);
    ASSERT_LT((bundling.size - 1) * (bundling.size - 1), contributors);
    ASSERT_LE(bundling.bundles, bundling.size);
  }
}

}  // namespace
}  // namespace lean::fixup
