// Arrival: how the workers that share an output find out who came last, without anybody waiting.
//
// Protocol (docs/fixup.md). Every contributor stores its partial, then counts up with acquire-release. The one whose count
// completes the number sees all other partials (its acquire pairs with their releases), puts the counter back to 0
// for the next call, and merges. Correct for any order of arrival and any number of workers running at a time.
// The atomic is abstract: std::atomic_ref on CPU threads, cuda::atomic_ref on a GPU, checked ones in the tests.
#pragma once

#include <cstdint>

#include "base/hd.hpp"

namespace lean::fixup {

using Counter = std::uint32_t;

/// Counts the caller in; true for exactly one of `contributors` callers: the last.
/// TAtomic: fetch_add_acq_rel(Counter&, Counter) -> Counter and store_relaxed(Counter&, Counter).
template <typename TAtomic>
LEAN_HD [[nodiscard]] bool arrive_last(Counter& counter, std::int32_t contributors) noexcept {
  const Counter arrived_before = TAtomic::fetch_add_acq_rel(counter, 1);  // pairs with the same line of every contributor
  if (arrived_before + 1 != static_cast<Counter>(contributors)) return false;
  TAtomic::store_relaxed(counter, 0);  // the next call is ordered after this one by whoever made both
  return true;
}

/// The paper's signal: a peer raises its own flag after its partial is stored.
template <typename TAtomic>
LEAN_HD void signal(Counter& flag) noexcept {
  TAtomic::store_release(flag, 1);  // pairs with wait_for
}

/// The paper's wait: the host block spins on a peer's flag, then lowers it for the next call. Ends only if the peer runs.
template <typename TAtomic>
LEAN_HD void wait_for(Counter& flag) noexcept {
  while (TAtomic::load_acquire(flag) == 0) TAtomic::relax();  // pairs with signal
  TAtomic::store_relaxed(flag, 0);
}

/// Merges of one level read at most this many partials; more contributors merge in bundles, then the bundles (measured on an
/// H200: one level costs ~2 us, two ~5 us, 132 partials in one level far more).
inline constexpr std::int32_t kMaxOneLevel = 32;

/// How the contributors of an output are bundled: bundle i merges contributors [i x size, min((i + 1) x size, n)).
struct Bundling {
  std::int32_t size = 0;     // contributors per bundle
  std::int32_t bundles = 0;  // 1: one level

  [[nodiscard]] LEAN_HD constexpr std::int32_t begin(std::int32_t bundle) const noexcept { return bundle * size; }
  [[nodiscard]] LEAN_HD constexpr std::int32_t end(std::int32_t bundle, std::int32_t contributors) const noexcept {
    return (bundle + 1) * size < contributors ? (bundle + 1) * size : contributors;
  }
};

/// One level up to kMaxOneLevel contributors, else bundles of about the square root.
LEAN_HD [[nodiscard]] constexpr Bundling bundling_of(std::int32_t contributors) noexcept {
  if (contributors <= kMaxOneLevel) return {.size = contributors, .bundles = 1};
  std::int32_t size = 1;
  while (size * size < contributors) ++size;
  return {.size = size, .bundles = (contributors + size - 1) / size};
}

}  // namespace lean::fixup
