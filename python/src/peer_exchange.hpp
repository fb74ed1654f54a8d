// What lean_attention.distributed needs for exchanges over peer memory: a rank's memory as a capsule, and calls on it.
// Addresses and counts come as numbers: the tensors are torch's, checked in Python. All throw ErrorIsSet, or
// runtime::device::Error.
#pragma once

#include "lean/exchange.hpp"
#include "python.hpp"

namespace lean::python {

/// (ranks, rows, value_dim, dtype): bytes of memory a rank needs.
[[nodiscard]] Reference exchange_bytes_of(PyObject* const* arguments, Py_ssize_t count);
/// (device index, rank, ranks, bytes, limit_ns): a capsule and its handle, bytes for the other ranks.
[[nodiscard]] Reference make_exchange(PyObject* const* arguments, Py_ssize_t count);
/// (capsule, rank, handle)
[[nodiscard]] Reference open_exchange(PyObject* const* arguments, Py_ssize_t count);
/// (capsule, o, lse, merged o, merged lse, rows, value_dim, dtype, stream)
[[nodiscard]] Reference exchange(PyObject* const* arguments, Py_ssize_t count);
/// What a capsule of make_exchange() stands for, until that is gone.
[[nodiscard]] const Exchange& exchange_of(PyObject* capsule);
/// (tokens, held, count, rank, ranks, block tokens, device index, stream): there, or on the CPU where the index is -1.
[[nodiscard]] Reference lengths_of_shard(PyObject* const* arguments, Py_ssize_t count);
/// (capsule): None, or what the first fault was.
[[nodiscard]] Reference exchange_fault(PyObject* const* arguments, Py_ssize_t count);
/// (capsule): zeroes this rank's memory.
[[nodiscard]] Reference clear_exchange(PyObject* const* arguments, Py_ssize_t count);

}  // namespace lean::python
