// Where memory begins, on host and device, and whether two pieces of it overlap.
#pragma once

#include <cstdint>

#include "base/hd.hpp"
#include "lean/problem.hpp"

namespace lean {

LEAN_HD [[nodiscard]] inline bool aligned_to(const void* data, std::int64_t bytes) noexcept {
  return reinterpret_cast<std::uintptr_t>(data) % static_cast<std::uintptr_t>(bytes) == 0;
}

/// Whether two pieces of memory share a byte.
[[nodiscard]] inline bool overlap(const void* a, std::int64_t a_bytes, const void* b, std::int64_t b_bytes) noexcept {
  const auto a_begin = reinterpret_cast<std::uintptr_t>(a);
  const auto b_begin = reinterpret_cast<std::uintptr_t>(b);
  const bool a_first = a_begin <= b_begin;
  const std::uintptr_t between = a_first ? b_begin - a_begin : a_begin - b_begin;
  return a_bytes > 0 && b_bytes > 0 && between < static_cast<std::uintptr_t>(a_first ? a_bytes : b_bytes);
}

/// Every row of the tensor begins at a multiple of `bytes`.
template <typename TView>
[[nodiscard]] bool rows_aligned(const TView& tensor, std::int64_t bytes) noexcept {
  const std::int64_t element = bytes_of(tensor.dtype);
  return aligned_to(tensor.data, bytes) && tensor.strides.sequence * element % bytes == 0 &&
         tensor.strides.head * element % bytes == 0 && tensor.strides.token * element % bytes == 0;
}

}  // namespace lean
