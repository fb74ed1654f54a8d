// decode()'s arguments as a Problem, one after the other: what each may be, and how its shape and strides become fields.
#include "arguments.hpp"

#include <algorithm>
#include <cstddef>
#include <limits>
#include <utility>

#include "array_checks.hpp"
#include "errors.hpp"
#include "options.hpp"

namespace lean::python {
namespace {

constexpr std::int64_t kMaxInt32 = std::numeric_limits<std::int32_t>::max();

std::int32_t to_int32(std::int64_t value, const char* name) {
  if (value < 0 || value > kMaxInt32)
    raise(PyExc_ValueError, "%s = %lld: allowed 0 to 2147483647", name, static_cast<long long>(value));
  return static_cast<std::int32_t>(value);
}

void check_writable(const Array& array, Argument which) {
  if (array.was_negative) {
    raise(PyExc_ValueError, "%s: is a lazy negative (is_neg()), whose memory does not hold its values: cannot be written to",
          which.name());
  }
  if (!array.writable) raise(PyExc_ValueError, "%s: is read-only", which.name());
}

/// Which axis of an array is which; -1: it has none.
struct Axes {
  int sequence;  // or page
  int head;
  int token;
};

/// [B, H, n, d] or [B, n, H, d]; without the first axis when tokens are packed end to end.
constexpr Axes axes_of(bool heads_first, bool packed) noexcept {
  if (packed) return heads_first ? Axes{-1, 0, 1} : Axes{-1, 1, 0};
  return heads_first ? Axes{0, 1, 2} : Axes{0, 2, 1};
}

std::int64_t size(const Array& array, int axis) noexcept { return array.shape[static_cast<std::size_t>(axis)]; }
std::int64_t stride(const Array& array, int axis) noexcept { return axis < 0 ? 0 : array.strides[static_cast<std::size_t>(axis)]; }

Strides strides_of(const Array& array, const Axes& axes) noexcept {
  return {.sequence = stride(array, axes.sequence),
          .head = stride(array, axes.head),
          .token = stride(array, axes.token),
          .dim = stride(array, array.ndim - 1)};
}

void* handle_of(PyObject* stream) {
  void* const handle = PyLong_AsVoidPtr(stream);
  if (handle == nullptr && PyErr_Occurred() != nullptr) {
    PyErr_Clear();
    raise(PyExc_TypeError, "stream: %R: a cudaStream_t as an integer is needed", stream);
  }
  return handle;
}

/// The stream the framework of `q` works on, where the array itself does not tell.
void* stream_of(PyObject* framework, PyObject* q) {
  if (framework == Py_None || tells_stream(q)) return nullptr;
  static PyObject* const name = interned("stream");
  const Reference method(checked(lean_get_attribute(framework, name)));
  if (method.get() == Py_None) return nullptr;
  const Reference stream(checked(lean_call_with(method.get(), q, nullptr)));
  return stream.get() == Py_None ? nullptr : handle_of(stream.get());
}

}  // namespace

Call::Call(PyObject* framework, PyObject* q, PyObject* k, PyObject* v, PyObject* arguments) : framework_(framework) {
  take(arguments);
  for (const auto& [which, object] : {std::pair(Argument("q"), q), std::pair(Argument("k"), k), std::pair(Argument("v"), v)})
    arguments_[which.index()] = object;
  stream_ = given("stream") ? handle_of(argument("stream")) : stream_of(framework_, q);
  if (given("options")) {
    const GivenOptions read = options_of(argument("options"));
    options_ = read.options;
    wants_checked_lengths_ = read.check_lengths;
  }
  read_layout();
  read_queries();
  read_keys();
  read_lengths();
  read_outputs();
  read_scores();
  read_mask();
  read_append();
}

/// Whether the stream that is given is another than the framework's current one, on which it would make arrays for the call.
bool Call::is_elsewhere() const {
  if (!given("stream")) return false;
  PyObject* const q = argument("q");
  return stream_ != (tells_stream(q) ? current_stream(q, q_.device) : stream_of(framework_, q));
}

/// Sorts the given arguments into the table. Names in a call are the table's own strings, so most are found by identity.
void Call::take(PyObject* arguments) {
  static const std::array names = [] {
    std::array<PyObject*, kArgumentNames.size()> all{};
    for (std::size_t i = 0; i < all.size(); ++i) all[i] = interned(kArgumentNames[i]);
    return all;
  }();
  Py_ssize_t position = 0;
  PyObject* name = nullptr;
  PyObject* value = nullptr;
  while (PyDict_Next(arguments, &position, &name, &value) != 0) {
    std::size_t at = static_cast<std::size_t>(std::find(names.begin(), names.end(), name) - names.begin());
    for (std::size_t i = 0; at == names.size() && i < names.size(); ++i) {
      if (PyUnicode_CompareWithASCIIString(name, kArgumentNames[i]) == 0) at = i;
    }
    if (at == names.size()) refuse_unknown(name);
    arguments_[at] = value == Py_None ? nullptr : value;
  }
}

/// An array on q's device.
Array Call::array(Argument which, PyObject* object) {
  Array read = read_array(object == nullptr ? Py_None : object, which.name(), stream_);
  if (which != "q") {
    if (!read.same_device(q_)) {
      raise(PyExc_ValueError, "%s: is on %s: must be on the device of q, %s", which.name(), read.device_text().c_str(),
            q_.device_text().c_str());
    }
    if (read.of_torch && !q_.of_torch) refuse_gradient(object, which.name());  // else the door has looked
  }
  spans_[which.index()] = span_of(read);
  if (read.owner != nullptr) owners_.push_back(std::move(read.owner));
  return read;
}

std::int64_t Call::integer(Argument which, std::int64_t otherwise) const {
  if (!given(which)) return otherwise;
  const long long value = PyLong_AsLongLong(argument(which));
  if (value == -1 && PyErr_Occurred() != nullptr) {
    PyErr_Clear();
    raise(PyExc_TypeError, "%s: %R: an integer is needed", which.name(), argument(which));
  }
  return value;
}

float Call::number(Argument which, float otherwise) const { return given(which) ? float_of(argument(which), which) : otherwise; }

bool Call::flag(Argument which) const {
  if (!given(which)) return false;
  PyObject* const value = argument(which);
  bool is_flag = PyObject_Size(value) < 0;  // "no" and [False] would be true
  PyErr_Clear();
  const bool yes = is_flag && truth(which);
  if (is_flag)
    is_flag = PyObject_RichCompareBool(value, yes ? Py_True : Py_False, Py_EQ) == 1;  // as would 0.5, one argument too far
  PyErr_Clear();
  if (!is_flag) raise(PyExc_TypeError, "%s: %R: True or False is needed", which.name(), value);
  return yes;
}

bool Call::truth(Argument which) const {
  const int value = PyObject_IsTrue(argument(which));
  if (value < 0) throw ErrorIsSet{};
  return value != 0;
}

void Call::read_layout() {
  if (!given("layout")) return;
  PyObject* const text = argument("layout");
  const bool is_text = PyUnicode_Check(text) != 0;
  heads_first_ = is_text && PyUnicode_CompareWithASCIIString(text, "bhsd") == 0;
  if (!heads_first_ && !(is_text && PyUnicode_CompareWithASCIIString(text, "bshd") == 0))
    raise(PyExc_ValueError, "layout = %R: allowed 'bhsd' (heads before tokens), 'bshd' (tokens before heads)", text);
}

void Call::read_queries() {
  q_ = array("q");
  const bool packed = given("cu_seqlens_q");
  one_token_ = !packed && q_.ndim == 3;
  if (packed) {
    check_dims(q_, "q", 3, heads_first_ ? "[Hq, total tokens, d] with cu_seqlens_q" : "[total tokens, Hq, d] with cu_seqlens_q");
  } else if (!one_token_) {
    check_dims(q_, "q", 4, heads_first_ ? "[B, Hq, n_q, d] or [B, Hq, d]" : "[B, n_q, Hq, d] or [B, Hq, d]");
  }
  const Axes axes = one_token_ ? Axes{0, 1, -1} : axes_of(heads_first_, packed);
  problem_.q = {.data = q_.data, .dtype = dtype_of(q_, "q"), .strides = strides_of(q_, axes)};
  problem_.q_heads = to_int32(size(q_, axes.head), "q: its number of heads");
  problem_.head_dim = to_int32(size(q_, q_.ndim - 1), "q: its head dim");
  options_.backend = q_.on_cuda() ? Backend::kCuda : Backend::kCpu;
  if (given("stream") && !q_.on_cuda()) raise(PyExc_ValueError, "stream: q is on %s, which has none", q_.device_text().c_str());
  options_.stream =
      !given("stream") && q_.on_cuda() && tells_stream(argument("q")) ? current_stream(argument("q"), q_.device) : stream_;
  if (packed) {
    problem_.total_q_tokens = size(q_, axes.token);
    problem_.batch = length_of("cu_seqlens_q") - 1;
    if (problem_.batch < 0) raise(PyExc_ValueError, "cu_seqlens_q: is empty: expected [B + 1]");
    problem_.cu_q_tokens = int32_array("cu_seqlens_q", problem_.batch + 1);
    problem_.q_tokens = to_int32(integer("max_seqlen_q", std::max<std::int64_t>(problem_.total_q_tokens, 1)), "max_seqlen_q");
    if (problem_.total_q_tokens == 0 && problem_.q_tokens == 0) problem_.q_tokens = 1;  // the most of no queries
  } else {
    if (given("max_seqlen_q")) raise(PyExc_ValueError, "max_seqlen_q: is for cu_seqlens_q");
    problem_.batch = size(q_, axes.sequence);
    problem_.q_tokens = one_token_ ? 1 : to_int32(size(q_, axes.token), "q: its number of tokens");
    if (problem_.q_tokens == 0) raise(PyExc_ValueError, "q: its number of tokens = 0: allowed 1 or more");
  }
}

/// Where keys lie is said in one way, and all that is given about it is read.
void Call::check_keys_said_once() const {
  const bool table = given("block_table"), indptr = given("page_indptr"), indices = given("page_indices");
  if (table && (indptr || indices))
    raise(PyExc_ValueError, "%s: block_table says where the pages are: only one may be given",
          indptr ? "page_indptr" : "page_indices");
  if (indices && !indptr) raise(PyExc_ValueError, "page_indptr: must be given with page_indices");
  const bool packed = given("cu_seqlens_k"), paged = table || indptr;
  if (packed && paged) raise(PyExc_ValueError, "cu_seqlens_k: is for packed keys: pages have seqlens");
  if (given("max_seqlen_k") && !packed && !paged)
    raise(PyExc_ValueError, "max_seqlen_k: is for pages and cu_seqlens_k: seqlens say how many of k's tokens there are");
}

void Call::read_keys() {
  k_ = array("k");
  v_ = array("v");
  const Array& k = k_;
  const Array& v = v_;
  const bool paged = given("block_table") || given("page_indptr");
  const bool packed = given("cu_seqlens_k");
  check_keys_said_once();
  const bool one_token_pages = paged && k.ndim == 3;  // [slots, Hkv, d]
  Axes axes = axes_of(heads_first_, packed);
  if (one_token_pages) {
    axes = {0, 1, -1};
  } else if (packed) {
    check_dims(k, "k", 3, heads_first_ ? "[Hkv, total tokens, d] with cu_seqlens_k" : "[total tokens, Hkv, d] with cu_seqlens_k");
  } else if (paged) {
    check_dims(k, "k", 4, heads_first_ ? "[pages, Hkv, page, d] or [slots, Hkv, d]" : "[pages, page, Hkv, d] or [slots, Hkv, d]");
  } else {
    check_dims(k, "k", 4, heads_first_ ? "[B, Hkv, n_kv, d]" : "[B, n_kv, Hkv, d]");
  }
  check_dims(v, "v", k.ndim, "as many axes as k");
  for (int axis = 0; axis + 1 < k.ndim; ++axis) check_size(v, "v", size(v, axis), size(k, axis), "an axis of k's");
  check_size(k, "k", size(k, k.ndim - 1), problem_.head_dim, "head dim");
  problem_.k = {.data = k.data, .dtype = dtype_of(k, "k"), .strides = strides_of(k, axes)};
  problem_.v = {.data = v.data, .dtype = dtype_of(v, "v"), .strides = strides_of(v, axes)};
  problem_.kv_heads = to_int32(size(k, axes.head), "k: its number of heads");
  problem_.value_dim = to_int32(size(v, v.ndim - 1), "v: its head dim");
  if (problem_.value_dim == 0) raise(PyExc_ValueError, "v: shape %s: its head dim must not be 0", v.shape_text().c_str());
  const std::int64_t tokens = one_token_pages ? 1 : size(k, axes.token);
  if (paged) {
    problem_.pages.page_tokens = to_int32(tokens, "k: its page size");
    problem_.pages.page_count = k.shape[0];
    read_pages(k);
  } else if (packed) {
    problem_.total_kv_tokens = tokens;
    problem_.cu_kv_tokens = int32_array("cu_seqlens_k", problem_.batch + 1);
    problem_.kv_capacity = to_int32(integer("max_seqlen_k", tokens), "max_seqlen_k");
  } else {
    check_size(k, "k", k.shape[0], problem_.batch, "the batch");
    problem_.kv_capacity = to_int32(tokens, "k: its number of tokens");
  }
  if (paged && problem_.pages.page_count == 0) problem_.kv_capacity = 0;  // whatever a table has columns for
  // Empty arrays have addresses too.
  if (problem_.kv_capacity == 0 && (integer("max_seqlen_k", 1) > 0 || problem_.pages.page_count == 0))
    problem_.k.data = problem_.v.data = nullptr;
  read_scales();
}

/// Stands for a table without entries, which some libraries keep at null: null is no table.
constexpr std::int32_t kNoPages = 0;

void Call::read_pages(const Array& k) {
  std::int64_t pages = 0;
  if (given("block_table")) {
    const Array table = array("block_table");
    check_dims(table, "block_table", 2, "[B, pages of a sequence]");
    check_size(table, "block_table", table.shape[0], problem_.batch, "the batch");
    if (table.type != ElementType::kInt32) raise(PyExc_TypeError, "block_table: %s: expected int32", table.type_text().c_str());
    if (table.shape[0] > 0 && table.shape[1] > 1 && table.strides[1] != 1)
      raise(PyExc_ValueError, "block_table: rows must be contiguous");
    problem_.pages.block_table = table.data == nullptr ? &kNoPages : static_cast<const std::int32_t*>(table.data);
    problem_.pages.block_table_stride = table.strides[0];
    pages = table.shape[1];
  } else {
    if (!given("page_indices")) raise(PyExc_ValueError, "page_indices: must be given with page_indptr");
    page_id_count_ = length_of("page_indices");
    problem_.pages.page_indptr = int32_array("page_indptr", problem_.batch + 1);
    problem_.pages.page_indices = int32_array("page_indices", page_id_count_);
    if (problem_.pages.page_indices == nullptr) problem_.pages.page_indices = &kNoPages;
    pages = page_id_count_;
  }
  if (k.ndim == 4 && problem_.pages.page_tokens == 0)
    raise(PyExc_ValueError, "k: shape %s: pages hold no token", k.shape_text().c_str());
  const std::int64_t most = pages > kMaxInt32 / problem_.pages.page_tokens ? kMaxInt32 : pages * problem_.pages.page_tokens;
  const std::int32_t asked = to_int32(integer("max_seqlen_k", most), "max_seqlen_k");
  problem_.kv_capacity = static_cast<std::int32_t>(std::min<std::int64_t>(asked, most));  // a table may be a rank's part of it
}

void Call::read_lengths() {
  if (given("block_table") && !given("seqlens"))
    raise(PyExc_ValueError, "seqlens: must be given with block_table, whose rows may end in unused pages");
  problem_.kv_lengths = int32_array("seqlens", problem_.batch);
  problem_.kv_left_pad = int32_array("leftpad", problem_.batch);
}

void Call::read_outputs() {
  if (!given("out")) raise(PyExc_TypeError, "out: an array is needed");
  const Array out = array("out");
  check_writable(out, "out");
  check_dims(out, "out", q_.ndim, "the axes of q");
  for (int axis = 0; axis + 1 < q_.ndim; ++axis) check_size(out, "out", size(out, axis), size(q_, axis), "an axis of q's");
  check_size(out, "out", size(out, out.ndim - 1), problem_.value_dim, "head dim");
  const bool packed = given("cu_seqlens_q");
  const Axes axes = one_token_ ? Axes{0, 1, -1} : axes_of(heads_first_, packed);
  problem_.o = {.data = out.data, .dtype = dtype_of(out, "out"), .strides = strides_of(out, axes)};
  if (!given("lse")) return;
  const Array lse = array("lse");
  check_writable(lse, "lse");
  if (lse.type != ElementType::kFloat32) raise(PyExc_TypeError, "lse: %s: expected float32", lse.type_text().c_str());
  problem_.lse.data = static_cast<float*>(lse.data);
  const int head_axis = packed ? 0 : 1;
  if (packed) {
    check_dims(lse, "lse", 2, "[Hq, total tokens]");
    check_size(lse, "lse", lse.shape[1], problem_.total_q_tokens, "tokens");
  } else {
    check_dims(lse, "lse", one_token_ ? 2 : 3, one_token_ ? "[B, Hq]" : "[B, Hq, n_q]");
    check_size(lse, "lse", lse.shape[0], problem_.batch, "the batch");
    if (!one_token_) check_size(lse, "lse", lse.shape[2], problem_.q_tokens, "tokens");
    problem_.lse.sequence_stride = lse.strides[0];
  }
  check_size(lse, "lse", size(lse, head_axis), problem_.q_heads, "heads");
  problem_.lse.head_stride = stride(lse, head_axis);
  problem_.lse.token_stride = one_token_ ? 0 : stride(lse, head_axis + 1);
}

/// Stands for new tokens of which there are none, kept at null as a table without entries may be: null appends nothing, and has no
/// rotary embedding.
alignas(std::max_align_t) constexpr std::byte kNoTokens{};

/// New keys have q's tokens and k's heads; they are laid out as q is.
void Call::read_append() {
  const bool rotates = given("rotary_cos") || given("rotary_sin");
  if (!given("append_k") && !given("append_v")) {
    if (rotates) raise(PyExc_ValueError, "rotary_cos, rotary_sin: need append_k and append_v");
    return;
  }
  if (!given("append_k") || !given("append_v")) raise(PyExc_ValueError, "append_k, append_v: both or none must be given");
  if (!given("seqlens") && !given("cu_seqlens_k"))
    raise(PyExc_ValueError, "seqlens: must be given with append_k, whose tokens are the last of them");
  check_writable(k_, "k");
  check_writable(v_, "v");
  const bool packed = given("cu_seqlens_q");
  const Axes axes = one_token_ ? Axes{0, 1, -1} : axes_of(heads_first_, packed);
  const auto read = [&](Argument which, std::int32_t dims) -> TensorView {
    const Array added = array(which);
    check_dims(added, which, q_.ndim, "the axes of q, with k's heads");
    for (int axis = 0; axis + 1 < q_.ndim; ++axis) {
      check_size(added, which, size(added, axis), axis == axes.head ? problem_.kv_heads : size(q_, axis),
                 axis == axes.head ? "heads" : "an axis of q's");
    }
    check_size(added, which, size(added, added.ndim - 1), dims, "head dim");
    const void* const data = added.data == nullptr ? &kNoTokens : added.data;
    return {.data = data, .dtype = dtype_of(added, which.name()), .strides = strides_of(added, axes)};
  };
  problem_.append.k = read("append_k", problem_.head_dim);
  problem_.append.v = read("append_v", problem_.value_dim);
  if (!rotates) return;
  if (!given("rotary_cos") || !given("rotary_sin")) raise(PyExc_ValueError, "rotary_cos, rotary_sin: both or none must be given");
  const auto table = [&](Argument which) -> const float* {
    const Array angles = array(which);
    if (angles.type != ElementType::kFloat32)
      raise(PyExc_TypeError, "%s: %s: expected float32", which.name(), angles.type_text().c_str());
    check_dims(angles, which, 2, "[positions, rotary_dim / 2]");
    if ((angles.shape[1] > 1 && angles.strides[1] != 1) || (angles.shape[0] > 1 && angles.strides[0] != angles.shape[1]))
      raise(PyExc_ValueError, "%s: must be contiguous", which.name());
    check_size(angles, which, angles.shape[1], problem_.append.rotary_dim / 2, "rotary_dim / 2");
    if (angles.shape[0] < problem_.kv_capacity) {
      raise(PyExc_ValueError, "%s: shape %s: expected a row for each of %d positions", which.name(), angles.shape_text().c_str(),
            static_cast<int>(problem_.kv_capacity));
    }
    return static_cast<const float*>(angles.data);
  };
  problem_.append.rotary_dim = to_int32(2 * size(array("rotary_cos"), 1), "rotary_cos: its width");
  problem_.append.rotary_cos = table("rotary_cos");
  problem_.append.rotary_sin = table("rotary_sin");
  problem_.append.rotary_interleaved = flag("rotary_interleaved");
  problem_.append.rotary_absolute = flag("rotary_absolute");
}

CallDevice device_of(PyObject* framework, PyObject* q, PyObject* stream) {
  void* given = stream == Py_None ? stream_of(framework, q) : handle_of(stream);
  const Array array = read_array(q, "q", given);
  if (!array.on_cuda()) return {.index = -1, .stream = nullptr};
  return {.index = array.device.index, .stream = stream == Py_None && tells_stream(q) ? current_stream(q, array.device) : given};
}

}  // namespace lean::python
