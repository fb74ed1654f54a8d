// Where memory begins, on host and device.
#pragma once

#include <cstdint>

#include "base/hd.hpp"

namespace lean {

LEAN_HD [[nodiscard]] inline bool aligned_to(const void* data, std::int64_t bytes) noexcept {
  return reinterpret_cast<std::uintptr_t>(data) % static_cast<std::uintptr_t>(bytes) == 0;
}

}  // namespace lean
