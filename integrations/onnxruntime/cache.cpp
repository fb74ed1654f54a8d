#include "cache.hpp"

#include <algorithm>
#include <cstring>

#include "gpu.hpp"
#include "ort.hpp"

namespace lean::ort {
namespace {

std::byte* address(const TensorView& view, std::int64_t sequence, std::int64_t head, std::int64_t token) {
  const std::int64_t element = sequence * view.strides.sequence + head * view.strides.head + token * view.strides.token;
  return static_cast<std::byte*>(const_cast<void*>(view.data)) + element * bytes_of(view.dtype);
}

std::int64_t count_of(const Counts& counts, std::int64_t b) {
  return counts.of_sequence == nullptr ? counts.most : std::min<std::int64_t>(counts.most, counts.of_sequence[b]);
}

template <class Body>
void for_each_head(Run& run, const Extent& extent, const Body& body) {
  run.parallel(static_cast<std::size_t>(extent.batch * extent.heads), [&](std::size_t i) {
    const auto flat = static_cast<std::int64_t>(i);
    body(flat / extent.heads, flat % extent.heads);
  });
}

}  // namespace

TensorView from_element(const TensorView& view, std::int64_t element) noexcept {
  TensorView moved = view;
  moved.data = static_cast<const std::byte*>(view.data) + element * bytes_of(view.dtype);
  return moved;
}

void copy_tokens(Run& run, const TensorView& from, const TensorView& to, const Extent& extent, const Counts& tokens) {
  if (run.on_gpu()) return gpu::copy_tokens(run.stream(), from, to, extent, tokens);
  const auto row_bytes = static_cast<std::size_t>(extent.dim * bytes_of(from.dtype));
  const bool dense = from.strides.token == extent.dim && to.strides.token == extent.dim;
  for_each_head(run, extent, [&](std::int64_t b, std::int64_t head) {
    const std::int64_t count = count_of(tokens, b);
    if (dense && count > 0)
      std::memcpy(address(to, b, head, 0), address(from, b, head, 0), static_cast<std::size_t>(count) * row_bytes);
    for (std::int64_t token = 0; !dense && token < count; ++token)
      std::memcpy(address(to, b, head, token), address(from, b, head, token), row_bytes);
  });
}

void zero_tokens(Run& run, const TensorView& to, const Extent& extent, const Counts& begins, std::int64_t end) {
  if (run.on_gpu()) return gpu::zero_tokens(run.stream(), to, extent, begins, end);
  const auto row_bytes = static_cast<std::size_t>(extent.dim * bytes_of(to.dtype));
  for_each_head(run, extent, [&](std::int64_t b, std::int64_t head) {
    for (std::int64_t token = count_of(begins, b); token < end; ++token) std::memset(address(to, b, head, token), 0, row_bytes);
  });
}

}  // namespace lean::ort
