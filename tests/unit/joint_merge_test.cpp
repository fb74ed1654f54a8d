// The joint merge on threads and in every order of its steps: each piece of a merge is somebody's, once, whoever stays and for how
// long; who merges sees every partial, and the counter ends at 0. Contributors write plain memory, for ThreadSanitizer.
#include "fixup/joint_merge.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <set>
#include <vector>

#include "backends/cpu/thread_atomic.hpp"
#include "support/executors.hpp"
#include "support/random.hpp"
#include "support/reduced.hpp"

namespace lean::fixup {
namespace {

using cpu::ThreadAtomic;
using support::full_or_reduced;
using support::Stream;

constexpr std::int32_t kPieces = 16;

TEST(MergeShare, SharersHaveEveryPieceOnceInOrder) {
  for (std::int32_t sharers = 1; sharers <= kMaxOneLevel; ++sharers) {
    for (std::int32_t pieces = 0; pieces <= 40; ++pieces) {
      std::int32_t next = 0;
      for (std::int32_t rank = 0; rank < sharers; ++rank) {
        const MergeShare share{rank, sharers};
        ASSERT_EQ(share.begin(pieces), next) << rank << " of " << sharers << ", " << pieces;
        next = share.end(pieces);
      }
      ASSERT_EQ(next, pieces) << sharers;
    }
  }
}

/// The three numbers keep apart at their largest.
TEST(JointMerge, R41_TheCounterHoldsTheMostContributors) {
  const auto most = static_cast<Counter>(Attendance::kMost);
  const Attendance full((2 * most - 1) * Attendance::kArrival + most * Attendance::kLeave + (most - 1) * Attendance::kThrough);
  EXPECT_EQ(full.arrived(), 2 * Attendance::kMost - 1);
  EXPECT_EQ(full.left(), Attendance::kMost);
  EXPECT_EQ(full.through(), Attendance::kMost - 1);
  Counter counter = 0;
  for (std::int32_t contributor = 0; contributor < Attendance::kMost; ++contributor) {
    const MergeShare share = join_merge<ThreadAtomic>(counter, Attendance::kMost, contributor, false, [] { return false; });
    ASSERT_EQ(share.sharers, contributor + 1 == Attendance::kMost ? 1 : 0) << contributor;
  }
}

// ---- threads ------------------------------------------------------------------------------------------------------------

/// One output of a call, over memory that outlives it, as kernels of many rows merge it, at one level or in bundles; or `at_once`, as a
/// decode step does, at one level whatever their number.
struct Output {
  static constexpr std::size_t kSlots = 256;

  std::array<std::uint64_t, kSlots> slots{};
  std::array<std::array<std::uint64_t, kPieces>, kSlots> bundle_slots{};
  std::array<Counter, kSlots> counters{};
  Counter second_counter = 0;
  std::array<std::uint64_t, kPieces> result{};
  std::array<std::int32_t, kPieces> merges{};

  static std::uint64_t take_in(std::uint64_t whole, std::uint64_t part) { return 31 * whole + part; }

  [[nodiscard]] static Bundling bundled(std::int32_t contributors, bool at_once) {
    return at_once ? Bundling{.size = contributors, .bundles = 1} : bundling_of(contributors);
  }

  /// `stays`: has nothing else to do; then it waits for so many looks at the counter.
  void contribute(std::int32_t contributor, std::int32_t contributors, bool at_once, bool stays, std::int64_t looks,
                  std::uint64_t key) {
    slots[static_cast<std::size_t>(contributor)] = support::mix(key + static_cast<std::uint64_t>(contributor));
    const Bundling bundling = bundled(contributors, at_once);
    const std::int32_t bundle = contributor / bundling.size;
    const std::int32_t begin = bundling.begin(bundle);
    const std::int32_t end = bundling.end(bundle, contributors);
    Counter& counter = counters[static_cast<std::size_t>(begin)];
    const auto patient = [&looks] { return looks-- > 0; };
    const MergeShare share = join_merge<ThreadAtomic>(counter, end - begin, contributor - begin, stays, patient);
    if (share.sharers == 0) return;
    const bool whole = bundling.bundles == 1;
    const Counter early = whole ? leave_last_merge<ThreadAtomic>(counter, share) : 0;
    for (std::int32_t piece = share.begin(kPieces); piece < share.end(kPieces); ++piece) {
      std::uint64_t sum = 0;
      for (std::int32_t c = begin; c < end; ++c) {
        sum = take_in(sum, slots[static_cast<std::size_t>(c)] + static_cast<std::uint64_t>(piece));
      }
      if (!whole) bundle_slots[static_cast<std::size_t>(bundle)][static_cast<std::size_t>(piece)] = sum;
      if (whole) write(piece, sum);
    }
    if (!is_last(whole ? early : leave_merge<ThreadAtomic>(counter, share), share)) return;
    ThreadAtomic::store_relaxed(counter, 0);
    if (whole) return;
    const MergeShare of_bundles = join_merge<ThreadAtomic>(second_counter, bundling.bundles, bundle, stays, patient);
    if (of_bundles.sharers == 0) return;
    if (is_last(leave_last_merge<ThreadAtomic>(second_counter, of_bundles), of_bundles)) {
      ThreadAtomic::store_relaxed(second_counter, 0);
    }
    for (std::int32_t piece = of_bundles.begin(kPieces); piece < of_bundles.end(kPieces); ++piece) {
      std::uint64_t sum = 0;
      for (std::int32_t b = 0; b < bundling.bundles; ++b) {
        sum = take_in(sum, bundle_slots[static_cast<std::size_t>(b)][static_cast<std::size_t>(piece)]);
      }
      write(piece, sum);
    }
  }

