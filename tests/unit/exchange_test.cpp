// The exchange between ranks on threads: a thread is a rank, which makes one call after the other and meets the others nowhere else.
// Merging is neither commutative nor associative, so that a wrong order, an old word, one too new or one half stored shows in the result.
#include "fixup/exchange.hpp"

#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "backends/cpu/thread_atomic.hpp"
#include "support/random.hpp"
#include "support/reduced.hpp"

namespace lean::fixup {
namespace {

using cpu::ThreadSystem;
using support::full_or_reduced;
using Word = ThreadSystem::Word;

constexpr std::int32_t kMostRanks = 5;
constexpr std::int32_t kWords = 6;                 // of a partial
constexpr std::int64_t kLong_ns = 60'000'000'000;  // a wait that ends only when the protocol is wrong
constexpr std::int64_t kShort_ns = 20'000'000;

/// Number of the call that comes after so many others.
Epoch epoch_of(std::uint64_t before) { return CallCount::epoch_after(before * CallCount::kSteps); }

Word word_of(Epoch epoch, std::int32_t rank, std::int32_t i) {
  const std::uint64_t key = (std::uint64_t{epoch} << 16) + static_cast<std::uint64_t>(rank * 100 + i);
  return {.data = static_cast<std::uint32_t>(support::mix(key)), .epoch = epoch};
}

std::uint32_t merged(std::uint32_t whole, const Word& word) { return 31 * whole + word.data; }

std::uint32_t expected(Epoch epoch, std::int32_t ranks, std::int32_t i) {
  std::uint32_t whole = 0;
  for (std::int32_t rank = 0; rank < ranks; ++rank) whole = merged(whole, word_of(epoch, rank, i));
  return whole;
}

/// Nothing for most, some microseconds or turns for the other threads for some.
void delay(std::uint64_t key) {
  for (std::int64_t i = support::pick(key, 12) - 6; i > 0; --i) std::this_thread::yield();
  std::uint64_t spin = key;
  for (std::int64_t i = support::pick(key + 1, 600) - 400; i > 0; --i) spin = support::mix(spin);
  if (spin == 0) std::this_thread::yield();
}

/// What a rank has for the others to store to.
struct Memory {
  std::array<std::array<std::array<std::uint64_t, kWords>, kMostRanks>, kExchangeSlots> slots{};

  [[nodiscard]] std::uint64_t& at(Epoch slot, std::int32_t sender, std::int32_t i) {
    return slots[slot][static_cast<std::size_t>(sender)][static_cast<std::size_t>(i)];
  }
};

struct Group {
  std::int32_t ranks;
  std::array<Memory, kMostRanks> memory{};
  std::atomic<std::int64_t> wrong = 0;
  std::atomic<std::int64_t> merged_words = 0;

  explicit Group(std::int32_t rank_count) : ranks(rank_count) {}

  void send_from(std::int32_t rank, Epoch epoch, std::uint64_t key = 0) {
    for (std::int32_t n = 0; n < kWords; ++n) {
      const auto i = static_cast<std::int32_t>((static_cast<std::uint64_t>(n) + key) % kWords);  // in any order
      if (key != 0) delay(key + static_cast<std::uint64_t>(i));
      send<ThreadSystem>(word_of(epoch, rank, i), rank, ranks, [&](std::int32_t to) -> std::uint64_t& {
        return memory[static_cast<std::size_t>(to)].at(exchange_slot(epoch), rank, i);
      });
    }
  }

  Collected collect_at(std::int32_t rank, Epoch epoch, std::int64_t limit_ns, std::uint64_t key = 0) {
    Patience<ThreadSystem> patience(limit_ns);
    Collected first;
    for (std::int32_t i = 0; i < kWords; ++i) {
      std::uint32_t whole = 0;
      if (key != 0) delay(key + static_cast<std::uint64_t>(i));  // while it reads, the others may be ahead
      const Collected collected = collect<ThreadSystem>(
          word_of(epoch, rank, i), rank, ranks, patience,
          [&](std::int32_t from) -> std::uint64_t& {
            return memory[static_cast<std::size_t>(rank)].at(exchange_slot(epoch), from, i);
          },
          [&](const Word& word) { whole = merged(whole, word); });
      if (collected.fault == ExchangeFault::kNone) {
        ++merged_words;
        if (whole != expected(epoch, ranks, i)) ++wrong;
      } else if (first.fault == ExchangeFault::kNone) {
        first = collected;
      }
    }
    return first;
  }

  void call(std::int32_t rank, Epoch epoch, std::uint64_t seed) {
    const std::uint64_t key = support::mix(seed + 8 * std::uint64_t{epoch} + static_cast<std::uint64_t>(rank)) | 1U;
    send_from(rank, epoch, key);
    if (collect_at(rank, epoch, kLong_ns, key).fault != ExchangeFault::kNone) ++wrong;
  }

