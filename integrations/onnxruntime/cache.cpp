#include "cache.hpp"

#include <cstring>

namespace lean::ort {
namespace {

std::byte* address(const TensorView& view, std::int64_t sequence, std::int64_t head, std::int64_t token) {
  const std::int64_t element = sequence * view.strides.sequence + head * view.strides.head + token * view.strides.token;
  return static_cast<std::byte*>(const_cast<void*>(view.data)) + element * bytes_of(view.dtype);
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

void copy_tokens(Run& run, const TensorView& from, const TensorView& to, const Extent& extent,
                 const std::vector<std::int64_t>& tokens_of) {
  const auto row_bytes = static_cast<std::size_t>(extent.dim * bytes_of(from.dtype));
  const bool dense = from.strides.token == extent.dim && to.strides.token == extent.dim;
  for_each_head(run, extent, [&](std::int64_t b, std::int64_t head) {
    const std::int64_t tokens = tokens_of[static_cast<std::size_t>(b)];
    if (dense && tokens > 0)
      std::memcpy(address(to, b, head, 0), address(from, b, head, 0), static_cast<std::size_t>(tokens) * row_bytes);
    for (std::int64_t token = 0; !dense && token < tokens; ++token)
      std::memcpy(address(to, b, head, token), address(from, b, head, token), row_bytes);
  });
}

void zero_tokens(Run& run, const TensorView& to, const Extent& extent, const std::vector<std::int64_t>& begin_of,
                 std::int64_t end) {
  const auto row_bytes = static_cast<std::size_t>(extent.dim * bytes_of(to.dtype));
  for_each_head(run, extent, [&](std::int64_t b, std::int64_t head) {
    for (std::int64_t token = begin_of[static_cast<std::size_t>(b)]; token < end; ++token)
      std::memset(address(to, b, head, token), 0, row_bytes);
  });
}

}  // namespace lean::ort
