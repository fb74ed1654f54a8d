// The exchange between ranks on threads: a thread is a rank, which makes one call after the other and meets the others nowhere else.
// Partials are plain memory, so that ThreadSanitizer reports any order that is too weak; merging is neither commutative nor
// associative, so that a wrong order, an old partial or one too new shows in the result.
#include "fixup/exchange.hpp"

#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include "backends/cpu/thread_atomic.hpp"
#include "support/random.hpp"
#include "support/reduced.hpp"

namespace lean::fixup {
namespace {

using cpu::ThreadSystem;
using support::full_or_reduced;

constexpr std::int32_t kMostRanks = 5;
constexpr std::int64_t kLong_ns = 60'000'000'000;  // a wait that ends only when the protocol is wrong
constexpr std::int64_t kShort_ns = 20'000'000;

using Words = std::array<std::uint64_t, 6>;

Words partial_of(Epoch epoch, std::int32_t owner, std::int32_t rank) {
  Words words{};
  for (std::size_t i = 0; i < words.size(); ++i) {
    words[i] = support::mix((std::uint64_t{epoch} << 16) + static_cast<std::uint64_t>(owner * 100 + rank * 10) + i);
  }
  return words;
}

void take_in(Words& whole, const Words& other) {
  for (std::size_t i = 0; i < whole.size(); ++i) whole[i] = 31 * whole[i] + other[i];
}

Words expected(Epoch epoch, std::int32_t owner, std::int32_t ranks) {
  Words whole{};
  for (std::int32_t rank = 0; rank < ranks; ++rank) take_in(whole, partial_of(epoch, owner, rank));
  return whole;
}

/// Nothing for most, some microseconds or turns for the other threads for some.
void delay(std::uint64_t key) {
  for (std::int64_t i = support::pick(key, 12) - 6; i > 0; --i) std::this_thread::yield();
  std::uint64_t spin = key;
  for (std::int64_t i = support::pick(key + 1, 600) - 400; i > 0; --i) spin = support::mix(spin);
  if (spin == 0) std::this_thread::yield();
}

/// An output of one owner: the memory that it and its senders share.
struct Output {
  std::array<std::array<Words, kExchangeSlots>, kMostRanks> slots{};
  std::array<Epoch, kMostRanks> arrived{};
  std::array<Epoch, kMostRanks> taken{};
  std::array<Mailbox, kMostRanks> boxes{};
  std::uint32_t sticky = 0;

  explicit Output(Epoch first) {
    for (std::size_t i = 0; i < kMostRanks; ++i) {
      arrived[i] = taken[i] = first - 1;
      boxes[i] = {.arrived = &arrived[i], .taken = &taken[i]};
    }
  }
};

/// `ranks` threads, of which the first `owners` own an output each that all contribute to.
struct Group {
  std::int32_t ranks;
  std::int32_t owners;
  Epoch first;
  std::vector<std::unique_ptr<Output>> outputs;
  std::vector<std::uint32_t> sender_sticky;
  std::atomic<std::int64_t> wrong = 0;
  std::atomic<std::int64_t> merged = 0;

  Group(std::int32_t rank_count, std::int32_t owner_count, Epoch first_epoch)
      : ranks(rank_count), owners(owner_count), first(first_epoch), sender_sticky(static_cast<std::size_t>(rank_count)) {
    for (std::int32_t owner = 0; owner < owners; ++owner) outputs.push_back(std::make_unique<Output>(first));
  }

  [[nodiscard]] Output& output(std::int32_t owner) { return *outputs[static_cast<std::size_t>(owner)]; }

  ExchangeFault send_to(std::int32_t owner, std::int32_t rank, Epoch epoch, std::int64_t limit_ns) {
    Output& to = output(owner);
    const auto own = static_cast<std::size_t>(rank);
    return send<ThreadSystem>(to.boxes[own], epoch, limit_ns, sender_sticky[own],
                              [&](Epoch slot) { to.slots[own][slot] = partial_of(epoch, owner, rank); });
  }

  ExchangeFault collect_as(std::int32_t owner, Epoch epoch, std::int64_t limit_ns, std::uint64_t key = 0) {
    Output& own = output(owner);
    own.slots[static_cast<std::size_t>(owner)][exchange_slot(epoch)] = partial_of(epoch, owner, owner);
    Words whole{};
    const ExchangeFault fault =
        collect<ThreadSystem>(own.boxes.data(), owner, ranks, epoch, limit_ns, own.sticky, [&](std::int32_t rank, Epoch slot) {
          if (key != 0) delay(key + static_cast<std::uint64_t>(rank));  // while it reads, senders may be ahead
          take_in(whole, own.slots[static_cast<std::size_t>(rank)][slot]);
        });
    if (fault == ExchangeFault::kNone) {
      ++merged;
      if (whole != expected(epoch, owner, ranks)) ++wrong;
    }
    return fault;
  }

