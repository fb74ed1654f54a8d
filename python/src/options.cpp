// Options of decode() from the tuple of integers that Options.encoded is.
#include "options.hpp"

#include <array>
#include <cstdint>

namespace lean::python {
namespace {

constexpr std::array kOptionNames = {
    "options.policy",  "options.splits",  "options.chunk_tokens",     "options.fixup",           "options.determinism",
    "options.workers", "options.cpu_isa", "options.dependent_launch", "options.check_workspace", "options.check_lengths"};

/// The tuple of lean_attention.Options.encoded.
Reference encoded(PyObject* options) {
  if (PyTuple_Check(options)) {
    Py_INCREF(options);
    return Reference(options);
  }
  static PyObject* const name = interned("encoded");
  Reference found(lean_get_attribute(options, name));
  if (found == nullptr || !PyTuple_Check(found.get())) {
    PyErr_Clear();
    raise(PyExc_TypeError, "options: %R: lean_attention.Options(...) is needed", options);
  }
  return found;
}

std::array<int, kOptionNames.size()> option_values(PyObject* options) {
  const Reference tuple = encoded(options);
  std::array<int, kOptionNames.size()> values{};
  if (PyTuple_Size(tuple.get()) != static_cast<Py_ssize_t>(values.size()))
    raise(PyExc_TypeError, "options: %R: %zu integers are needed, as Options(...).encoded has them", options, values.size());
  for (std::size_t i = 0; i < values.size(); ++i)
    values[i] = int_of(PyTuple_GetItem(tuple.get(), static_cast<Py_ssize_t>(i)), kOptionNames[i]);
  return values;
}

}  // namespace

int int_of(PyObject* value, const char* name) {
  const long long number = PyLong_AsLongLong(value);
  if (number == -1 && PyErr_Occurred() != nullptr) {
    PyErr_Clear();
    raise(PyExc_TypeError, "%s: %R: an integer is needed", name, value);
  }
  if (number < INT32_MIN || number > INT32_MAX) raise(PyExc_ValueError, "%s = %lld: must fit 32 bits", name, number);
  return static_cast<int>(number);
}

GivenOptions options_of(PyObject* options) {
  if (options == Py_None) return {};
  const auto values = option_values(options);
  return {.options = {.policy = {static_cast<Policy::Kind>(values[0]), values[1], values[2]},
                      .fixup = static_cast<Fixup>(values[3]),
                      .determinism = static_cast<Determinism>(values[4]),
                      .workers = values[5],
                      .cpu_isa = static_cast<CpuIsa>(values[6]),
                      .dependent_launch = values[7] != 0,
                      .check_workspace = values[8] != 0},
          .check_lengths = values[9] != 0};
}

}  // namespace lean::python
