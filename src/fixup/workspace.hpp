// Workspace layout: where counters and slots lie. `state` is small, zeroed once and always left zero; `scratch` needs no
// initialisation: nothing is read there that the same call has not written.
//
//   state    [StateHeader | level-1 counters, one a slot | level-2 counters, one for every two slots]
//   scratch  [slots: q_rows x (dv + 2) floats x nodes | second bank, for bundles | the backend's private part]
//
// Launches that run side by side share the header; each has counters and slots of its own, the second's behind the first's.
#pragma once

#include <cstdint>

#include "base/hd.hpp"
#include "base/int_math.hpp"
#include "fixup/arrival.hpp"
#include "fixup/chunk_tree.hpp"
#include "fixup/partial.hpp"
#include "problem/length_faults.hpp"

namespace lean::fixup {

inline constexpr std::int64_t kStateHeaderBytes = 256;
inline constexpr std::int64_t kAlignmentBytes = 256;

struct StateHeader {
  Counter owner = 0;        // not 0 while a call holds the workspace
  Counter sticky_code = 0;  // StatusCode of the first fault seen in device-resident data
  LengthFault fault{};      // of a length or page id: which entry it was (fixup/sticky.hpp); not found: unknown
  Counter named = 0;        // not 0 once somebody looks that up
};
static_assert(sizeof(StateHeader) <= kStateHeaderBytes);

/// Nodes a chunked partial consists of, kept in its slot.
struct NodeList {
  std::int32_t count = 0;
  ChunkNode nodes[ChunkTree::kMaxNodes];
};

struct WorkspaceLayout {
  std::int64_t slots = 0;           // slots of the first bank
  bool second_bank = false;         // an output may have more than kMaxOneLevel contributors
  std::int32_t nodes_per_slot = 1;  // > 1: chunked partials, each slot begins with a NodeList
  PartialLayout partial;
  std::int64_t slot_bytes = 0;  // kept, since all workers of a GPU ask, and multiply 64 bits slowly

  WorkspaceLayout() = default;
  constexpr WorkspaceLayout(std::int64_t slot_count, bool has_second_bank, std::int32_t nodes,
                            const PartialLayout& of_partial) noexcept
      : slots(slot_count), second_bank(has_second_bank), nodes_per_slot(nodes), partial(of_partial) {
    const std::int64_t list = nodes_per_slot > 1 ? round_up(sizeof(NodeList), kAlignmentBytes) : 0;
    slot_bytes = list + round_up(nodes_per_slot * partial.floats() * static_cast<std::int64_t>(sizeof(float)), kAlignmentBytes);
  }

  /// An output with two levels has two slots or more, so half as many level-2 counters are enough.
  [[nodiscard]] LEAN_HD constexpr std::int64_t counters() const noexcept { return slots + (second_bank ? ceil_div(slots, 2) : 0); }
  [[nodiscard]] LEAN_HD constexpr std::int64_t state_bytes() const noexcept {
    return kStateHeaderBytes + round_up(counters() * static_cast<std::int64_t>(sizeof(Counter)), kAlignmentBytes);
  }
  [[nodiscard]] LEAN_HD constexpr std::int64_t scratch_bytes() const noexcept { return slot_bytes * slots * (second_bank ? 2 : 1); }
};

/// Pointers into a workspace laid out as above.
struct Slots {
  WorkspaceLayout layout;
  std::byte* state = nullptr;
  std::byte* scratch = nullptr;
  std::int64_t counters_before = 0;  // of launches ahead that share the state

  [[nodiscard]] LEAN_HD StateHeader& header() const noexcept { return *reinterpret_cast<StateHeader*>(state); }
  [[nodiscard]] LEAN_HD Counter* counters() const noexcept {
    return reinterpret_cast<Counter*>(state + kStateHeaderBytes) + counters_before;
  }

  /// Level 1 for bundles of contributors, level 2 for bundles of bundles; indexed by the bundle's or output's first slot.
  [[nodiscard]] LEAN_HD Counter& counter(std::int64_t slot) const noexcept { return counters()[slot]; }
  [[nodiscard]] LEAN_HD Counter& second_counter(std::int64_t slot) const noexcept { return counters()[layout.slots + slot / 2]; }

  [[nodiscard]] LEAN_HD NodeList& node_list(std::int64_t slot) const noexcept {
    return *reinterpret_cast<NodeList*>(scratch + slot * layout.slot_bytes);
  }
  [[nodiscard]] LEAN_HD Partial partial(std::int64_t slot, std::int32_t node = 0) const noexcept {
    std::byte* base = scratch + slot * layout.slot_bytes;
    if (layout.nodes_per_slot > 1) base += round_up(sizeof(NodeList), kAlignmentBytes);
    return layout.partial.at(reinterpret_cast<float*>(base) + node * layout.partial.floats());
  }
  /// Where the merged result of the bundle that begins with `slot` lies: a bank of its own, so that nobody overwrites what is
  /// still being read.
  [[nodiscard]] LEAN_HD Partial bundle_partial(std::int64_t slot) const noexcept { return partial(layout.slots + slot); }
};

}  // namespace lean::fixup