  void write(std::int32_t piece, std::uint64_t sum) {
    result[static_cast<std::size_t>(piece)] = sum;
    ++merges[static_cast<std::size_t>(piece)];
  }

  [[nodiscard]] static std::uint64_t expected(std::int32_t contributors, bool at_once, std::int32_t piece, std::uint64_t key) {
    const Bundling bundling = bundled(contributors, at_once);
    std::uint64_t whole = 0;
    for (std::int32_t b = 0; b < bundling.bundles; ++b) {
      std::uint64_t sum = 0;
      for (std::int32_t c = bundling.begin(b); c < bundling.end(b, contributors); ++c) {
        sum = take_in(sum, support::mix(key + static_cast<std::uint64_t>(c)) + static_cast<std::uint64_t>(piece));
      }
      whole = bundling.bundles == 1 ? sum : take_in(whole, sum);
    }
    return whole;
  }
};

/// One call: who stays, and how patient each is, is drawn from the seed; with fewer threads than contributors too.
void run_call(const support::TestExecutor& executor, Output& output, std::int32_t contributors, bool at_once, std::uint64_t seed) {
  Stream random(seed);
  const std::uint64_t key = random.bits();
  const auto staying = static_cast<std::uint64_t>(random.between(0, 8));  // of 8
  output.merges = {};
  struct Job {
    Output& output;
    std::int32_t contributors;
    bool at_once;
    std::uint64_t key;
    std::uint64_t staying;
  } job{output, contributors, at_once, key, staying};
  const auto body = [](void* opaque, std::int32_t place) {
    const auto& call = *static_cast<Job*>(opaque);
    const std::uint64_t own = support::mix(call.key ^ static_cast<std::uint64_t>(place) << 32);
    call.output.contribute(place, call.contributors, call.at_once, own % 8 < call.staying, support::pick(own, 50), call.key);
  };
  executor.get()->run(executor.get()->context, contributors, body, &job);
  for (std::int32_t piece = 0; piece < kPieces; ++piece) {
    ASSERT_EQ(output.merges[static_cast<std::size_t>(piece)], 1) << contributors << " contributors, seed " << seed;
    ASSERT_EQ(output.result[static_cast<std::size_t>(piece)], Output::expected(contributors, at_once, piece, key)) << seed;
  }
  ASSERT_TRUE(std::all_of(output.counters.begin(), output.counters.end(), [](Counter c) { return c == 0; })) << seed;
  ASSERT_EQ(output.second_counter, 0U) << seed;
}

TEST(JointMerge, R41_EveryPieceIsMergedOnceAndInOrderWhoeverStays) {
  const auto output = std::make_unique<Output>();
  for (const std::int32_t threads : {1, 2, 4, 7}) {
    const support::TestExecutor executor(support::ExecutorKind::kPool, threads);
    for (std::uint64_t seed = 1; seed <= full_or_reduced(3'000U, 300U) && !testing::Test::HasFatalFailure(); ++seed) {
      Stream random(seed);
      const bool many = random.between(0, 9) == 0;
      const auto contributors = static_cast<std::int32_t>(many ? random.between(kMaxOneLevel + 1, 150) : random.between(2, 12));
      run_call(executor, *output, contributors, random.chance(50), seed);
    }
  }
}

// ---- every interleaving of the counter's operations ---------------------------------------------------------------------

/// An atomic for the real join_merge() one operation at a time: it is run from its start, is told what its earlier operations gave,
/// carries out one more, and stops at the next.
struct Replay {
  struct Stop {};
  static inline std::vector<Counter> given;  // by the operations so far
  static inline std::size_t next = 0;
  static inline bool may_act = false;

  static Counter fetch_add_acq_rel(Counter& counter, Counter amount) {
    if (next < given.size()) return given[next++];
    act(counter);
    counter += amount;
    return given.back();
  }
  static Counter load_acquire(Counter& counter) {
    if (next < given.size()) return given[next++];
    act(counter);
    return counter;
  }
  static bool replace_relaxed(Counter& counter, Counter expected, Counter value) {
    if (next < given.size()) return given[next++] != 0;
    const bool equal = counter == expected;
    act(equal ? 1 : 0);
    if (equal) counter = value;
    return equal;
  }
  static void relax() {}

 private:
  static void act(Counter gives) {
    if (!may_act) throw Stop{};
    may_act = false;
    given.push_back(gives);
    ++next;
  }
};

class Interleavings {
 public:
  /// `staying`: a bit for each contributor; who stays looks at the counter so often before it leaves.
  Interleavings(std::int32_t parts, std::uint32_t staying, std::int32_t looks) : parts_(parts), staying_(staying), looks_(looks) {}

  /// How many endings there are. None may be wrong.
  std::size_t explore() {
    continue_from(State{.contributors = std::vector<Contributor>(static_cast<std::size_t>(parts_))});
    return endings_.size();
  }

 private:
  struct Contributor {
    std::vector<Counter> given;
    MergeShare share;
    bool joined = false;
    bool done = false;
  };
  struct State {
    Counter counter = 0;
    std::vector<Contributor> contributors;
    std::int32_t resets = 0;
  };

  void continue_from(const State& state) {
    std::vector<Counter> key{state.counter, static_cast<Counter>(state.resets)};
    for (const Contributor& c : state.contributors) {
      key.insert(key.end(), c.given.begin(), c.given.end());
      key.insert(key.end(), {Counter{0xFFFF'FFFFU} - (c.done ? 1U : 0U)});
    }
    if (!seen_.insert(key).second || testing::Test::HasFatalFailure()) return;
    bool moved = false;
    for (std::size_t i = 0; i < state.contributors.size(); ++i) {
      if (state.contributors[i].done) continue;
      State next = state;
      step(next, i);
      continue_from(next);
      moved = true;
    }
    if (moved) return;
    endings_.insert(key);
    check(state);
  }

  void step(State& state, std::size_t i) const {
    Contributor& own = state.contributors[i];
    if (own.joined) {
      own.done = true;
      if (own.share.sharers == 0) return;
      const Counter left = leave_merge<ThreadAtomic>(state.counter, own.share);
      if (!is_last(left, own.share)) return;
      state.counter = 0;
      ++state.resets;
      return;
    }
    Replay::given = own.given;
    Replay::next = 0;
    Replay::may_act = true;
    std::int32_t looks = looks_;
    try {
      own.share = join_merge<Replay>(state.counter, parts_, static_cast<std::int32_t>(i), (staying_ >> i & 1U) != 0,
                                     [&looks] { return looks-- > 0; });
      own.joined = true;
    } catch (const Replay::Stop&) {  // at its next operation
    }
    own.given = Replay::given;
  }

  static void check(const State& state) {
    std::vector<std::int32_t> ranks;
    for (const Contributor& c : state.contributors) {
      if (c.share.sharers > 0) ranks.push_back(c.share.rank);
    }
    std::sort(ranks.begin(), ranks.end());
    ASSERT_FALSE(ranks.empty());
    for (const Contributor& c : state.contributors) {
      ASSERT_TRUE(c.share.sharers == 0 || c.share.sharers == static_cast<std::int32_t>(ranks.size()));
    }
    for (std::size_t i = 0; i < ranks.size(); ++i) ASSERT_EQ(ranks[i], static_cast<std::int32_t>(i));
    ASSERT_EQ(state.counter, 0U);
    ASSERT_EQ(state.resets, 1);
  }

  std::int32_t parts_;
  std::uint32_t staying_;
  std::int32_t looks_;
  std::set<std::vector<Counter>> seen_;
  std::set<std::vector<Counter>> endings_;
};

TEST(JointMerge, R40_EveryInterleavingOfFewContributorsSharesTheMergeOutAndEndsAtZero) {
  std::size_t endings = 0;
  for (std::int32_t parts = 2; parts <= full_or_reduced(4, 3); ++parts) {
    for (std::int32_t stayers = 0; stayers <= parts; ++stayers) {  // which of them stay makes no difference
      const std::uint32_t staying = (1U << stayers) - 1;
      for (std::int32_t looks = 0; looks <= (parts == 4 ? 0 : 1); ++looks) {
        endings += Interleavings(parts, staying, looks).explore();
        if (testing::Test::HasFatalFailure()) FAIL() << parts << " parts, staying " << staying << ", looks " << looks;
      }
    }
  }
  EXPECT_GT(endings, full_or_reduced(400U, 40U));
}

}  // namespace
}  // namespace lean::fixup
