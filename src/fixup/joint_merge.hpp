// A joint merge: contributors of an output that have nothing else to do stay until the last has arrived, and then merge together, a
// share of the rows each. Nobody's end depends on it: a stayer that has waited long enough leaves, and whoever arrives when nobody
// stays merges alone, as by arrive_last(). So it ends in any order of arrival and with any number of workers running at a time.
// Every row is merged in one order, by whomever: the same bits as of one who merges all.
//
// All of it is one counter, 0 between calls: of contributors that arrived, of those that left, and of sharers that are through with
// it. Once all have arrived nobody leaves any more: who shares is settled by the last arrival.
#pragma once

#include <cstdint>

#include "base/hd.hpp"
#include "fixup/arrival.hpp"

namespace lean::fixup {

/// What of a merge falls to a caller: part `rank` of `sharers`. Nothing, where there are none.
struct MergeShare {
  std::int32_t rank = 0;
  std::int32_t sharers = 0;

  /// Which of so many pieces, all sharers' alike but for the last ones', are the caller's: [begin, end).
  [[nodiscard]] LEAN_HD constexpr std::int32_t begin(std::int32_t pieces) const noexcept {
    const std::int32_t each = (pieces + sharers - 1) / sharers;
    return each * rank < pieces ? each * rank : pieces;
  }
  [[nodiscard]] LEAN_HD constexpr std::int32_t end(std::int32_t pieces) const noexcept {
    return MergeShare{rank + 1, sharers}.begin(pieces);
  }
};

/// What a joint merge's counter holds, of up to kMost contributors: how many have arrived, up to twice as many with the ranks that are
/// drawn, how many of them have left, and how many are through, of whom the last is not counted any more.
class Attendance {
 public:
  static constexpr Counter kArrival = 1;
  static constexpr Counter kLeave = 1U << 11;
  static constexpr Counter kThrough = 1U << 22;
  static constexpr std::int32_t kMost = kMaxOneLevel * kMaxOneLevel;

  LEAN_HD constexpr explicit Attendance(Counter counter) noexcept : counter_(counter) {}
  [[nodiscard]] LEAN_HD constexpr std::int32_t arrived() const noexcept {
    return static_cast<std::int32_t>(counter_ & (kLeave - 1));
  }
  [[nodiscard]] LEAN_HD constexpr std::int32_t left() const noexcept {
    return static_cast<std::int32_t>((counter_ & (kThrough - 1)) / kLeave);
  }
  [[nodiscard]] LEAN_HD constexpr std::int32_t through() const noexcept { return static_cast<std::int32_t>(counter_ / kThrough); }

 private:
  Counter counter_;
};

/// Counts the caller in, its partial stored, and says what of the merge is its. `index`: which of the `parts` contributors it is.
/// `stays`: it waits for the others, as long as `patient()` is true. Who gets a share leaves it later.
/// TAtomic: also load_acquire(Counter&), replace_relaxed(Counter&, expected, value) -> bool, relax(). Tests throw out of it.
template <typename TAtomic, typename TPatient>
LEAN_HD [[nodiscard]] MergeShare join_merge(Counter& counter, std::int32_t parts, std::int32_t index, bool stays,
                                            TPatient&& patient) {
  const Counter own = stays ? Attendance::kArrival : Attendance::kArrival + Attendance::kLeave;
  Counter seen = TAtomic::fetch_add_acq_rel(counter, own) + own;  // pairs with the same line of every contributor
  if (!stays) return {0, Attendance(seen).left() == parts ? 1 : 0};
  while (Attendance(seen).arrived() < parts) {
    if (patient()) {
      TAtomic::relax();
    } else if (TAtomic::replace_relaxed(counter, seen, seen + Attendance::kLeave)) {
      return {};
    }
    seen = TAtomic::load_acquire(counter);  // pairs with the arrivals, whatever else was counted since
  }
  const std::int32_t left = Attendance(seen).left();
  if (left == 0) return {index, parts};
  if (left + 1 == parts) return {0, 1};
  // Who shares is not known by index: ranks are drawn, in the place of those who left.
  const Counter drawn = TAtomic::fetch_add_acq_rel(counter, Attendance::kArrival);
  return {Attendance(drawn).arrived() - parts, parts - left};
}

/// Says that the caller is through with the counter, which it looks at no more; what is returned is for is_last(). What it merged
/// comes before, where that matters to whoever is last.
template <typename TAtomic>
LEAN_HD [[nodiscard]] Counter leave_merge(Counter& counter, const MergeShare& share) noexcept {
  if (share.sharers <= 1) return 0;
  return TAtomic::fetch_add_acq_rel(counter, Attendance::kThrough);  // pairs with the same line of every sharer
}

/// The same of a merge whose rows go to the output, where nobody looks for them.
template <typename TAtomic>
LEAN_HD [[nodiscard]] Counter leave_last_merge(Counter& counter, const MergeShare& share) noexcept {
  return share.sharers > 1 ? TAtomic::fetch_add_relaxed(counter, Attendance::kThrough) : 0;
}

/// True for exactly one sharer, which is to put the counter back to 0.
LEAN_HD [[nodiscard]] constexpr bool is_last(Counter left, const MergeShare& share) noexcept {
  return Attendance(left).through() + 1 == share.sharers || share.sharers == 1;
}

}  // namespace lean::fixup
