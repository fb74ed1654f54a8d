// Exchange: how partials of the same outputs, computed on several devices, reach every rank and are merged there, in one launch on each.
// The paper's fix-up one level up; its figure of eight GPUs shards heads and needs none.
//
// Protocol (docs/fixup.md). Every rank stores its partial into a slot of its own at each of the others, then waits for theirs and merges
// in rank order. A slot is made of words that are stored and loaded whole and carry the number of the call: a word is this call's or it
// is not, whatever the order in which words become visible, so nothing is counted, fenced or cleared. Each rank both sends to all and
// waits for all: who is in the next call but one has heard from everybody in the next, and two slots are enough. Every wait is bounded by a clock.
// The atomics, system-wide, are abstract: std::atomic_ref on CPU threads, PTX on GPUs.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/hd.hpp"

namespace lean::fixup {

/// Number of a call among those that ranks make together: from 1 to kEpochs, each one more than the last, and then 1 again. Memory that
/// is all zero holds a word of no call.
using Epoch = std::uint32_t;

/// An even number: the last call of a round and the first of the next have different slots too.
inline constexpr Epoch kEpochs = 0U - 2U;

/// Slots of a sender at a receiver: the receiver may still read one while the sender, a call ahead, fills the other.
inline constexpr Epoch kExchangeSlots = 2;

[[nodiscard]] LEAN_HD constexpr Epoch exchange_slot(Epoch epoch) noexcept { return epoch % kExchangeSlots; }

/// A rank that is ahead is so by fewer calls. A word further on is one of long ago.
inline constexpr Epoch kMostAhead = Epoch{1} << 16;

/// Whether a word that shows `seen` is of a call after `wanted`, also where numbers have begun again between them.
[[nodiscard]] LEAN_HD constexpr bool is_ahead(Epoch seen, Epoch wanted) noexcept {
  return seen != 0 && seen != wanted && seen - wanted < kMostAhead;
}

/// What ended an exchange.
enum class ExchangeFault : std::uint32_t {
  kNone = 0,
  kPeerLate = 1,   // a rank did not come
  kPeerAhead = 2,  // a rank stored what is not of this call but of a later one: it had given this rank up, or made other calls
};

/// Where words lie in the memory that each rank has for an exchange: a header, which counts calls, and blocks of kBlockWords words, with
/// nothing that depends on how many blocks there are. Memory that is all zero is ready for epoch 1.
struct ExchangeLayout {
  static constexpr std::int64_t kWordBytes = 16;
  static constexpr std::int32_t kBlockWords = 256;
  static constexpr std::int64_t kHeaderBytes = 256;

  std::int32_t ranks = 1;

  [[nodiscard]] LEAN_HD constexpr std::int64_t block_bytes() const noexcept {
    return std::int64_t{kExchangeSlots} * ranks * kBlockWords * kWordBytes;
  }
  [[nodiscard]] LEAN_HD constexpr std::int64_t bytes(std::int64_t blocks) const noexcept {
    return kHeaderBytes + blocks * block_bytes();
  }
  /// Of word `i` of a block, in that one of the slots of `sender`.
  [[nodiscard]] LEAN_HD constexpr std::int64_t word_offset(std::int64_t block, Epoch slot, std::int32_t sender,
                                                           std::int32_t i) const noexcept {
    return bytes(block) + ((std::int64_t{slot} * ranks + sender) * kBlockWords + i) * kWordBytes;
  }
};

/// Calls, counted by those who take part in them on a rank, however many these are in a call: each adds its share to the header's count,
/// and the shares of a call are kSteps together. Whoever has not added its own yet sees the calls before this one whole, and this one not.
struct CallCount {
  static constexpr std::uint64_t kSteps = std::uint64_t{1} << 20;

  [[nodiscard]] static LEAN_HD constexpr Epoch epoch_after(std::uint64_t count) noexcept {
    return static_cast<Epoch>(count / kSteps % kEpochs) + 1;
  }
  /// Of taker `index` of `takers`, at most kSteps.
  [[nodiscard]] static LEAN_HD constexpr std::uint64_t share_of(std::int64_t index, std::int64_t takers) noexcept {
    return index == 0 ? kSteps - static_cast<std::uint64_t>(takers - 1) : 1;
  }
};

/// The time that a thread's waits may take together. It counts from the first look at the clock, which is the first time it waits.
/// TSystem: now_ns() -> int64, and what receive() asks for.
template <typename TSystem>
class Patience {
 public:
  LEAN_HD explicit Patience(std::int64_t limit_ns) noexcept : limit_ns_(limit_ns) {}

