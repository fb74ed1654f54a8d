// Numbers of a call that may be lists or plain numbers in Python: lengths, page ids, scales, slopes. On the host they are read
// here; for a device the framework makes an array of them. What the host holds is checked before the call.
#include <algorithm>
#include <limits>

#include "arguments.hpp"
#include "errors.hpp"

namespace lean::python {
namespace {

constexpr std::int64_t kMinInt32 = std::numeric_limits<std::int32_t>::min();
constexpr std::int64_t kMaxInt32 = std::numeric_limits<std::int32_t>::max();

bool is_list(PyObject* object) noexcept { return PyList_Check(object) || PyTuple_Check(object); }

std::int32_t to_int32(std::int64_t value, Argument which, std::size_t index) {
  if (value < kMinInt32 || value > kMaxInt32)
    raise(PyExc_ValueError, "%s[%zu] = %lld: must fit 32 bits", which.name(), index, static_cast<long long>(value));
  return static_cast<std::int32_t>(value);
}

std::int32_t int32_of(PyObject* number, Argument which, std::size_t index) {
  const Reference integer(PyBool_Check(number) ? nullptr : lean_number_index(number));
  if (integer == nullptr) {
    PyErr_Clear();
    raise(PyExc_TypeError, "%s[%zu] = %R: an integer is needed", which.name(), index, number);
  }
  int overflow = 0;
  const std::int64_t value = PyLong_AsLongLongAndOverflow(integer.get(), &overflow);
  if (overflow != 0) raise(PyExc_ValueError, "%s[%zu] = %R: must fit 32 bits", which.name(), index, number);
  return to_int32(value, which, index);
}

void check_count(Argument which, std::int64_t count, std::int64_t expected) {
  if (count != expected) {
    raise(PyExc_ValueError, "%s: its length is %lld, expected %lld", which.name(), static_cast<long long>(count),
          static_cast<long long>(expected));
  }
}

void check_one_axis(const Array& array, Argument which) {
  if (array.ndim != 1) raise(PyExc_ValueError, "%s: shape %s: expected one axis", which.name(), array.shape_text().c_str());
}

/// Elements of a one-axis array on the host.
std::vector<std::int32_t> copied(const Array& ints, Argument which) {
  std::vector<std::int32_t> copy(static_cast<std::size_t>(ints.shape[0]));
  for (std::size_t i = 0; i < copy.size(); ++i) {
    const std::int64_t at = static_cast<std::int64_t>(i) * ints.strides[0];
    copy[i] = ints.type == ElementType::kInt64 ? to_int32(static_cast<const std::int64_t*>(ints.data)[at], which, i)
                                               : static_cast<const std::int32_t*>(ints.data)[at];
  }
  return copy;
}

}  // namespace

float Call::float_of(PyObject* number, Argument which) {
  const double value = PyBool_Check(number) ? -1.0 : PyFloat_AsDouble(number);
  if (PyBool_Check(number) || (value == -1.0 && PyErr_Occurred() != nullptr)) {
    PyErr_Clear();
    raise(PyExc_TypeError, "%s: %R: a number is needed", which.name(), number);
  }
  return static_cast<float>(value);
}

/// framework.method(q, values), or of one argument where `second` is null.
Reference Call::from_framework(const char* method, PyObject* first, PyObject* second) const {
  const Reference name(interned(method));
  const Reference bound(checked(lean_get_attribute(framework_, name.get())));
  return Reference(checked(lean_call_with(bound.get(), first, second)));
}

std::int64_t Call::length_of(Argument which) {
  PyObject* const object = argument(which);
  if (is_list(object)) return PySequence_Size(object);
  const Array read = array(which);
  check_one_axis(read, which);
  return read.shape[0];
}

const std::int32_t* Call::keep(Argument which, std::vector<std::int32_t> values) {
  on_host_.push_back({.which = which, .values = std::move(values)});
  return on_host_.back().values.data();
}

/// `count` integers side by side. On the host, int64 and strided arrays are copied; on a device they are refused.
const std::int32_t* Call::int32_array(Argument which, std::int64_t count) {
  if (!given(which)) return nullptr;
  if (PyObject* const object = argument(which); is_list(object) || PyLong_Check(object)) return int32_numbers(which, count);
  const Array ints = array(which);
  const bool wide = ints.type == ElementType::kInt64 && !ints.on_cuda();
  if (ints.type != ElementType::kInt32 && !wide) {
    raise(PyExc_TypeError, "%s: %s: expected int32%s", which.name(), ints.type_text().c_str(), ints.on_cuda() ? "" : " or int64");
  }
  check_one_axis(ints, which);
  check_count(which, ints.shape[0], count);
  if (!wide && (ints.strides[0] == 1 || count <= 1)) return static_cast<const std::int32_t*>(ints.data);
  if (ints.on_cuda()) raise(PyExc_ValueError, "%s: must be contiguous on a device", which.name());
  return keep(which, copied(ints, which));
}

/// A list, or one number for every sequence.
const std::int32_t* Call::int32_numbers(Argument which, std::int64_t count) {
  PyObject* const object = argument(which);
  std::vector<std::int32_t> values;
  if (is_list(object)) {
    check_count(which, PySequence_Size(object), count);
    for (std::size_t i = 0; i < static_cast<std::size_t>(count); ++i) {
      const Reference number(checked(PySequence_GetItem(object, static_cast<Py_ssize_t>(i))));
      values.push_back(int32_of(number.get(), which, i));
    }
  } else {
    if (which != "seqlens" && which != "leftpad")
      raise(PyExc_TypeError, "%s = %R: an array or a list of %lld is needed", which.name(), object, static_cast<long long>(count));
    values.assign(static_cast<std::size_t>(count), int32_of(object, which, 0));
  }
  const std::int32_t* const data = keep(which, std::move(values));
  return q_.on_cuda() ? static_cast<const std::int32_t*>(on_device(which, "int32", data, count)) : data;
}

const float* Call::float_array(Argument which, std::int64_t count) {
  if (!given(which)) return nullptr;
  PyObject* const object = argument(which);
  if (is_list(object) || PyFloat_Check(object) || PyLong_Check(object)) {
    const std::int64_t given_count = is_list(object) ? PySequence_Size(object) : 1;
    check_count(which, given_count, count);
    std::vector<float>& values = numbers_.emplace_back();
    for (Py_ssize_t i = 0; is_list(object) && i < given_count; ++i)
      values.push_back(float_of(Reference(checked(PySequence_GetItem(object, i))).get(), which));
    if (!is_list(object)) values.push_back(float_of(object, which));
    return q_.on_cuda() ? static_cast<const float*>(on_device(which, "float32", values.data(), count)) : values.data();
  }
  const Array floats = array(which);
  if (floats.type != ElementType::kFloat32)
    raise(PyExc_TypeError, "%s: %s: expected float32", which.name(), floats.type_text().c_str());
  const bool one_number = floats.ndim == 0 && count == 1;
  if (!one_number) {
    check_one_axis(floats, which);
    check_count(which, floats.shape[0], count);
  }
  if (count > 1 && floats.strides[0] != 1) raise(PyExc_ValueError, "%s: must be contiguous", which.name());
  return static_cast<const float*>(floats.data);
}

/// These numbers on q's device, by its framework.
template <typename T>
const void* Call::on_device(Argument which, const char* method, const T* values, std::int64_t count) {
  if (framework_ == Py_None) raise(PyExc_TypeError, "%s: an array on the device of q is needed", which.name());
  if (is_elsewhere()) {
    raise(PyExc_ValueError,
          "%s: a list or a number, and stream is not the framework's current one: pass an array on the device of q", which.name());
  }
  const Reference list(checked(PyList_New(count)));
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* number = nullptr;
    if constexpr (std::is_same_v<T, float>)
      number = PyFloat_FromDouble(static_cast<double>(values[i]));
    else
      number = PyLong_FromLong(values[i]);
    if (PyList_SetItem(list.get(), i, checked(number)) < 0) throw ErrorIsSet{};
  }
  Reference moved = from_framework(method, argument("q"), list.get());
  const Array read = array(which, moved.get());
  owners_.push_back(std::move(moved));
  return read.data;
}

