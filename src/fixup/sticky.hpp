// Faults in lengths and page ids that only the call itself reads: their code is kept in the state, the first of them, until
// reset_workspace(); and which entry of which array it was, looked up apart from it. Whoever meets a fault says its code and goes on;
// who has nothing left to do looks up the entry (name_fault()), before the call ends, so in arrays that are still the call's. The
// atomic is abstract, as in fixup/arrival.hpp.
#pragma once

#include "base/hd.hpp"
#include "fixup/workspace.hpp"
#include "lean/status.hpp"
#include "problem/length_faults.hpp"

namespace lean::fixup {

/// Whether the code is the state's first: several workers may report at the same time.
/// TAtomic: replace_relaxed(Counter&, Counter expected, Counter value) -> bool, whether `expected` stood there.
template <typename TAtomic>
LEAN_HD bool report_sticky(StateHeader& header, StatusCode code) noexcept {
  return TAtomic::replace_relaxed(header.sticky_code, 0, static_cast<Counter>(code));
}

/// Whether there is a code at all: all that a call without a fault has to look at.
/// TAtomic: load_relaxed(Counter&) -> Counter.
template <typename TAtomic>
LEAN_HD [[nodiscard]] bool has_fault(StateHeader& header) noexcept {
  return TAtomic::load_relaxed(header.sticky_code) != 0;
}

/// Looks up the first entry that the code may be about and keeps it in the state: by the first who asks, once until the next reset.
/// Codes of other faults have no entry. TLoad reads a word of the problem's arrays.
template <typename TAtomic, typename TLoad = PlainLoad>
LEAN_HD void name_fault(const Problem& problem, StateHeader& header) noexcept {
  const auto code = static_cast<StatusCode>(TAtomic::load_relaxed(header.sticky_code));
  const bool of_page = code == StatusCode::kBadPageIndex;
  if (!of_page && code != StatusCode::kBadLengths) return;
  if (TAtomic::load_relaxed(header.named) != 0 || !TAtomic::replace_relaxed(header.named, 0, 1)) return;
  header.fault = of_page ? first_bad_page<TLoad>(problem) : first_bad_length<TLoad>(problem);
}

}  // namespace lean::fixup
