// Exchange: how partials of one output, computed on several devices, reach the rank that owns it and are merged there in the same
// launch. The paper's fix-up one level up; its figure of eight GPUs shards heads and needs none.
//
// Protocol (docs/fixup.md). Words and slots lie in memory that both sides reach. A sender stores its partial into one of two slots of
// its own at the owner, then raises its `arrived` word to the call's epoch. The owner waits for each sender's word in rank order,
// merges, and raises the `taken` words: a slot is stored to again two epochs later, once the owner has said so. Words only ever grow,
// so an aborted call leaves nothing to clear. Every wait is bounded by a clock.
// The atomics, system-wide, are abstract: std::atomic_ref on CPU threads, cuda::atomic_ref with thread_scope_system on GPUs.
#pragma once

#include <cstdint>

#include "base/hd.hpp"

namespace lean::fixup {

/// Number of a call among those that ranks make together: each is one more than the last, and may wrap.
using Epoch = std::uint32_t;

/// Slots of a sender at an owner: the owner may still read one while the sender fills the other.
inline constexpr Epoch kExchangeSlots = 2;

/// What ended an exchange. The first one that is not kNone stays in the sticky word.
enum class ExchangeFault : std::uint32_t {
  kNone = 0,
  kSlotNotFree = 1,  // the owner did not take what was sent two epochs before
  kPeerLate = 2,     // a sender did not arrive
};

/// What a sender and an owner share for one output. Memory of words: zero before the first call.
struct Mailbox {
  Epoch* arrived = nullptr;  // at the owner; written by the sender: its slots up to this epoch are stored
  Epoch* taken = nullptr;    // at the sender; written by the owner: slots up to this epoch are not read again
};

[[nodiscard]] LEAN_HD constexpr Epoch exchange_slot(Epoch epoch) noexcept { return epoch % kExchangeSlots; }

/// Whether a word that shows `seen` has come to `wanted`; holds over a wrap.
[[nodiscard]] LEAN_HD constexpr bool has_reached(Epoch seen, Epoch wanted) noexcept {
  return static_cast<std::int32_t>(seen - wanted) >= 0;
}

/// Waits until `word` has come to `wanted`; false if it did not within `limit_ns`.
/// TSystem: load_acquire(Epoch&), store_release(Epoch&, Epoch), set_first(uint32&, uint32), now_ns() -> int64 and relax().
template <typename TSystem>
LEAN_HD [[nodiscard]] bool wait_until_reached(Epoch& word, Epoch wanted, std::int64_t limit_ns) noexcept {
  if (has_reached(TSystem::load_acquire(word), wanted)) return true;  // pairs with store_release of send and collect
  const std::int64_t begin_ns = TSystem::now_ns();
  do {
    TSystem::relax();
    if (has_reached(TSystem::load_acquire(word), wanted)) return true;
  } while (TSystem::now_ns() - begin_ns < limit_ns);
  return false;
}

/// A sender's part. store(slot): puts this rank's partial into that one of its slots at the owner.
/// On a fault nothing is stored, and the owner notices that nobody came.
template <typename TSystem, typename TStore>
LEAN_HD ExchangeFault send(const Mailbox& box, Epoch epoch, std::int64_t limit_ns, std::uint32_t& sticky, TStore&& store) noexcept {
  if (!wait_until_reached<TSystem>(*box.taken, epoch - kExchangeSlots, limit_ns)) {
    TSystem::set_first(sticky, static_cast<std::uint32_t>(ExchangeFault::kSlotNotFree));
    return ExchangeFault::kSlotNotFree;
  }
  store(exchange_slot(epoch));
  TSystem::store_release(*box.arrived, epoch);  // pairs with wait_until_reached in collect
  return ExchangeFault::kNone;
}

/// The owner's part: boxes[rank] for each of `ranks` ranks, its own unused. merge(rank, slot) is called in rank order, whoever came
/// first, its own rank too, when all have come; if one has not within `limit_ns`, it is not called, so that the output is left alone.
template <typename TSystem, typename TMerge>
LEAN_HD ExchangeFault collect(const Mailbox* boxes, std::int32_t own_rank, std::int32_t ranks, Epoch epoch, std::int64_t limit_ns,
                              std::uint32_t& sticky, TMerge&& merge) noexcept {
  const std::int64_t begin_ns = TSystem::now_ns();
  ExchangeFault fault = ExchangeFault::kNone;
  for (std::int32_t rank = 0; rank < ranks; ++rank) {
    const std::int64_t left_ns = limit_ns - (TSystem::now_ns() - begin_ns);  // one limit for all of them
    if (rank != own_rank && !wait_until_reached<TSystem>(*boxes[rank].arrived, epoch, left_ns)) fault = ExchangeFault::kPeerLate;
  }
  if (fault == ExchangeFault::kNone) {
    for (std::int32_t rank = 0; rank < ranks; ++rank) merge(rank, exchange_slot(epoch));
  } else {
    TSystem::set_first(sticky, static_cast<std::uint32_t>(fault));
  }
  for (std::int32_t rank = 0; rank < ranks; ++rank) {  // after a fault too: this epoch's slots are not looked at any more
    if (rank != own_rank) TSystem::store_release(*boxes[rank].taken, epoch);  // pairs with wait_until_reached in send
  }
  return fault;
}

}  // namespace lean::fixup