void Call::read_scales() {
  if (!traits_of(problem_.k.dtype).scaled) {
    if (given("k_scale") || given("v_scale")) raise(PyExc_ValueError, "k_scale, v_scale: are for float8 k and v only");
    return;
  }
  const auto several = [&](Argument which) {
    PyObject* const object = argument(which);
    if (object == nullptr || PyFloat_Check(object) || PyLong_Check(object)) return false;
    if (is_list(object)) return PySequence_Size(object) > 1;
    const Array read = array(which);
    return read.ndim == 1 && read.shape[0] > 1;
  };
  problem_.scales_per_head = several("k_scale") || several("v_scale");
  problem_.k_scales = float_array("k_scale", problem_.scales_per_head ? problem_.kv_heads : 1);
  problem_.v_scales = float_array("v_scale", problem_.scales_per_head ? problem_.kv_heads : 1);
}

/// The numbers of an argument where the host can read them, else null; with `device` they are copied to it.
const std::int32_t* Call::host_copy(Argument which, const std::int32_t* used, bool device) {
  if (used == nullptr || !q_.on_cuda()) return used;
  for (const OnHost& kept : on_host_) {
    if (kept.which == which) return kept.values.data();
  }
  if (!device) return nullptr;
  const Reference copy = from_framework("on_host", argument(which), nullptr);
  return keep(which, copied(read_array(copy.get(), which.name(), nullptr), which));
}

