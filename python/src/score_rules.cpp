// decode()'s rules of scores as fields of Scores: scale, softcap, windows, slopes, sinks and masks.
#include <array>
#include <cstdint>

#include "arguments.hpp"
#include "array_checks.hpp"
#include "errors.hpp"
#include "options.hpp"

namespace lean::python {

void Call::read_scores() {
  Scores& scores = problem_.scores;
  scores.scale = number("scale", 0.0F);
  if (given("scale") && scores.scale == 0.0F) scores.scale = -0.0F;  // the number 0; 0.0F stands for the default
  scores.causal = flag("causal");
  scores.softcap = number("softcap", 0.0F);
  if (scores.softcap == 0.0F && given("softcap") && truth("softcap"))
    raise(PyExc_ValueError, "softcap = %R: is 0 in float32, which would mean none", argument("softcap"));
  if (given("window")) {
    PyObject* const window = argument("window");
    const bool pair = (PyTuple_Check(window) || PyList_Check(window)) && PySequence_Size(window) == 2;
    if (!pair) raise(PyExc_TypeError, "window: %R: a pair (left, right) is needed, -1 for all", window);
    const auto side = [window](Py_ssize_t at, const char* name) {
      const Reference number(checked(PySequence_GetItem(window, at)));
      if (PyBool_Check(number.get())) raise(PyExc_TypeError, "%s: %R: an integer is needed", name, number.get());
      return int_of(number.get(), name);
    };
    scores.window_left = side(0, "window[0]");
    scores.window_right = side(1, "window[1]");
  }
  read_alibi();
  scores.sinks = float_array("sinks", problem_.q_heads);
}

/// Slopes for all sequences, or a row for each.
void Call::read_alibi() {
  if (!given("alibi_slopes")) return;
  const Array slopes = array("alibi_slopes");
  if (slopes.ndim != 2) {
    problem_.scores.alibi_slopes = float_array("alibi_slopes", problem_.q_heads);
    return;
  }
  if (slopes.type != ElementType::kFloat32)
    raise(PyExc_TypeError, "alibi_slopes: %s: expected float32", slopes.type_text().c_str());
  check_size(slopes, "alibi_slopes", slopes.shape[0], problem_.batch, "the batch");
  check_size(slopes, "alibi_slopes", slopes.shape[1], problem_.q_heads, "heads");
  if (slopes.shape[1] > 1 && slopes.strides[1] != 1) raise(PyExc_ValueError, "alibi_slopes: rows must be contiguous");
  problem_.scores.alibi_slopes = static_cast<const float*>(slopes.data);
  problem_.scores.alibi_sequence_stride = slopes.strides[0];
}

/// mask broadcasts as NumPy's rules say; tree_mask does not.
void Call::read_mask() {
  if (given("tree_mask")) {
    const Array tree = array("tree_mask");
    if (tree.type != ElementType::kUInt32 && tree.type != ElementType::kInt32) {
      raise(PyExc_TypeError, "tree_mask: %s: expected uint32 or int32", tree.type_text().c_str());
    }
    const std::int64_t words = (problem_.q_tokens + 31) / 32;
    check_dims(tree, "tree_mask", 3, "[B, n_q, ceil(n_q / 32)]");
    check_size(tree, "tree_mask", tree.shape[0], problem_.batch, "the batch");
    check_size(tree, "tree_mask", tree.shape[1], problem_.q_tokens, "tokens");
    check_size(tree, "tree_mask", tree.shape[2], words, "words");
    std::int64_t dense = 1;
    for (const std::size_t axis : {2U, 1U, 0U}) {
      if (tree.shape[axis] > 1 && tree.strides[axis] != dense) raise(PyExc_ValueError, "tree_mask: must be contiguous");
      dense *= tree.shape[axis];
    }
    problem_.scores.tree_mask = static_cast<const std::uint32_t*>(tree.data);
  }
  if (!given("mask")) return;
  const Array mask = array("mask");
  if (mask.type != ElementType::kBool && !(is_of_library(mask.type) && traits_of(static_cast<DType>(mask.type)).of_queries()))
    raise(PyExc_TypeError, "mask: %s: expected bool (True: seen), float32, float16 or bfloat16", mask.type_text().c_str());
  check_dims(mask, "mask", 4, "[B or 1, Hq or 1, n_q or 1, n_kv or 1]");
  const std::int64_t sizes[] = {problem_.batch, problem_.q_heads, problem_.q_tokens, problem_.kv_capacity};
  std::array<std::int64_t, 4> strides{};
  for (std::size_t axis = 0; axis < 4; ++axis) {
    if (mask.shape[axis] == 1) continue;
    check_size(mask, "mask", mask.shape[axis], sizes[axis], "an axis");
    strides[axis] = mask.strides[axis];
  }
  problem_.scores.mask = mask.data;
  problem_.scores.mask_is_boolean = mask.type == ElementType::kBool;
  if (!problem_.scores.mask_is_boolean) problem_.scores.mask_dtype = static_cast<DType>(mask.type);
  problem_.scores.mask_strides = {strides[0], strides[1], strides[2], strides[3]};
}

}  // namespace lean::python
