// lean_attention.Options as the library's.
#pragma once

#include "lean/options.hpp"
#include "python.hpp"

namespace lean::python {

struct GivenOptions {
  Options options;
  bool check_lengths = false;  // of Python alone: look at lengths on a device before the call
};

/// From lean_attention.Options, or the integers of its `encoded`; the defaults from None.
[[nodiscard]] GivenOptions options_of(PyObject* options);

/// An integer in the range of int, which errors call `name`.
[[nodiscard]] int int_of(PyObject* value, const char* name);

}  // namespace lean::python
