#include "arguments.hpp"

#include <algorithm>
#include <limits>
#include <string_view>

namespace lean::python {
namespace {

constexpr std::int64_t kMaxInt32 = std::numeric_limits<std::int32_t>::max();

const char* name_of(Argument which) noexcept { return kArgumentNames[static_cast<std::size_t>(which)]; }

std::int32_t to_int32(std::int64_t value, const char* name) {
  if (value < 0 || value > kMaxInt32)
    raise(PyExc_ValueError, "%s = %lld: allowed 0 to 2147483647", name, static_cast<long long>(value));
  return static_cast<std::int32_t>(value);
}

void check_dims(const Array& array, Argument which, int dims, const char* axes) {
  if (array.ndim != dims) {
    raise(PyExc_ValueError, "%s: shape %s: expected %s", name_of(which), array.shape_text().c_str(), axes);
  }
}

void check_size(const Array& array, Argument which, std::int64_t size, std::int64_t expected, const char* axis) {
  if (size != expected) {
    raise(PyExc_ValueError, "%s: shape %s: %s is %lld, expected %lld", name_of(which), array.shape_text().c_str(), axis,
          static_cast<long long>(size), static_cast<long long>(expected));
  }
}

DType dtype_of(const Array& array, Argument which) {
  switch (array.type) {
    case ElementType::kFloat32: return DType::kFloat32;
    case ElementType::kFloat16: return DType::kFloat16;
    case ElementType::kBFloat16: return DType::kBFloat16;
    case ElementType::kFloat8E4M3: return DType::kFloat8E4M3;
    case ElementType::kFloat8E5M2: return DType::kFloat8E5M2;
    default: break;
  }
  raise(PyExc_TypeError, "%s: %s: expected float32, float16, bfloat16 or float8", name_of(which), name_of(array.type));
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

int choice(PyObject* tuple, Py_ssize_t index) {
  const long value = PyLong_AsLong(checked(PyTuple_GetItem(tuple, index)));
  if (value == -1 && PyErr_Occurred() != nullptr) throw ErrorIsSet{};
  return static_cast<int>(value);
}

}  // namespace

Options decoded_options(PyObject* tuple) {
  if (tuple == Py_None) return {};
  return {.policy = {static_cast<Policy::Kind>(choice(tuple, 0)), choice(tuple, 1), choice(tuple, 2)},
          .fixup = static_cast<Fixup>(choice(tuple, 3)),
          .determinism = static_cast<Determinism>(choice(tuple, 4)),
          .workers = choice(tuple, 5),
          .cpu_isa = static_cast<CpuIsa>(choice(tuple, 6)),
          .dependent_launch = choice(tuple, 7) != 0,
          .check_workspace = choice(tuple, 8) != 0};
}

Call::Call(PyObject* const* arguments) : arguments_(arguments) {
  if (given(Argument::kStream)) {
    stream_ = PyLong_AsVoidPtr(argument(Argument::kStream));
    if (stream_ == nullptr && PyErr_Occurred() != nullptr) throw ErrorIsSet{};
  }
  options_ = decoded_options(argument(Argument::kOptions));
  read_layout();
  read_queries();
  read_keys();
  read_lengths();
  read_outputs();
  read_scores();
  read_mask();
  read_append();
}

/// An array on q's device.
Array Call::array(Argument which) {
  Array read = read_array(argument(which), name_of(which), stream_);
  if (which != Argument::kQ && !read.same_device(q_)) {
    raise(PyExc_ValueError, "%s: must be on the device of q", name_of(which));
  }
  if (read.owner != nullptr) owners_.push_back(std::move(read.owner));
  return read;
}

std::int64_t Call::integer(Argument which, std::int64_t otherwise) const {
  if (!given(which)) return otherwise;
  const long long value = PyLong_AsLongLong(argument(which));
  if (value == -1 && PyErr_Occurred() != nullptr) {
    PyErr_Clear();
    raise(PyExc_TypeError, "%s: an integer is needed", name_of(which));
  }
  return value;
}

float Call::number(Argument which, float otherwise) const {
  if (!given(which)) return otherwise;
  const double value = PyFloat_AsDouble(argument(which));
  if (value == -1.0 && PyErr_Occurred() != nullptr) {
    PyErr_Clear();
    raise(PyExc_TypeError, "%s: a number is needed", name_of(which));
  }
  return static_cast<float>(value);
}

bool Call::flag(Argument which) const {
  const int value = PyObject_IsTrue(argument(which));
  if (value < 0) throw ErrorIsSet{};
  return value != 0;
}

/// `count` integers side by side. On the host, int64 and strided arrays are copied; on a device they are refused.
const std::int32_t* Call::int32_array(Argument which, std::int64_t count) {
  if (!given(which)) return nullptr;
  const Array ints = array(which);
  const bool wide = ints.type == ElementType::kInt64 && !ints.on_cuda();
  if (ints.type != ElementType::kInt32 && !wide) {
    raise(PyExc_TypeError, "%s: %s: expected int32%s", name_of(which), python::name_of(ints.type),
          ints.on_cuda() ? "" : " or int64");
  }
  check_dims(ints, which, 1, "one axis");
  check_size(ints, which, ints.shape[0], count, "its length");
  if (!wide && (ints.strides[0] == 1 || count <= 1)) return static_cast<const std::int32_t*>(ints.data);
  if (ints.on_cuda()) raise(PyExc_ValueError, "%s: must be contiguous on a device", name_of(which));
  std::vector<std::int32_t>& copy = converted_.emplace_back(static_cast<std::size_t>(count));
  for (std::size_t i = 0; i < copy.size(); ++i) {
    const std::int64_t at = static_cast<std::int64_t>(i) * ints.strides[0];
    const std::int64_t value =
        wide ? static_cast<const std::int64_t*>(ints.data)[at] : static_cast<const std::int32_t*>(ints.data)[at];
    copy[i] = static_cast<std::int32_t>(std::clamp<std::int64_t>(value, std::numeric_limits<std::int32_t>::min(), kMaxInt32));
  }
  return copy.data();
}

const float* Call::float_array(Argument which, std::int64_t count) {
  if (!given(which)) return nullptr;
  const Array floats = array(which);
  if (floats.type != ElementType::kFloat32) {
    raise(PyExc_TypeError, "%s: %s: expected float32", name_of(which), python::name_of(floats.type));
  }
  check_dims(floats, which, 1, "one axis");
  check_size(floats, which, floats.shape[0], count, "its length");
  if (count > 1 && floats.strides[0] != 1) raise(PyExc_ValueError, "%s: must be contiguous", name_of(which));
  return static_cast<const float*>(floats.data);
}

void Call::read_layout() {
  const char* text =
      PyUnicode_Check(argument(Argument::kLayout)) ? PyUnicode_AsUTF8AndSize(argument(Argument::kLayout), nullptr) : nullptr;
  const std::string_view layout = text != nullptr ? text : "";
  if (layout != "bhsd" && layout != "bshd") {
    PyErr_Clear();
    raise(PyExc_ValueError, "layout = %R: allowed 'bhsd' (heads before tokens), 'bshd' (tokens before heads)",
          argument(Argument::kLayout));
  }
  heads_first_ = layout == "bhsd";
}

void Call::read_queries() {
  q_ = array(Argument::kQ);
  const bool packed = given(Argument::kCuSeqlensQ);
  one_token_ = !packed && q_.ndim == 3;
  if (packed) {
    check_dims(q_, Argument::kQ, 3,
               heads_first_ ? "[Hq, total tokens, d] with cu_seqlens_q" : "[total tokens, Hq, d] with cu_seqlens_q");
  } else if (!one_token_) {
    check_dims(q_, Argument::kQ, 4, heads_first_ ? "[B, Hq, n_q, d] or [B, Hq, d]" : "[B, n_q, Hq, d] or [B, Hq, d]");
  }
  const Axes axes = one_token_ ? Axes{0, 1, -1} : axes_of(heads_first_, packed);
  problem_.q = {.data = q_.data, .dtype = dtype_of(q_, Argument::kQ), .strides = strides_of(q_, axes)};
  problem_.q_heads = to_int32(size(q_, axes.head), "q: its number of heads");
  problem_.head_dim = to_int32(size(q_, q_.ndim - 1), "q: its head dim");
  options_.backend = q_.on_cuda() ? Backend::kCuda : Backend::kCpu;
  options_.stream = stream_ == nullptr && q_.on_cuda() ? current_stream(argument(Argument::kQ), q_.device) : stream_;
  if (packed) {
    problem_.total_q_tokens = size(q_, axes.token);
    const Array cu = array(Argument::kCuSeqlensQ);
    check_dims(cu, Argument::kCuSeqlensQ, 1, "[B + 1]");
    problem_.batch = cu.shape[0] - 1;
    if (problem_.batch < 0) raise(PyExc_ValueError, "cu_seqlens_q: is empty: expected [B + 1]");
    problem_.cu_q_tokens = int32_array(Argument::kCuSeqlensQ, problem_.batch + 1);
    problem_.q_tokens =
        to_int32(integer(Argument::kMaxSeqlenQ, std::max<std::int64_t>(problem_.total_q_tokens, 1)), "max_seqlen_q");
  } else {
    problem_.batch = size(q_, axes.sequence);
    problem_.q_tokens = one_token_ ? 1 : to_int32(size(q_, axes.token), "q: its number of tokens");
  }
}

void Call::read_keys() {
  const Array k = array(Argument::kK);
  const Array v = array(Argument::kV);
  const bool paged = given(Argument::kBlockTable) || given(Argument::kPageIndptr);
  const bool packed = given(Argument::kCuSeqlensK);
  const bool one_token_pages = paged && k.ndim == 3;  // [slots, Hkv, d]
  Axes axes = axes_of(heads_first_, packed);
  if (one_token_pages) {
    axes = {0, 1, -1};
  } else if (packed) {
    check_dims(k, Argument::kK, 3,
               heads_first_ ? "[Hkv, total tokens, d] with cu_seqlens_k" : "[total tokens, Hkv, d] with cu_seqlens_k");
  } else if (paged) {
    check_dims(k, Argument::kK, 4,
               heads_first_ ? "[pages, Hkv, page, d] or [slots, Hkv, d]" : "[pages, page, Hkv, d] or [slots, Hkv, d]");
  } else {
    check_dims(k, Argument::kK, 4, heads_first_ ? "[B, Hkv, n_kv, d]" : "[B, n_kv, Hkv, d]");
  }
  check_dims(v, Argument::kV, k.ndim, "as many axes as k");
  for (int axis = 0; axis + 1 < k.ndim; ++axis) check_size(v, Argument::kV, size(v, axis), size(k, axis), "an axis of k's");
  check_size(k, Argument::kK, size(k, k.ndim - 1), problem_.head_dim, "head dim");
  problem_.k = {.data = k.data, .dtype = dtype_of(k, Argument::kK), .strides = strides_of(k, axes)};
  problem_.v = {.data = v.data, .dtype = dtype_of(v, Argument::kV), .strides = strides_of(v, axes)};
  kv_writable_ = k.writable && v.writable;
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
    problem_.cu_kv_tokens = int32_array(Argument::kCuSeqlensK, problem_.batch + 1);
    problem_.kv_capacity = to_int32(integer(Argument::kMaxSeqlenK, tokens), "max_seqlen_k");
  } else {
    check_size(k, Argument::kK, k.shape[0], problem_.batch, "the batch");
    problem_.kv_capacity = to_int32(tokens, "k: its number of tokens");
  }
  if (problem_.k.dtype == DType::kFloat8E4M3 || problem_.k.dtype == DType::kFloat8E5M2) {
    const bool per_head = given(Argument::kKScale) && array(Argument::kKScale).shape[0] > 1;
    problem_.scales_per_head = per_head;
    problem_.k_scales = float_array(Argument::kKScale, per_head ? problem_.kv_heads : 1);
    problem_.v_scales = float_array(Argument::kVScale, per_head ? problem_.kv_heads : 1);
  } else if (given(Argument::kKScale) || given(Argument::kVScale)) {
    raise(PyExc_ValueError, "k_scale, v_scale: are for float8 k and v only");
  }
}

void Call::read_pages(const Array& k) {
  std::int64_t pages = 0;
  if (given(Argument::kBlockTable)) {
    const Array table = array(Argument::kBlockTable);
    check_dims(table, Argument::kBlockTable, 2, "[B, pages of a sequence]");
    check_size(table, Argument::kBlockTable, table.shape[0], problem_.batch, "the batch");
    if (table.type != ElementType::kInt32) raise(PyExc_TypeError, "block_table: %s: expected int32", python::name_of(table.type));
    if (table.shape[1] > 1 && table.strides[1] != 1) raise(PyExc_ValueError, "block_table: rows must be contiguous");
    problem_.pages.block_table = static_cast<const std::int32_t*>(table.data);
    problem_.pages.block_table_stride = table.strides[0];
    pages = table.shape[1];
  } else {
    const Array indices = array(Argument::kPageIndices);
    check_dims(indices, Argument::kPageIndices, 1, "[page_indptr[B]]");
    problem_.pages.page_indptr = int32_array(Argument::kPageIndptr, problem_.batch + 1);
    problem_.pages.page_indices = int32_array(Argument::kPageIndices, indices.shape[0]);
    pages = indices.shape[0];
  }
  if (k.ndim == 4 && problem_.pages.page_tokens == 0)
    raise(PyExc_ValueError, "k: shape %s: pages hold no token", k.shape_text().c_str());
  const std::int64_t most = pages > kMaxInt32 / problem_.pages.page_tokens ? kMaxInt32 : pages * problem_.pages.page_tokens;
  problem_.kv_capacity = to_int32(integer(Argument::kMaxSeqlenK, most), "max_seqlen_k");
}

void Call::read_lengths() {
  problem_.kv_lengths = int32_array(Argument::kSeqlens, problem_.batch);
  problem_.kv_left_pad = int32_array(Argument::kLeftpad, problem_.batch);
}

void Call::read_outputs() {
  if (!given(Argument::kOut)) raise(PyExc_TypeError, "out: an array is needed");
  const Array out = array(Argument::kOut);
  check_dims(out, Argument::kOut, q_.ndim, "the axes of q");
  for (int axis = 0; axis + 1 < q_.ndim; ++axis) check_size(out, Argument::kOut, size(out, axis), size(q_, axis), "an axis of q's");
  check_size(out, Argument::kOut, size(out, out.ndim - 1), problem_.value_dim, "head dim");
  if (!out.writable) raise(PyExc_ValueError, "out: is read-only");
  const bool packed = given(Argument::kCuSeqlensQ);
  const Axes axes = one_token_ ? Axes{0, 1, -1} : axes_of(heads_first_, packed);
  problem_.o = {.data = out.data, .dtype = dtype_of(out, Argument::kOut), .strides = strides_of(out, axes)};
  if (!given(Argument::kLse)) return;
  const Array lse = array(Argument::kLse);
  if (lse.type != ElementType::kFloat32) raise(PyExc_TypeError, "lse: %s: expected float32", python::name_of(lse.type));
  if (!lse.writable) raise(PyExc_ValueError, "lse: is read-only");
  problem_.lse.data = static_cast<float*>(lse.data);
  const int head_axis = packed ? 0 : 1;
  if (packed) {
    check_dims(lse, Argument::kLse, 2, "[Hq, total tokens]");
    check_size(lse, Argument::kLse, lse.shape[1], problem_.total_q_tokens, "tokens");
  } else {
    check_dims(lse, Argument::kLse, one_token_ ? 2 : 3, one_token_ ? "[B, Hq]" : "[B, Hq, n_q]");
    check_size(lse, Argument::kLse, lse.shape[0], problem_.batch, "the batch");
    if (!one_token_) check_size(lse, Argument::kLse, lse.shape[2], problem_.q_tokens, "tokens");
    problem_.lse.sequence_stride = lse.strides[0];
  }
  check_size(lse, Argument::kLse, size(lse, head_axis), problem_.q_heads, "heads");
  problem_.lse.head_stride = stride(lse, head_axis);
  problem_.lse.token_stride = one_token_ ? 0 : stride(lse, head_axis + 1);
}

void Call::read_scores() {
  Scores& scores = problem_.scores;
  scores.scale = number(Argument::kScale, 0.0F);
  scores.causal = flag(Argument::kCausal);
  scores.softcap = number(Argument::kSoftcap, 0.0F);
  if (given(Argument::kWindow)) {
    PyObject* const window = argument(Argument::kWindow);
    if (!PyTuple_Check(window) || PyTuple_Size(window) != 2)
      raise(PyExc_TypeError, "window: a tuple (left, right) is needed, -1 for all");
    scores.window_left = choice(window, 0);
    scores.window_right = choice(window, 1);
  }
  read_alibi();
  scores.sinks = float_array(Argument::kSinks, problem_.q_heads);
}

/// Slopes for all sequences, or a row for each.
void Call::read_alibi() {
  if (!given(Argument::kAlibiSlopes)) return;
  const Array slopes = array(Argument::kAlibiSlopes);
  if (slopes.ndim != 2) {
    problem_.scores.alibi_slopes = float_array(Argument::kAlibiSlopes, problem_.q_heads);
    return;
  }
  if (slopes.type != ElementType::kFloat32)
    raise(PyExc_TypeError, "alibi_slopes: %s: expected float32", python::name_of(slopes.type));
  check_size(slopes, Argument::kAlibiSlopes, slopes.shape[0], problem_.batch, "the batch");
  check_size(slopes, Argument::kAlibiSlopes, slopes.shape[1], problem_.q_heads, "heads");
  if (slopes.shape[1] > 1 && slopes.strides[1] != 1) raise(PyExc_ValueError, "alibi_slopes: rows must be contiguous");
  problem_.scores.alibi_slopes = static_cast<const float*>(slopes.data);
  problem_.scores.alibi_sequence_stride = slopes.strides[0];
}

/// mask broadcasts as NumPy's rules say; tree_mask does not.
void Call::read_mask() {
  if (given(Argument::kTreeMask)) {
    const Array tree = array(Argument::kTreeMask);
    if (tree.type != ElementType::kUInt32 && tree.type != ElementType::kInt32) {
      raise(PyExc_TypeError, "tree_mask: %s: expected uint32 or int32", python::name_of(tree.type));
    }
    const std::int64_t words = (problem_.q_tokens + 31) / 32;
    check_dims(tree, Argument::kTreeMask, 3, "[B, n_q, ceil(n_q / 32)]");
    check_size(tree, Argument::kTreeMask, tree.shape[0], problem_.batch, "the batch");
    check_size(tree, Argument::kTreeMask, tree.shape[1], problem_.q_tokens, "tokens");
    check_size(tree, Argument::kTreeMask, tree.shape[2], words, "words");
    if (tree.strides[2] != 1 || tree.strides[1] != words || tree.strides[0] != words * problem_.q_tokens) {
      raise(PyExc_ValueError, "tree_mask: must be contiguous");
    }
    problem_.scores.tree_mask = static_cast<const std::uint32_t*>(tree.data);
  }
  if (!given(Argument::kMask)) return;
  const Array mask = array(Argument::kMask);
  check_dims(mask, Argument::kMask, 4, "[B or 1, Hq or 1, n_q or 1, n_kv or 1]");
  const std::int64_t sizes[] = {problem_.batch, problem_.q_heads, problem_.q_tokens, problem_.kv_capacity};
  std::array<std::int64_t, 4> strides{};
  for (std::size_t axis = 0; axis < 4; ++axis) {
    if (mask.shape[axis] == 1) continue;
    check_size(mask, Argument::kMask, mask.shape[axis], sizes[axis], "an axis");
    strides[axis] = mask.strides[axis];
  }
  problem_.scores.mask = mask.data;
  problem_.scores.mask_is_boolean = mask.type == ElementType::kBool;
  if (!problem_.scores.mask_is_boolean) problem_.scores.mask_dtype = dtype_of(mask, Argument::kMask);
  problem_.scores.mask_strides = {strides[0], strides[1], strides[2], strides[3]};
}

/// New keys have q's tokens and k's heads; they are laid out as q is.
void Call::read_append() {
  const bool rotates = given(Argument::kRotaryCos) || given(Argument::kRotarySin);
  if (!given(Argument::kAppendK) && !given(Argument::kAppendV)) {
    if (rotates) raise(PyExc_ValueError, "rotary_cos, rotary_sin: need append_k and append_v");
    return;
  }
  if (!given(Argument::kAppendK) || !given(Argument::kAppendV))
    raise(PyExc_ValueError, "append_k, append_v: both or none must be given");
  if (!kv_writable_) raise(PyExc_ValueError, "k, v: are read-only: append_k and append_v are written to them");
  const bool packed = given(Argument::kCuSeqlensQ);
  const Axes axes = one_token_ ? Axes{0, 1, -1} : axes_of(heads_first_, packed);
  const auto read = [&](Argument which, std::int32_t dims) -> TensorView {
    const Array added = array(which);
    check_dims(added, which, q_.ndim, "the axes of q, with k's heads");
    for (int axis = 0; axis + 1 < q_.ndim; ++axis) {
      check_size(added, which, size(added, axis), axis == axes.head ? problem_.kv_heads : size(q_, axis),
                 axis == axes.head ? "heads" : "an axis of q's");
    }
    check_size(added, which, size(added, added.ndim - 1), dims, "head dim");
    return {.data = added.data, .dtype = dtype_of(added, which), .strides = strides_of(added, axes)};
  };
  problem_.append.k = read(Argument::kAppendK, problem_.head_dim);
  problem_.append.v = read(Argument::kAppendV, problem_.value_dim);
  if (!rotates) return;
  if (!given(Argument::kRotaryCos) || !given(Argument::kRotarySin))
    raise(PyExc_ValueError, "rotary_cos, rotary_sin: both or none must be given");
  const auto table = [&](Argument which) -> const float* {
    const Array angles = array(which);
    if (angles.type != ElementType::kFloat32)
      raise(PyExc_TypeError, "%s: %s: expected float32", name_of(which), python::name_of(angles.type));
    check_dims(angles, which, 2, "[positions, rotary_dim / 2]");
    if (angles.strides[1] != 1 || angles.strides[0] != angles.shape[1])
      raise(PyExc_ValueError, "%s: must be contiguous", name_of(which));
    check_size(angles, which, angles.shape[1], problem_.append.rotary_dim / 2, "rotary_dim / 2");
    if (angles.shape[0] < problem_.kv_capacity) {
      raise(PyExc_ValueError, "%s: shape %s: expected a row for each of %d positions", name_of(which), angles.shape_text().c_str(),
            static_cast<int>(problem_.kv_capacity));
    }
    return static_cast<const float*>(angles.data);
  };
  problem_.append.rotary_dim = to_int32(2 * size(array(Argument::kRotaryCos), 1), "rotary_cos: its width");
  problem_.append.rotary_cos = table(Argument::kRotaryCos);
  problem_.append.rotary_sin = table(Argument::kRotarySin);
  problem_.append.rotary_interleaved = flag(Argument::kRotaryInterleaved);
  problem_.append.rotary_absolute = flag(Argument::kRotaryAbsolute);
}

}  // namespace lean::python
