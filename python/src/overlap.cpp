#include "overlap.hpp"

#include "arguments.hpp"
#include "errors.hpp"

namespace lean::python {
namespace {

std::int64_t bytes_of(ElementType type) noexcept {
  if (is_of_library(type)) return traits_of(static_cast<DType>(type)).bytes;
  switch (type) {
    case ElementType::kInt64: return 8;
    case ElementType::kInt32:
    case ElementType::kUInt32: return 4;
    case ElementType::kBool: return 1;
    default: return 0;  // refused
  }
}

}  // namespace

Span span_of(const Array& array) noexcept {
  const std::int64_t bytes = bytes_of(array.type);
  std::int64_t lowest = 0;  // elements
  std::int64_t highest = 0;
  double elements = 1.0;  // an array that is broadcast may have more than 2^63
  for (int axis = 0; axis < array.ndim; ++axis) {
    const std::int64_t size = array.shape[static_cast<std::size_t>(axis)];
    if (size == 0) return {};
    constexpr std::int64_t kMost = INT64_MAX / 64;  // four axes, elements of 8 bytes; the library refuses more
    std::int64_t reach = 0;
    if (__builtin_mul_overflow(size - 1, array.strides[static_cast<std::size_t>(axis)], &reach) || reach > kMost || reach < -kMost)
      return {};
    (reach < 0 ? lowest : highest) += reach;
    elements *= static_cast<double>(size);
  }
  const auto data = reinterpret_cast<std::uintptr_t>(array.data);
  return {.begin = data + static_cast<std::uintptr_t>(lowest * bytes),
          .end = data + static_cast<std::uintptr_t>((highest + 1) * bytes),
          .dense = elements == static_cast<double>(highest - lowest + 1)};
}

void Call::check_outputs_apart() const {
  const auto check = [&](Argument written, Argument other) {
    if (written == other || !certainly_overlap(spans_[written.index()], spans_[other.index()])) return;
    raise(PyExc_ValueError, "%s: must not overlap %s: one is written while the other is still used", written.name(), other.name());
  };
  const bool k_is_v = problem_.k.data == problem_.v.data;  // the library has its own words for this with append_k
  for (std::size_t i = 0; i < kArgumentNames.size(); ++i) {
    const Argument other(i);
    check("out", other);
    check("lse", other);
    if (!given("append_k") || k_is_v || other == "append_k" || other == "append_v") continue;  // these may stand in place already
    check("k", other);
    check("v", other);
  }
}

}  // namespace lean::python
