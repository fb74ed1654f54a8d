// Where memory begins, on host and device.
#pragma once

#include <cstdint>

#include "base/hd.hpp"
#include "lean/problem.hpp"

namespace lean {

LEAN_HD [[nodiscard]] inline bool aligned_to(const void* data, std::int64_t bytes) noexcept {
  return reinterpret_cast<std::uintptr_t>(data) % static_cast<std::uintptr_t>(bytes) == 0;
}

/// Every row of the tensor begins at a multiple of `bytes`.
template <typename TView>
[[nodiscard]] bool rows_aligned(const TView& tensor, std::int64_t bytes) noexcept {
  const std::int64_t element = bytes_of(tensor.dtype);
  return aligned_to(tensor.data, bytes) && tensor.strides.sequence * element % bytes == 0 &&
         tensor.strides.head * element % bytes == 0 && tensor.strides.token * element % bytes == 0;
}

}  // namespace lean
