// How a CPU call reports lengths that had to be clamped and pages that were skipped (fixup/sticky.hpp); backends/cuda/sticky.cuh does
// the same on a device.
#pragma once

#include <atomic>
#include <cstdint>

#include "backends/cpu/thread_atomic.hpp"
#include "fixup/sticky.hpp"
#include "fixup/workspace.hpp"
#include "lean/problem.hpp"
#include "lean/status.hpp"

namespace lean::cpu {

/// A word of an array that another thread may write at the same time.
struct OneLoad {
  [[nodiscard]] static std::int32_t load(const std::int32_t* at) noexcept {
    return std::atomic_ref<std::int32_t>(*const_cast<std::int32_t*>(at)).load(std::memory_order_relaxed);
  }
};

/// Workers may report at the same time: who is first says which entry it was.
inline void report(const Problem& problem, fixup::StateHeader& header, StatusCode code) noexcept {
  if (fixup::report_sticky<ThreadAtomic>(header, code)) fixup::name_fault<ThreadAtomic, OneLoad>(problem, header);
}

}  // namespace lean::cpu