  void call(std::int32_t rank, Epoch epoch, std::uint64_t seed) {
    const std::uint64_t key = support::mix(seed + 8 * std::uint64_t{epoch} + static_cast<std::uint64_t>(rank));
    for (std::int32_t owner = 0; owner < owners; ++owner) {
      if (owner == rank) continue;
      delay(key + static_cast<std::uint64_t>(owner));
      if (send_to(owner, rank, epoch, kLong_ns) != ExchangeFault::kNone) ++wrong;
    }
    if (rank < owners && collect_as(rank, epoch, kLong_ns, key) != ExchangeFault::kNone) ++wrong;
  }

  void run(Epoch calls, std::uint64_t seed) {
    std::vector<std::thread> threads;
    for (std::int32_t rank = 0; rank < ranks; ++rank) {
      threads.emplace_back([this, rank, calls, seed] {
        for (Epoch i = 0; i < calls && wrong == 0; ++i) call(rank, first + i, seed);
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
};

void run_calls(std::int32_t ranks, std::int32_t owners, Epoch first, Epoch calls) {
  Group group(ranks, owners, first);
  group.run(calls, static_cast<std::uint64_t>(ranks * 10 + owners));
  EXPECT_EQ(group.wrong, 0) << ranks << " ranks, " << owners << " owners";
  EXPECT_EQ(group.merged, std::int64_t{calls} * owners) << ranks << " ranks, " << owners << " owners";
  for (const auto& output : group.outputs) EXPECT_EQ(output->sticky, 0U);
}

TEST(Exchange, R47_EveryOwnerMergesThisCallsPartialsInRankOrderForAnyDelay) {
  for (std::int32_t ranks = 1; ranks <= kMostRanks; ++ranks) run_calls(ranks, ranks, 1, full_or_reduced(2'000U, 300U));
}

TEST(Exchange, R47_SendersThatWaitForNobodyDoNotOverrunTheOwner) {
  for (std::int32_t ranks = 2; ranks <= kMostRanks; ++ranks) run_calls(ranks, 1, 1, full_or_reduced(4'000U, 800U));
}

TEST(Exchange, R47_EpochsWrap) { run_calls(3, 2, 0U - 50U, 100); }

TEST(Exchange, R47_ALateSenderIsACodeWithinTheLimitAndTheNextCallIsRight) {
  Group group(3, 1, 1);
  Output& output = group.output(0);
  ASSERT_EQ(group.send_to(0, 1, 1, kLong_ns), ExchangeFault::kNone);
  const std::int64_t begin_ns = ThreadSystem::now_ns();
  EXPECT_EQ(group.collect_as(0, 1, kShort_ns), ExchangeFault::kPeerLate);  // rank 2 is not there
  EXPECT_GE(ThreadSystem::now_ns() - begin_ns, kShort_ns);
  EXPECT_EQ(group.merged, 0);
  EXPECT_EQ(output.sticky, static_cast<std::uint32_t>(ExchangeFault::kPeerLate));
  EXPECT_EQ(group.send_to(0, 2, 1, kLong_ns), ExchangeFault::kNone);  // too late: nobody reads it
  for (Epoch epoch = 2; epoch < 6; ++epoch) {                         // nothing was cleared
    for (const std::int32_t rank : {1, 2}) EXPECT_EQ(group.send_to(0, rank, epoch, kLong_ns), ExchangeFault::kNone);
    EXPECT_EQ(group.collect_as(0, epoch, kLong_ns), ExchangeFault::kNone);
  }
  EXPECT_EQ(group.wrong, 0);
  EXPECT_EQ(group.merged, 4);
  EXPECT_EQ(output.sticky, static_cast<std::uint32_t>(ExchangeFault::kPeerLate));  // the first fault stays
}

TEST(Exchange, R47_AnOwnerThatIsGoneIsACodeForItsSenders) {
  Group group(2, 1, 1);
  EXPECT_EQ(group.send_to(0, 1, 1, kShort_ns), ExchangeFault::kNone);
  EXPECT_EQ(group.send_to(0, 1, 2, kShort_ns), ExchangeFault::kNone);  // there are two slots
  const std::array<Words, kExchangeSlots> sent = group.output(0).slots[1];
  EXPECT_EQ(group.send_to(0, 1, 3, kShort_ns), ExchangeFault::kSlotNotFree);
  EXPECT_EQ(group.sender_sticky[1], static_cast<std::uint32_t>(ExchangeFault::kSlotNotFree));
  EXPECT_EQ(group.output(0).slots[1], sent);
  EXPECT_EQ(group.output(0).arrived[1], 2U);
}

}  // namespace
}  // namespace lean::fixup
