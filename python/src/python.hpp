// Python.h in its limited form (one extension for CPython 3.10 and newer, docs/adr/0007-python-binding.md), owned references, and
// errors.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <memory>

#include "interpreter_end.h"

namespace lean::python {

struct Decref {
  void operator()(PyObject* object) const noexcept { Py_XDECREF(object); }
};
using Reference = std::unique_ptr<PyObject, Decref>;

/// Thrown when a Python exception is set; the module's entry points turn it into a null result.
struct ErrorIsSet {};

/// Sets an exception of the given type with a printf-like message, and throws ErrorIsSet. PyErr_FormatV's formats only.
[[noreturn]] void raise(PyObject* type, const char* format, ...);

/// A string that lives as long as the process, for names that are looked up in every call.
[[nodiscard]] PyObject* interned(const char* text);

/// Throws when a call of the C API failed.
template <typename T>
T* checked(T* result) {
  if (result == nullptr) throw ErrorIsSet{};
  return result;
}

[[nodiscard]] Reference none() noexcept;

/// Throws TypeError unless an entry of the extension got that many arguments.
void check_count(Py_ssize_t count, Py_ssize_t expected);

}  // namespace lean::python
