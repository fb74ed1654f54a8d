// Keys and values in memory as the operators lay them out, and copies of them by the processor that a node runs on.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "lean/problem.hpp"

namespace lean::ort {

class Run;

/// Strides of [B, heads, tokens, dim].
[[nodiscard]] constexpr Strides bhsd(std::int64_t heads, std::int64_t tokens, std::int64_t dim) noexcept {
  return {.sequence = heads * tokens * dim, .head = tokens * dim, .token = dim, .dim = 1};
}

/// Strides of [B, tokens, width] whose rows hold heads of `dim`.
[[nodiscard]] constexpr Strides bshd(std::int64_t tokens, std::int64_t width, std::int64_t dim) noexcept {
  return {.sequence = tokens * width, .head = dim, .token = width, .dim = 1};
}

/// The same tensor from an element on.
[[nodiscard]] TensorView from_element(const TensorView& view, std::int64_t element) noexcept;

/// The element where a sequence, or a token of every sequence, begins.
[[nodiscard]] inline TensorView from_sequence(const TensorView& view, std::int64_t sequence) noexcept {
  return from_element(view, sequence * view.strides.sequence);
}
[[nodiscard]] inline TensorView from_token(const TensorView& view, std::int64_t token) noexcept {
  return from_element(view, token * view.strides.token);
}

struct Extent {
  std::int64_t batch = 0;
  std::int64_t heads = 0;
  std::int64_t dim = 0;
};

/// Tokens of each sequence: at most `most`, and where of_sequence is there, at most of_sequence[b], in memory of the node's
/// processor.
struct Counts {
  std::int64_t most = 0;
  const std::int32_t* of_sequence = nullptr;  // [B]
};

/// Rows of a cache that are written: copies of the first tokens of each sequence and head, or zeroes from some token on. Rows are
/// dense in both views.
struct Move {
  TensorView from{};  // null data: zeroes
  TensorView to{};
  Extent extent{};
  Counts tokens{};       // copied are those before, zeroed those from it on
  std::int64_t end = 0;  // zeroed are those before
};
[[nodiscard]] constexpr Move copy_of(const TensorView& from, const TensorView& to, const Extent& extent,
                                     const Counts& tokens) noexcept {
  return {.from = from, .to = to, .extent = extent, .tokens = tokens};
}
[[nodiscard]] constexpr Move zeroes_of(const TensorView& to, const Extent& extent, const Counts& begins,
                                       std::int64_t end) noexcept {
  return {.from = {.dtype = to.dtype}, .to = to, .extent = extent, .tokens = begins, .end = end};
}

/// Moves that one kernel makes on a GPU.
inline constexpr std::size_t kMovesAtOnce = 4;

/// All of them, in no order: none reads or writes what another writes.
void move_tokens(Run& run, std::span<const Move> moves);

}  // namespace lean::ort
