// Where the arrays of a call lie: what is written must not be what is read. Only what certainly overlaps is found: an array whose
// elements lie end to end holds a corner of another. Rows that lie in the gaps of others are not looked at one by one.
#pragma once

#include <cstdint>

#include "array.hpp"

namespace lean::python {

/// The bytes from an array's first element in memory to its last.
struct Span {
  std::uintptr_t begin = 0;
  std::uintptr_t end = 0;  // begin: there are no elements
  bool dense = false;      // elements lie end to end, in whatever order

  [[nodiscard]] constexpr bool has(std::uintptr_t byte) const noexcept { return begin <= byte && byte < end; }
};

[[nodiscard]] Span span_of(const Array& array) noexcept;

/// Whether an element of one certainly lies on an element of the other.
[[nodiscard]] constexpr bool certainly_overlap(const Span& a, const Span& b) noexcept {
  const auto holds_a_corner = [](const Span& whole, const Span& other) {
    return whole.dense && other.begin < other.end && (whole.has(other.begin) || whole.has(other.end - 1));
  };
  return holds_a_corner(a, b) || holds_a_corner(b, a);
}

}  // namespace lean::python
