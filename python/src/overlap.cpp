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

/// Of an element of a view, by its sequence and token: strides may be any numbers until the library has looked at them.
std::uintptr_t address_of(const TensorView& view, std::int64_t sequence, std::int64_t token) noexcept {
  const std::uintptr_t elements = static_cast<std::uintptr_t>(sequence) * static_cast<std::uintptr_t>(view.strides.sequence) +
                                  static_cast<std::uintptr_t>(token) * static_cast<std::uintptr_t>(view.strides.token);
  return reinterpret_cast<std::uintptr_t>(view.data) + elements * static_cast<std::uintptr_t>(traits_of(view.dtype).bytes);
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

void Call::check_new_tokens_apart() const {
  const bool in_rows = !given("cu_seqlens_k") && !given("block_table") && !given("page_indptr");
  const bool lengths = problem_.kv_lengths != nullptr && problem_.append.cached_lengths == nullptr;  // else not here, or not yet
  if (!given("append_k") || q_.on_cuda() || !in_rows || !lengths) return;
  const std::int32_t* const cu = problem_.cu_q_tokens;
  const auto check = [&](Argument which, const TensorView& added, const TensorView& cache) {
    const bool alike =
        added.dtype == cache.dtype && added.strides.token == cache.strides.token && added.strides.head == cache.strides.head;
    const auto step = static_cast<std::int64_t>(address_of(cache, 0, 1) - address_of(cache, 0, 0));
    if (!alike || step == 0) return;
    for (std::int64_t b = 0; b < problem_.batch; ++b) {
      const std::int64_t tokens = cu == nullptr ? problem_.q_tokens : cu[b + 1] - cu[b];
      const std::uintptr_t from = cu == nullptr ? address_of(added, b, 0) : address_of(added, 0, cu[b]);
      const auto apart = static_cast<std::int64_t>(from - address_of(cache, b, problem_.kv_lengths[b] - tokens));  // bytes
      if (apart == 0 || apart % step != 0 || apart / step >= tokens || apart / step <= -tokens) continue;
      raise(PyExc_ValueError, "%s: sequence %lld: stands %lld tokens beside its place in the cache: must be in it, or elsewhere",
            which.name(), static_cast<long long>(b), static_cast<long long>(apart / step));
    }
  };
  check("append_k", problem_.append.k, problem_.k);
  check("append_v", problem_.append.v, problem_.v);
}

}  // namespace lean::python
