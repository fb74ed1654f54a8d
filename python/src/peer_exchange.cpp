// Exchanges over peer memory for Python (peer_exchange.hpp).
#include "peer_exchange.hpp"

#include <cstring>
#include <memory>

#include "errors.hpp"
#include "integrations/runtime/device.hpp"
#include "integrations/runtime/peer_memory.hpp"
#include "lean/lean.hpp"

namespace lean::python {
namespace {

using runtime::PeerMemory;

constexpr const char* kCapsule = "lean_attention.exchange";

std::int64_t integer(PyObject* object) {
  const long long value = PyLong_AsLongLong(object);
  if (value == -1 && PyErr_Occurred() != nullptr) throw ErrorIsSet{};
  return value;
}

std::int32_t small_integer(PyObject* object) {
  const std::int64_t value = integer(object);
  if (value != static_cast<std::int32_t>(value)) raise(PyExc_OverflowError, "_core: a number of more than 32 bits");
  return static_cast<std::int32_t>(value);
}

void* address(PyObject* object) {
  void* const value = PyLong_AsVoidPtr(object);
  if (value == nullptr && PyErr_Occurred() != nullptr) throw ErrorIsSet{};
  return value;
}

PeerMemory& memory_of(PyObject* capsule) { return *static_cast<PeerMemory*>(checked(PyCapsule_GetPointer(capsule, kCapsule))); }

void destroy(PyObject* capsule) { delete static_cast<PeerMemory*>(PyCapsule_GetPointer(capsule, kCapsule)); }

}  // namespace

Reference exchange_bytes_of(PyObject* const* arguments, Py_ssize_t count) {
  check_count(count, 4);
  const std::size_t bytes = exchange_bytes(small_integer(arguments[0]), integer(arguments[1]), small_integer(arguments[2]),
                                           static_cast<DType>(small_integer(arguments[3])));
  return Reference(checked(PyLong_FromSize_t(bytes)));
}

Reference make_exchange(PyObject* const* arguments, Py_ssize_t count) {
  check_count(count, 5);
  auto memory = std::make_unique<PeerMemory>(PeerMemory::Asked{.device_index = small_integer(arguments[0]),
                                                               .rank = small_integer(arguments[1]),
                                                               .ranks = small_integer(arguments[2]),
                                                               .bytes = static_cast<std::size_t>(integer(arguments[3])),
                                                               .limit_ns = integer(arguments[4])});
  const ExchangeHandle& handle = memory->handle();
  const Reference text(checked(
      PyBytes_FromStringAndSize(reinterpret_cast<const char*>(handle.bytes), static_cast<Py_ssize_t>(sizeof(handle.bytes)))));
  Reference capsule(checked(PyCapsule_New(memory.get(), kCapsule, destroy)));
  memory.release();
  return Reference(checked(PyTuple_Pack(2, capsule.get(), text.get())));
}

Reference open_exchange(PyObject* const* arguments, Py_ssize_t count) {
  check_count(count, 3);
  char* bytes = nullptr;
  Py_ssize_t length = 0;
  if (PyBytes_AsStringAndSize(arguments[2], &bytes, &length) < 0) throw ErrorIsSet{};
  ExchangeHandle handle;
  check_count(length, static_cast<Py_ssize_t>(sizeof(handle.bytes)));
  std::memcpy(handle.bytes, bytes, sizeof(handle.bytes));
  memory_of(arguments[0]).open(small_integer(arguments[1]), handle);
  return none();
}

Reference exchange(PyObject* const* arguments, Py_ssize_t count) {
  check_count(count, 9);
  const PeerMemory& memory = memory_of(arguments[0]);
  const runtime::device::Guard guard(memory.device_index());
  const ExchangedStates states{.o = address(arguments[1]),
                               .lse = static_cast<const float*>(address(arguments[2])),
                               .merged_o = address(arguments[3]),
                               .merged_lse = static_cast<float*>(address(arguments[4])),
                               .rows = integer(arguments[5]),
                               .value_dim = small_integer(arguments[6]),
                               .dtype = static_cast<DType>(small_integer(arguments[7]))};
  Options options;
  options.backend = Backend::kCuda;
  options.stream = address(arguments[8]);
  check(exchange_states(memory.exchange(), states, options));
  return none();
}

const Exchange& exchange_of(PyObject* capsule) { return memory_of(capsule).exchange(); }

Reference lengths_of_shard(PyObject* const* arguments, Py_ssize_t count) {
  check_count(count, 8);
  const TokenShard shard{
      .rank = small_integer(arguments[3]), .ranks = small_integer(arguments[4]), .block_tokens = small_integer(arguments[5])};
  const std::int32_t device = small_integer(arguments[6]);
  const runtime::device::Guard guard(device);
  Options options;
  options.backend = device < 0 ? Backend::kCpu : Backend::kCuda;
  options.stream = address(arguments[7]);
  check(shard_lengths(static_cast<const std::int32_t*>(address(arguments[0])), static_cast<std::int32_t*>(address(arguments[1])),
                      integer(arguments[2]), shard, options));
  return none();
}

Reference exchange_fault(PyObject* const* arguments, Py_ssize_t count) {
  check_count(count, 1);
  const Status status = exchange_status(memory_of(arguments[0]).exchange());
  return status.ok() ? none() : text_object(status.message);
}

Reference clear_exchange(PyObject* const* arguments, Py_ssize_t count) {
  check_count(count, 1);
  memory_of(arguments[0]).clear();
  return none();
}

}  // namespace lean::python