  /// Calls after so many others.
  void run(std::uint64_t before, Epoch calls, std::uint64_t seed) {
    std::vector<std::thread> threads;
    for (std::int32_t rank = 0; rank < ranks; ++rank) {
      threads.emplace_back([this, rank, before, calls, seed] {
        for (Epoch i = 0; i < calls && wrong == 0; ++i) call(rank, epoch_of(before + i), seed);
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
};

void run_calls(std::int32_t ranks, std::uint64_t before, Epoch calls) {
  Group group(ranks);
  const Epoch last = before > 0 ? epoch_of(before - 1) : 0;
  for (Memory& memory : group.memory) {
    for (Epoch slot = 0; slot < kExchangeSlots; ++slot) {  // what the call before left, or one before the memory was used
      for (std::int32_t rank = 0; rank < ranks; ++rank) {
        for (std::int32_t i = 0; i < kWords; ++i) ThreadSystem::store(memory.at(slot, rank, i), {.data = 0, .epoch = last});
      }
    }
  }
  group.run(before, calls, static_cast<std::uint64_t>(ranks));
  EXPECT_EQ(group.wrong, 0) << ranks << " ranks";
  EXPECT_EQ(group.merged_words, std::int64_t{calls} * ranks * kWords) << ranks << " ranks";
}

TEST(Exchange, R47_EveryRankMergesThisCallsPartialsInRankOrderForAnyDelay) {
  for (std::int32_t ranks = 1; ranks <= kMostRanks; ++ranks) run_calls(ranks, 0, full_or_reduced(2'000U, 300U));
}

TEST(Exchange, R47_EpochsWrap) { run_calls(3, kEpochs - 50U, 100); }

TEST(Exchange, R47_NoCallHasTheNumberOfMemoryThatIsZeroAndNeighboursNeverShareASlot) {
  for (const std::uint64_t round : {1U, 2U, 1000U}) {
    for (std::uint64_t call = round * kEpochs - 3; call < round * kEpochs + 3; ++call) {
      EXPECT_NE(epoch_of(call), 0U) << call;
      EXPECT_NE(exchange_slot(epoch_of(call)), exchange_slot(epoch_of(call + 1))) << call;
    }
    EXPECT_EQ(epoch_of(round * kEpochs), 1U);
  }
}

/// A block is written by calls of so many rows alone: its words may be of any call, or of none.
TEST(Exchange, R47_AWordThatManyCallsHaveNotWrittenIsWaitedFor) {
  const auto met = [](Epoch left_there, Epoch wanted) {
    std::uint64_t place = 0;
    ThreadSystem::store(place, {.data = 7, .epoch = left_there});
    Patience<ThreadSystem> patience(0);
    Word word;
    return receive<ThreadSystem>(place, wanted, patience, word);
  };
  constexpr Epoch kHalf = Epoch{1} << 31;
  for (const Epoch wanted : {Epoch{2}, kHalf - 1, kHalf, kHalf + 1, kHalf + 7, kEpochs - 1, kEpochs})
    EXPECT_EQ(met(0, wanted), ExchangeFault::kPeerLate) << "memory of zeros, call " << wanted;
  for (const Epoch wanted : {Epoch{6}, kHalf + 4, kHalf + 5, kHalf + 6, kHalf + 7, kEpochs - kMostAhead})
    EXPECT_EQ(met(5, wanted), ExchangeFault::kPeerLate) << "a word of call 5, call " << wanted;
  for (const Epoch calls : {Epoch{1}, Epoch{2}, Epoch{1000}}) {  // before the numbers begin again, and after
    EXPECT_EQ(met(kEpochs, calls), ExchangeFault::kPeerLate) << calls;
    EXPECT_EQ(met(calls, kEpochs), ExchangeFault::kPeerAhead) << calls;
    EXPECT_EQ(met(kHalf + calls, kHalf), ExchangeFault::kPeerAhead) << calls;
  }
}

TEST(Exchange, R47_ALateRankIsACodeWithinTheLimitAndTheNextCallIsRight) {
  Group group(3);
  for (const std::int32_t rank : {0, 1}) group.send_from(rank, 1);
  const std::int64_t begin_ns = ThreadSystem::now_ns();
  const Collected late = group.collect_at(0, 1, kShort_ns);  // rank 2 is not there
  const std::int64_t waited_ns = ThreadSystem::now_ns() - begin_ns;
  EXPECT_EQ(late.fault, ExchangeFault::kPeerLate);
  EXPECT_EQ(late.rank, 2);
  EXPECT_GE(waited_ns, kShort_ns);
  EXPECT_LT(waited_ns, kShort_ns * kWords);  // one limit for all words
  EXPECT_EQ(group.merged_words, 0);
  group.send_from(2, 1);  // too late for rank 0
  for (const std::int32_t rank : {1, 2}) EXPECT_EQ(group.collect_at(rank, 1, kLong_ns).fault, ExchangeFault::kNone);
  for (Epoch epoch = 2; epoch < 6; ++epoch) {  // nothing was cleared
    for (std::int32_t rank = 0; rank < 3; ++rank) group.send_from(rank, epoch);
    for (std::int32_t rank = 0; rank < 3; ++rank) EXPECT_EQ(group.collect_at(rank, epoch, kLong_ns).fault, ExchangeFault::kNone);
  }
  EXPECT_EQ(group.wrong, 0);
  EXPECT_EQ(group.merged_words, kWords * (2 + 4 * 3));
}

TEST(Exchange, R47_WhatALaterCallStoredIsACodeAtOnceAndNeverAResult) {
  Group group(2);
  for (Epoch epoch = 1; epoch <= 3; ++epoch) {
    group.send_from(0, epoch);
    EXPECT_EQ(group.collect_at(0, epoch, kShort_ns).fault, ExchangeFault::kPeerLate);
  }
  group.send_from(1, 1);  // rank 0 gave it up, and its third call lies where its first did
  const Collected ahead = group.collect_at(1, 1, kLong_ns);
  EXPECT_EQ(ahead.fault, ExchangeFault::kPeerAhead);
  EXPECT_EQ(ahead.rank, 0);
  EXPECT_EQ(group.merged_words, 0);
}

TEST(Exchange, R47_AFaultIsOneWordForTheHost) {
  for (const ExchangeFault fault : {ExchangeFault::kPeerLate, ExchangeFault::kPeerAhead}) {
    for (const std::int32_t rank : {0, 1, 15}) {
      const std::uint32_t word = fault_word({.fault = fault, .rank = rank});
      EXPECT_NE(word, 0U);
      EXPECT_EQ(fault_of(word).fault, fault);
      EXPECT_EQ(fault_of(word).rank, rank);
    }
  }
  EXPECT_EQ(fault_word({}), 0U);
}

TEST(Exchange, R47_EveryTakerOfACallSeesItsNumberWhateverTheOthersHaveAdded) {
  std::uint64_t count = 0, key = 1;
  for (Epoch epoch = 1; epoch <= full_or_reduced(300U, 60U); ++epoch) {
    const std::int64_t takers = 1 + support::pick(key = support::mix(key), 1024);  // calls of several sizes follow each other
    std::vector<std::int64_t> order;
    for (std::int64_t i = 0; i < takers; ++i) order.push_back(i);
    for (std::size_t i = order.size(); i > 1; --i) {
      const auto other = static_cast<std::size_t>(support::pick(key = support::mix(key), static_cast<std::int64_t>(i)));
      std::swap(order[i - 1], order[other]);
    }
    for (const std::int64_t taker : order) {
      ASSERT_EQ(CallCount::epoch_after(count), epoch) << takers << " takers, " << taker << " looks";
      count += CallCount::share_of(taker, takers);
    }
    ASSERT_EQ(count, epoch * CallCount::kSteps);
  }
}

TEST(Exchange, R47_OnesOwnWordsAreWaitedForAsTheOthersAre) {
  Group group(3);
  const auto collect_at_0 = [&](std::int64_t limit_ns) {
    Patience<ThreadSystem> patience(limit_ns);
    std::uint32_t whole = 0;
    const Collected collected = collect_all<ThreadSystem>(
        1, 3, patience, [&](std::int32_t from) -> std::uint64_t& { return group.memory[0].at(exchange_slot(1), from, 0); },
        [&](const Word& word) { whole = merged(whole, word); });
    return std::pair{collected, whole};
  };
  for (const std::int32_t rank : {1, 2}) group.send_from(rank, 1);
  const Collected late = collect_at_0(kShort_ns).first;
  EXPECT_EQ(late.fault, ExchangeFault::kPeerLate);
  EXPECT_EQ(late.rank, 0);
  ThreadSystem::store(group.memory[0].at(exchange_slot(1), 0, 0), word_of(1, 0, 0));
  const auto [complete, whole] = collect_at_0(kLong_ns);
  EXPECT_EQ(complete.fault, ExchangeFault::kNone);
  EXPECT_EQ(whole, expected(1, 3, 0));
}

TEST(Exchange, R47_WordsAreDisjointAlignedAndInsideTheirBlock) {
  for (const std::int32_t ranks : {1, 2, 3, 16}) {
    const ExchangeLayout layout{ranks};
    std::set<std::int64_t> offsets;
    for (std::int64_t block = 0; block < 2; ++block) {
      for (Epoch slot = 0; slot < kExchangeSlots; ++slot) {
        for (std::int32_t sender = 0; sender < ranks; ++sender) {
          for (std::int32_t i = 0; i < ExchangeLayout::kBlockWords; ++i) {
            const std::int64_t offset = layout.word_offset(block, slot, sender, i);
            EXPECT_TRUE(offsets.insert(offset).second);
            EXPECT_EQ(offset % ExchangeLayout::kWordBytes, 0);
            EXPECT_GE(offset, layout.bytes(block));
            EXPECT_LE(offset + ExchangeLayout::kWordBytes, layout.bytes(block + 1));
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace lean::fixup
