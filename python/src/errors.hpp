// A Status as a Python exception whose message names the argument as Python knows it.
#pragma once

#include <string>

#include "lean/status.hpp"
#include "python.hpp"

namespace lean::python {

/// The message with the library's field names replaced by the argument names of decode(). Needs no Python.
[[nodiscard]] std::string text_of(const Status& status);
/// The same as a Python string.
[[nodiscard]] Reference message_of(const Status& status);

/// Throws unless ok: ValueError, NotImplementedError for `unsupported`, RuntimeError for the workspace and the backend.
void check(const Status& status);

}  // namespace lean::python
