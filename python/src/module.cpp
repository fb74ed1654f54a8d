// The extension lean_attention._core: entry points, nothing else. Users call lean_attention.decode() and friends, which pass q,
// k, v and a dict of what else was given.
#include <string>
#include <utility>

#include "arguments.hpp"
#include "errors.hpp"
#include "integrations/runtime/call.hpp"
#include "integrations/runtime/device.hpp"
#include "integrations/runtime/executor.hpp"
#include "integrations/runtime/workspaces.hpp"
#include "jax_call.hpp"
#include "lean/lean.hpp"
#include "lean/limits.hpp"
#include "peer_exchange.hpp"
#include "schedule_text.hpp"

namespace lean::python {
namespace {

namespace device = runtime::device;

/// Runs `body`, turning C++ exceptions into Python's.
template <typename Body>
PyObject* guarded(Body&& body) noexcept {
  try {
    return body().release();
  } catch (const ErrorIsSet&) {
    return nullptr;
  } catch (const std::bad_alloc&) {
    return PyErr_NoMemory();
  } catch (const device::Absent& absent) {
    PyErr_Format(PyExc_NotImplementedError, "q: is on a CUDA device: %s", absent.what());
    return nullptr;
  } catch (const device::Error& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
}

std::int32_t device_index(const Call& call) noexcept { return call.options().backend == Backend::kCuda ? call.device().index : -1; }

/// Other Python threads run while the CPU computes; a CUDA call only enqueues.
Status decode_unlocked(const Call& call, const Options& options) {
  if (options.backend == Backend::kCuda) return runtime::decode(call.problem(), options, call.device().index);
  PyThreadState* const state = PyEval_SaveThread();
  Status status;
  bool exhausted = false;
  try {
    status = runtime::decode(call.problem(), options, -1);
  } catch (const std::bad_alloc&) {
    exhausted = true;
  }
  lean_restore_thread(state);
  if (exhausted) throw std::bad_alloc();
  return status;
}

/// (framework, q, k, v, arguments)
Call call_of(PyObject* const* arguments, Py_ssize_t count) {
  check_count(count, 5);
  return Call(arguments[0], arguments[1], arguments[2], arguments[3], arguments[4]);
}

/// What is looked at here, then the call. `exchange`: of which it is a part, or null.
Status decoded(Call& call, const Exchange* exchange) {
  const device::Guard guard(device_index(call));
  Options options = call.options();
  const Executor executor = runtime::executor_for(options.workers);
  options.executor = &executor;
  options.exchange = exchange;
  if (options.backend == Backend::kCpu || call.has_numbers_on_host() || call.wants_checked_lengths())
    call.check_lengths(call.wants_checked_lengths());
  call.check_outputs_apart();
  call.check_new_tokens_apart();
  return decode_unlocked(call, options);
}

PyObject* decode_entry(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  return guarded([&] {
    Call call = call_of(arguments, count);
    call.check(decoded(call, nullptr));
    return none();
  });
}

/// (framework, q, k, v, arguments, exchange): false where the call is none that exchanges in its own launch; nothing is done then.
PyObject* decode_exchanged_entry(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  return guarded([&] {
    check_count(count, 6);
    Call call = call_of(arguments, count - 1);
    const Status status = decoded(call, &exchange_of(arguments[count - 1]));
    if (status.code != StatusCode::kUnsupported) call.check(status);
    return Reference(checked(PyBool_FromLong(status.ok())));
  });
}

/// Lengths and page ids, on whatever device.
PyObject* check_lengths_entry(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  return guarded([&] {
    Call call = call_of(arguments, count);
    call.check_lengths(true);
    return none();
  });
}

/// None, or (code, message).
Reference found(const Status& status, Reference message) {
  if (status.ok()) return none();
  return Reference(checked(Py_BuildValue("(sO)", name_of(status.code), message.get())));
}

PyObject* supports_entry(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  return guarded([&] {
    const Call call = call_of(arguments, count);
    const device::Guard guard(device::built() ? device_index(call) : -1);
    Options options = call.options();
    const Executor executor = runtime::executor_for(options.workers);
    options.executor = &executor;
    const Status status = supports(call.problem(), options);
    return found(status, text_object(call.text_of(status)));
  });
}

/// (framework, q, stream, reset): None, or (code, message).
PyObject* sticky_status_entry(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  return guarded([&] {
    check_count(count, 4);
    const CallDevice at = device_of(arguments[0], arguments[1], arguments[2]);
    Options options;
    options.backend = at.index < 0 ? Backend::kCpu : Backend::kCuda;
    options.stream = at.stream;
    const device::Guard guard(at.index);
    const Workspace held = runtime::workspace_for(options, at.index, {});
    if (held.state == nullptr) return none();
    const Status status = sticky_status(held, options);
    if (!status.ok() && PyObject_IsTrue(arguments[3]) == 1) check(reset_workspace(held, options));
    return found(status, text_object(text_of(status)));
  });
}

/// What jax.jit keeps of a call (jax_call.hpp).
PyObject* image_entry(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  return guarded([&] { return image_of(call_of(arguments, count)); });
}

PyObject* jax_handlers_entry(PyObject*, PyObject*) { return guarded(jax_handlers); }

/// (framework, o_a, lse_a, o_b, lse_b): o [rows, dv] of one type, lse [rows] float32, all dense and on one device; the first
/// two are replaced. lean_attention._merge has made them so.
PyObject* merge_states_entry(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  return guarded([&] {
    check_count(count, 5);
    constexpr const char* kNames[] = {"o_a", "lse_a", "o_b", "lse_b"};
    const CallDevice at = device_of(arguments[0], arguments[1], Py_None);
    std::array<Array, 4> arrays;
    for (std::size_t i = 0; i < arrays.size(); ++i) {
      arrays[i] = read_array(arguments[i + 1], kNames[i], at.stream);
      const bool is_o = i % 2 == 0;
      const auto& shape = arrays[i].shape;
      const auto& strides = arrays[i].strides;
      const bool dense = (shape[0] < 2 || strides[0] == (is_o ? shape[1] : 1)) && (!is_o || shape[1] < 2 || strides[1] == 1);
      if (arrays[i].ndim != (is_o ? 2 : 1) || !dense || arrays[i].type != (is_o ? arrays[0].type : ElementType::kFloat32)) {
        raise(PyExc_ValueError, "%s: dense %s is needed", kNames[i], is_o ? "[rows, dv] of one type" : "float32 [rows]");
      }
      if (!arrays[i].same_device(arrays[0])) {
        raise(PyExc_ValueError, "%s: on %s, o_a on %s", kNames[i], arrays[i].device_text().c_str(),
              arrays[0].device_text().c_str());
      }
    }
    if (at.index >= 0 && !device::built())
      raise(PyExc_NotImplementedError, "o_a: is on a CUDA device: this build has no CUDA backend");
    const device::Guard guard(at.index);
    Options options;
    options.backend = at.index < 0 ? Backend::kCpu : Backend::kCuda;
    options.stream = at.stream;
    const auto lse = [&](std::size_t i) { return static_cast<float*>(arrays[i].data); };
    check(merge_states(arrays[0].data, lse(1), arrays[2].data, lse(3), arrays[0].shape[0],
                       static_cast<std::int32_t>(arrays[0].shape[1]), dtype_of(arrays[0], "o_a"), options));
    return none();
  });
}

/// An entry that does what a function of another file says.
template <Reference (*kBody)(PyObject* const*, Py_ssize_t)>
PyObject* entry_of(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  return guarded([&] { return kBody(arguments, count); });
}

PyObject* schedule_entry(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  return guarded([&] {
    const std::string text = schedule_text(arguments, count);
    return Reference(checked(PyUnicode_FromStringAndSize(text.data(), static_cast<Py_ssize_t>(text.size()))));
  });
}

PyObject* machine_entry(PyObject*, PyObject*) {
  return guarded([] {
    Reference names(checked(PyList_New(0)));
    for (int isa = static_cast<int>(CpuIsa::kScalar); isa <= static_cast<int>(CpuIsa::kAmxBf16); ++isa) {
      if (!cpu_isa_available(static_cast<CpuIsa>(isa))) continue;
      const Reference name(checked(PyUnicode_FromString(name_of(static_cast<CpuIsa>(isa)))));
      if (PyList_Append(names.get(), name.get()) < 0) throw ErrorIsSet{};
    }
    return Reference(
        checked(Py_BuildValue("{s:s,s:O,s:i,s:s,s:O,s:i}", "cpu_isa", name_of(best_cpu_isa()), "cpu_isas", names.get(), "threads",
                              static_cast<int>(runtime::executor_for(0).worker_count), "executor", runtime::threads_name(),
                              "cuda_built", device::built() ? Py_True : Py_False, "cuda_devices", device::count())));
  });
}

PyObject* clear_workspaces_entry(PyObject*, PyObject*) {
  runtime::clear_workspaces();
  return none().release();
}

PyObject* find_openmp_entry(PyObject*, PyObject*) {
  runtime::find_openmp();
  return none().release();
}

PyObject* after_fork_entry(PyObject*, PyObject*) {
  runtime::after_fork_in_child();
  return none().release();
}

using FastFunction = PyObject* (*)(PyObject*, PyObject* const*, Py_ssize_t);
PyCFunction as_method(FastFunction function) noexcept {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

PyMethodDef g_methods[] = {
    {"decode", as_method(decode_entry), METH_FASTCALL, nullptr},
    {"decode_exchanged", as_method(decode_exchanged_entry), METH_FASTCALL, nullptr},
    {"supports", as_method(supports_entry), METH_FASTCALL, nullptr},
    {"check_lengths", as_method(check_lengths_entry), METH_FASTCALL, nullptr},
    {"sticky_status", as_method(sticky_status_entry), METH_FASTCALL, nullptr},
    {"image", as_method(image_entry), METH_FASTCALL, nullptr},
    {"jax_handlers", jax_handlers_entry, METH_NOARGS, nullptr},
    {"merge_states", as_method(merge_states_entry), METH_FASTCALL, nullptr},
    {"schedule", as_method(schedule_entry), METH_FASTCALL, nullptr},
    {"exchange_bytes", as_method(entry_of<exchange_bytes_of>), METH_FASTCALL, nullptr},
    {"make_exchange", as_method(entry_of<make_exchange>), METH_FASTCALL, nullptr},
    {"open_exchange", as_method(entry_of<open_exchange>), METH_FASTCALL, nullptr},
    {"exchange", as_method(entry_of<exchange>), METH_FASTCALL, nullptr},
    {"shard_lengths", as_method(entry_of<lengths_of_shard>), METH_FASTCALL, nullptr},
    {"exchange_fault", as_method(entry_of<exchange_fault>), METH_FASTCALL, nullptr},
    {"clear_exchange", as_method(entry_of<clear_exchange>), METH_FASTCALL, nullptr},
    {"machine", machine_entry, METH_NOARGS, nullptr},
    {"clear_workspaces", clear_workspaces_entry, METH_NOARGS, nullptr},
    {"find_openmp", find_openmp_entry, METH_NOARGS, nullptr},
    {"after_fork_in_child", after_fork_entry, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

/// Adds a tuple of names, name_at(i) of each i in [0, count).
template <typename TName>
bool add_names(PyObject* module, const char* constant, std::size_t count, TName name_at) {
  Reference names(PyTuple_New(static_cast<Py_ssize_t>(count)));
  if (names == nullptr) return false;
  for (std::size_t i = 0; i < count; ++i) {
    PyObject* const name = PyUnicode_FromString(name_at(i));
    if (name == nullptr || PyTuple_SetItem(names.get(), static_cast<Py_ssize_t>(i), name) < 0) return false;
  }
  return PyModule_AddObjectRef(module, constant, names.get()) == 0;
}

int execute(PyObject* module) {
  const auto argument = [](std::size_t i) { return kArgumentNames[i]; };
  const auto query_dtype = [](std::size_t i) { return traits_of(kQueryDTypes[i]).name; };
  const auto scaled_dtype = [](std::size_t i) { return traits_of(kScaledDTypes[i]).name; };
  if (!add_names(module, "ARGUMENTS", kArgumentNames.size(), argument)) return -1;
  if (!add_names(module, "QUERY_DTYPES", kQueryDTypes.size(), query_dtype)) return -1;
  if (!add_names(module, "SCALED_DTYPES", kScaledDTypes.size(), scaled_dtype)) return -1;
  if (PyModule_AddIntConstant(module, "MAX_HEAD_DIM", kMaxHeadDim) < 0) return -1;
  if (PyModule_AddIntConstant(module, "WIDEST_CUDA_HEAD", kWidestCudaHead) < 0) return -1;
  if (PyModule_AddIntConstant(module, "MAX_RANKS", Exchange::kMaxRanks) < 0) return -1;
  return PyModule_AddStringConstant(module, "VERSION", LEAN_VERSION_STRING);
}

PyModuleDef_Slot g_slots[] = {{Py_mod_exec, reinterpret_cast<void*>(execute)}, {0, nullptr}};

PyModuleDef g_module = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "lean_attention._core",
    .m_doc = "The library behind lean_attention. Not a public interface.",
    .m_size = 0,
    .m_methods = g_methods,
    .m_slots = g_slots,
    .m_traverse = nullptr,
    .m_clear = nullptr,
    .m_free = nullptr,
};

}  // namespace
}  // namespace lean::python

PyMODINIT_FUNC PyInit__core() { return PyModuleDef_Init(&lean::python::g_module); }
