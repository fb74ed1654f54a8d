// What arguments' shapes are held against: refusals that name the argument, its shape and what was expected.
#pragma once

#include <cstdint>

#include "arguments.hpp"
#include "errors.hpp"

namespace lean::python {

/// Throws ValueError unless the array has so many axes, which the message calls `axes`.
inline void check_dims(const Array& array, Argument which, int dims, const char* axes) {
  if (array.ndim != dims) {
    raise(PyExc_ValueError, "%s: shape %s: expected %s", which.name(), array.shape_text().c_str(), axes);
  }
}

/// Throws ValueError unless an axis, called `axis` in the message, is as long as expected.
inline void check_size(const Array& array, Argument which, std::int64_t size, std::int64_t expected, const char* axis) {
  if (size != expected) {
    raise(PyExc_ValueError, "%s: shape %s: %s is %lld, expected %lld", which.name(), array.shape_text().c_str(), axis,
          static_cast<long long>(size), static_cast<long long>(expected));
  }
}

}  // namespace lean::python
