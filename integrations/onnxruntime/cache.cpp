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

void copy_head(const Move& move, std::int64_t b, std::int64_t head) {
  const auto row_bytes = static_cast<std::size_t>(move.extent.dim * bytes_of(move.to.dtype));
  const bool dense = move.from.strides.token == move.extent.dim && move.to.strides.token == move.extent.dim;
  const std::int64_t count = count_of(move.tokens, b);
  if (dense && count > 0)
    std::memcpy(address(move.to, b, head, 0), address(move.from, b, head, 0), static_cast<std::size_t>(count) * row_bytes);
  for (std::int64_t token = 0; !dense && token < count; ++token)
    std::memcpy(address(move.to, b, head, token), address(move.from, b, head, token), row_bytes);
}

void zero_head(const Move& move, std::int64_t b, std::int64_t head) {
  const auto row_bytes = static_cast<std::size_t>(move.extent.dim * bytes_of(move.to.dtype));
  for (std::int64_t token = count_of(move.tokens, b); token < move.end; ++token)
    std::memset(address(move.to, b, head, token), 0, row_bytes);
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

void move_tokens(Run& run, std::span<const Move> moves) {
  if (run.on_gpu()) return gpu::move_tokens(run.stream(), moves);
  for (const Move& move : moves) {
    for_each_head(run, move.extent, [&](std::int64_t b, std::int64_t head) {
      if (move.from.data != nullptr)
        copy_head(move, b, head);
      else
        zero_head(move, b, head);
    });
  }
}

}  // namespace lean::ort
