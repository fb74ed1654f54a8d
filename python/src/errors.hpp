// A Status as a Python exception whose message names the argument as Python knows it.
#pragma once

#include "lean/status.hpp"
#include "python.hpp"

namespace lean::python {

/// The message with the library's field names replaced by the argument names of decode().
[[nodiscard]] Reference message_of(const Status& status);

/// Throws unless ok: ValueError, NotImplementedError for `unsupported`, RuntimeError for the workspace and the backend.
void check(const Status& status);

}  // namespace lean::python
