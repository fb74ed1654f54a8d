// A Status as a Python exception whose message names the argument as Python knows it.
#pragma once

#include <string>

#include "lean/status.hpp"
#include "python.hpp"

namespace lean::python {

/// The message with the library's field names replaced by the argument names of decode(). Needs no Python.
[[nodiscard]] std::string text_of(const Status& status);
[[nodiscard]] Reference text_object(const std::string& text);

/// ValueError for what the caller can mend, NotImplementedError for `unsupported`, RuntimeError for the workspace and the backend.
[[nodiscard]] PyObject* exception_for(StatusCode code) noexcept;

/// Throws unless ok.
void check(const Status& status);

/// Throws TypeError for an argument that decode() does not have.
[[noreturn]] void refuse_unknown(PyObject* name);

}  // namespace lean::python
