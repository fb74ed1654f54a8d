// The explanation of a schedule from sizes alone: no tensor exists.
#pragma once

#include <string>

#include "python.hpp"

namespace lean::python {

/// Arguments: format (0 text, 1 JSON, 2 SVG), (B, Hq, Hkv, d, dv, n_q, capacity, dtype, causal, window left, window right),
/// seqlens int32 [B], leftpad int32 [B] or None, options as decode() takes them.
[[nodiscard]] std::string schedule_text(PyObject* const* arguments, Py_ssize_t count);

}  // namespace lean::python
