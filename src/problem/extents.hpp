// Extents: the elements that each axis of a tensor has, and what strides over them may do: lead out of 63 bits, stand still, meet.
// What the preconditions of a Problem ask; nothing is read.
#pragma once

#include <array>
#include <cstdint>
#include <cstdlib>
#include <initializer_list>
#include <numeric>

#include "base/int_math.hpp"
#include "lean/problem.hpp"
#include "problem/pages.hpp"

namespace lean {

/// Sizes of the four axes that a tensor's strides walk over.
struct Extents {
  std::int64_t sequences;
  std::int64_t heads;
  std::int64_t tokens;
  std::int64_t dims;
};

[[nodiscard]] inline Extents query_extents(const Problem& p, std::int32_t dims) noexcept {
  const bool packed = p.cu_q_tokens != nullptr;
  return {packed ? 1 : p.batch, p.q_heads, packed ? p.total_q_tokens : p.q_tokens, dims};
}

[[nodiscard]] inline Extents key_extents(const Problem& p, std::int32_t dims) noexcept {
  if (is_paged(p.pages)) return {p.pages.page_count, p.kv_heads, p.pages.page_tokens, dims};
  const bool packed = p.cu_kv_tokens != nullptr;
  return {packed ? 1 : p.batch, p.kv_heads, packed ? p.total_kv_tokens : p.kv_capacity, dims};
}

/// Extents of append.k and append.v: as many tokens as there are queries, heads as in the cache.
[[nodiscard]] inline Extents new_key_extents(const Problem& p, std::int32_t dims) noexcept {
  Extents n = query_extents(p, dims);
  n.heads = p.kv_heads;
  return n;
}

/// Every byte offset of the tensor fits 63 bits.
[[nodiscard]] inline bool addressable(const Extents& n, const Strides& s) noexcept {
  // Of an axis of one element too, since offsets of what lies behind its end are worked out, and not used.
  const auto reach = [](std::int64_t count, std::int64_t stride) {
    if (stride == INT64_MIN) return std::int64_t{-1};
    return checked_product(count > 1 ? count - 1 : 1, stride < 0 ? -stride : stride);
  };
  constexpr std::int64_t kMaxReach = INT64_MAX / 16 / 4;  // four axes, element size up to 16
  for (const std::int64_t r :
       {reach(n.sequences, s.sequence), reach(n.heads, s.head), reach(n.tokens, s.token), reach(n.dims, s.dim)}) {
    if (r < 0 || r > kMaxReach) return false;
  }
  return true;
}

/// No axis longer than 1 stands still, which would give its elements one address.
[[nodiscard]] inline bool moves(const Extents& n, const Strides& s) noexcept {
  return (n.sequences <= 1 || s.sequence != 0) && (n.heads <= 1 || s.head != 0) && (n.tokens <= 1 || s.token != 0) &&
         (n.dims <= 1 || s.dim != 0);
}

struct Axis {
  std::int64_t count;
  std::int64_t stride;  // elements, of no direction
};

/// Whether steps along one axis never end where steps along the other do: the first multiple that both strides have lies outside.
[[nodiscard]] inline bool apart(const Axis& a, const Axis& b) noexcept {
  if (a.count <= 1 || b.count <= 1) return true;
  if (a.stride > (b.count - 1) * b.stride || b.stride > (a.count - 1) * a.stride)
    return true;  // one is a step over all of the other
  const std::int64_t common = std::gcd(a.stride, b.stride);
  return b.stride / common >= a.count || a.stride / common >= b.count;
}

/// No two elements share an address, as far as axes tell two by two. Every axis moves, and strides are addressable.
[[nodiscard]] inline bool distinct(const Extents& n, const Strides& s) noexcept {
  const std::array<Axis, 4> axes{
      {{n.sequences, std::abs(s.sequence)}, {n.heads, std::abs(s.head)}, {n.tokens, std::abs(s.token)}, {n.dims, std::abs(s.dim)}}};
  for (std::size_t i = 0; i < axes.size(); ++i) {
    for (std::size_t j = 0; j < i; ++j) {
      if (!apart(axes[i], axes[j])) return false;
    }
  }
  return true;
}

}  // namespace lean