void Call::check_lengths(bool device) {
  Problem host = problem_;
  Reference table;
  host.cu_q_tokens = host_copy("cu_seqlens_q", problem_.cu_q_tokens, device);
  host.cu_kv_tokens = host_copy("cu_seqlens_k", problem_.cu_kv_tokens, device);
  host.kv_lengths = host_copy("seqlens", problem_.kv_lengths, device);
  host.kv_left_pad = host_copy("leftpad", problem_.kv_left_pad, device);
  host.pages.page_indptr = host_copy("page_indptr", problem_.pages.page_indptr, device);
  if (q_.on_cuda() && !device) {  // page ids past a length mean nothing, and not all lengths may be here
    host.pages.block_table = nullptr;
    host.pages.page_indices = nullptr;
  } else if (q_.on_cuda()) {
    host.pages.page_indices = host_copy("page_indices", problem_.pages.page_indices, device);
    if (host.pages.block_table != nullptr) {
      table = from_framework("on_host", argument("block_table"), nullptr);
      const Array copy = read_array(table.get(), "block_table", nullptr);
      host.pages.block_table = static_cast<const std::int32_t*>(copy.data);
      host.pages.block_table_stride = copy.strides[0];
    }
  }
  check_ends(host);
  check(lean::check_lengths(host));
}

/// What the library cannot know: how many query tokens and page ids there are to be spoken for.
void Call::check_ends(const Problem& host) const {
  const std::int64_t batch = problem_.batch;
  if (host.cu_q_tokens != nullptr && host.cu_q_tokens[batch] != problem_.total_q_tokens) {
    raise(PyExc_ValueError,
          "cu_seqlens_q[%lld] = %d: must be the number of q's tokens, %lld: q has shape %s, and layout '%s' is %s",
          static_cast<long long>(batch), host.cu_q_tokens[batch], static_cast<long long>(problem_.total_q_tokens),
          q_.shape_text().c_str(), heads_first_ ? "bhsd" : "bshd", heads_first_ ? "[Hq, tokens, d]" : "[tokens, Hq, d]");
  }
  if (host.pages.page_indptr != nullptr && host.pages.page_indptr[batch] > page_id_count_) {
    raise(PyExc_ValueError, "page_indptr[%lld] = %d: page_indices has %lld", static_cast<long long>(batch),
          host.pages.page_indptr[batch], static_cast<long long>(page_id_count_));
  }
}

std::string Call::text_of(const Status& status) const {
  std::string text = python::text_of(status);
  if (text.starts_with("q: heads") && text.ends_with("kv_heads")) {
    const char* const layout = heads_first_ ? "'bhsd' (heads before tokens)" : "'bshd' (tokens before heads)";
    text = "q: heads = " + std::to_string(problem_.q_heads) + ": must be a multiple of k's heads, " +
           std::to_string(problem_.kv_heads) + ": q " + q_.shape_text() + " and k " + k_.shape_text() + " are read in layout " +
           layout;
  } else if (text.ends_with("must equal q.dtype") || text.find("must equal q.dtype,") != std::string::npos) {
    text += std::string("; q is ") + q_.type_text();
  } else if (text.ends_with("must equal k.dtype")) {
    text += std::string("; k is ") + k_.type_text();
  }
  return text;
}

void Call::check(const Status& status) const {
  if (!status.ok()) raise(exception_for(status.code), "%s", text_of(status).c_str());
}

}  // namespace lean::python
