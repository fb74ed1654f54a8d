// How a CPU call reports lengths that had to be clamped and pages that were skipped: a sticky code in the state, and which entry it
// was. The first fault stays until reset_workspace(); backends/cuda/sticky.cuh does the same on a device.
#pragma once

#include <atomic>
#include <cstdint>

#include "fixup/workspace.hpp"
#include "lean/status.hpp"

namespace lean::cpu {

/// A word of an array that another thread may write at the same time.
struct OneLoad {
  [[nodiscard]] static std::int32_t load(const std::int32_t* at) noexcept {
    return std::atomic_ref<std::int32_t>(*const_cast<std::int32_t*>(at)).load(std::memory_order_relaxed);
  }
};

/// Whether the code is the state's first: workers may report at the same time. Who is first says which entry it was.
[[nodiscard]] inline bool first_to_report(fixup::StateHeader& header, StatusCode code) noexcept {
  fixup::Counter none = 0;
  return std::atomic_ref<fixup::Counter>(header.sticky_code)
      .compare_exchange_strong(none, static_cast<fixup::Counter>(code), std::memory_order_relaxed);
}

}  // namespace lean::cpu