  [[nodiscard]] LEAN_HD bool is_over() noexcept {
    const std::int64_t now_ns = TSystem::now_ns();
    if (!waits_) begin_ns_ = now_ns;
    waits_ = true;
    return now_ns - begin_ns_ >= limit_ns_;
  }

 private:
  std::int64_t limit_ns_;
  std::int64_t begin_ns_ = 0;
  bool waits_ = false;
};

/// Stores a word, which carries its epoch, at every rank but one's own. word_at(rank): where.
/// TSystem: Word, and store(place, Word), whole, for everybody who shares the memory.
template <typename TSystem, typename TWordAt>
LEAN_HD void send(const typename TSystem::Word& word, std::int32_t own_rank, std::int32_t ranks, const TWordAt& word_at) noexcept {
  for (std::int32_t i = 1; i < ranks; ++i) {
    const std::int32_t rank = own_rank + i < ranks ? own_rank + i : own_rank + i - ranks;  // ranks begin with different ones
    TSystem::store(word_at(rank), word);                                                   // pairs with receive()
  }
}

/// Waits until the word at `from` is this epoch's, and takes it.
/// TSystem: load(place) -> Word, whole, with a member `epoch`; relax().
template <typename TSystem, typename TPlace>
[[nodiscard]] LEAN_HD ExchangeFault receive(TPlace& from, Epoch epoch, Patience<TSystem>& patience,
                                            typename TSystem::Word& word) noexcept {
  word = TSystem::load(from);  // pairs with send()
  while (word.epoch != epoch) {
    if (is_ahead(word.epoch, epoch)) return ExchangeFault::kPeerAhead;
    if (patience.is_over()) return ExchangeFault::kPeerLate;
    TSystem::relax();
    word = TSystem::load(from);
  }
  return ExchangeFault::kNone;
}

/// What a collect() met: no fault, or the first rank, in rank order, that it met one with.
struct Collected {
  ExchangeFault fault = ExchangeFault::kNone;
  std::int32_t rank = 0;
};

/// merge(word) for each rank's word of this epoch, in rank order, whoever came first. After a fault the rest is left out: what was
/// merged means nothing. word_at(rank): where; of one's own rank too, which sends to itself then.
template <typename TSystem, typename TWordAt, typename TMerge>
[[nodiscard]] LEAN_HD Collected collect_all(Epoch epoch, std::int32_t ranks, Patience<TSystem>& patience, const TWordAt& word_at,
                                            TMerge&& merge) noexcept {
  for (std::int32_t rank = 0; rank < ranks; ++rank) {
    typename TSystem::Word word;
    const ExchangeFault fault = receive<TSystem>(word_at(rank), epoch, patience, word);
    if (fault != ExchangeFault::kNone) return {.fault = fault, .rank = rank};
    merge(word);
  }
  return {};
}

/// The same where one's own word is at hand: `own`.
template <typename TSystem, typename TWordAt, typename TMerge>
[[nodiscard]] LEAN_HD Collected collect(const typename TSystem::Word& own, std::int32_t own_rank, std::int32_t ranks,
                                        Patience<TSystem>& patience, const TWordAt& word_at, TMerge&& merge) noexcept {
  for (std::int32_t rank = 0; rank < ranks; ++rank) {
    typename TSystem::Word word = own;
    if (rank != own_rank) {
      const ExchangeFault fault = receive<TSystem>(word_at(rank), own.epoch, patience, word);
      if (fault != ExchangeFault::kNone) return {.fault = fault, .rank = rank};
    }
    merge(word);
  }
  return {};
}

/// A fault as the one word in which a device leaves it for the host: 0 is none.
[[nodiscard]] LEAN_HD constexpr std::uint32_t fault_word(const Collected& collected) noexcept {
  return static_cast<std::uint32_t>(collected.fault) + (static_cast<std::uint32_t>(collected.rank) << 8);
}
[[nodiscard]] LEAN_HD constexpr Collected fault_of(std::uint32_t word) noexcept {
  return {.fault = static_cast<ExchangeFault>(word & 0xFFU), .rank = static_cast<std::int32_t>(word >> 8)};
}

}  // namespace lean::fixup
