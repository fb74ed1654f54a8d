// The ordered merge: n parts (O, m, l) of the same rows, each over tokens of its own, become one result. One statement of the
// arithmetic for every backend, number by number; which part is loaded when, and by whom, is the backend's.
//
//   m = the largest m_i      w_i = exp2(m_i - m), 0 of an empty part
//   l = sum of l_i w_i       the products rounded, then added as a warp adds its lanes, 32 parts at a time
//   O = sum of O_i w_i       one fma a part, in index order, from 0 on
//
// Laws, tested: a part alone, or among empty ones, is the result bit for bit (a zero may lose its sign); m and l of two parts do not
// depend on which comes first; the order of O is the index's, so that bits depend on the parts alone and not on who came last; no
// NaN from empty parts. The chunk tree merges by softmax::merge_step instead: two nodes at a time, O commutative too.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "base/hd.hpp"
#include "fixup/arrival.hpp"
#include "fixup/partial.hpp"
#include "softmax/state.hpp"

namespace lean::fixup {

/// w_i: what a part of maximum `m_part` weighs in a result of maximum `m_whole`.
LEAN_HD [[nodiscard]] inline float part_weight(float m_part, float m_whole) noexcept {
  return softmax::rescale_factor(m_part, m_whole);
}

/// An element of O after one more part. An empty part is left out by the loop, or its O has been made 0: it may be 0 x NaN.
LEAN_HD [[nodiscard]] inline float add_part(float sum, float part, float weight) noexcept { return std::fma(part, weight, sum); }

/// The sum over kMaxOneLevel lanes with a number each, known to all: halves are added to halves. TNumbers is a lane's own number, or
/// the numbers of all; `across(x, step)` has, for each lane, what lane XOR `step` has of x.
template <std::int32_t kLanes = kMaxOneLevel, typename TNumbers, typename TAcross>
LEAN_HD [[nodiscard]] inline TNumbers sum_over_lanes(TNumbers x, const TAcross& across) noexcept {
  for (std::int32_t step = kLanes / 2; step > 0; step /= 2) x = x + across(x, step);
  return x;
}

/// The numbers of all lanes, where one thread has them.
struct AllLanes {
  float x[kMaxOneLevel] = {};

  [[nodiscard]] LEAN_HD friend AllLanes operator+(const AllLanes& a, const AllLanes& b) noexcept {
    AllLanes sum;
    for (std::int32_t lane = 0; lane < kMaxOneLevel; ++lane) sum.x[lane] = a.x[lane] + b.x[lane];
    return sum;
  }
  [[nodiscard]] LEAN_HD AllLanes across(std::int32_t step) const noexcept {
    AllLanes other;
    for (std::int32_t lane = 0; lane < kMaxOneLevel; ++lane) other.x[lane] = x[lane ^ step];
    return other;
  }
  [[nodiscard]] LEAN_HD float sum() const noexcept {
    return sum_over_lanes(*this, [](const AllLanes& lanes, std::int32_t step) { return lanes.across(step); }).x[0];
  }
};

/// One row of `into` = the merge of that row of `count` parts, none of which is `into`. An empty part is left out, whatever its O
/// holds. `part_at(i)` is part i; `add_row(sums, part, weight)` is a backend's vector loop of add_part().
template <typename TPartAt, typename TAddRow>
void merge_row_of_parts(const Partial& into, std::int32_t row, std::int32_t count, const TPartAt& part_at,
                        const TAddRow& add_row) noexcept {
  softmax::State whole;
  for (std::int32_t i = 0; i < count; ++i) whole.m = std::max(whole.m, part_at(i).m[row]);  // passes over a NaN: its weight is NaN
  std::fill_n(into.o_row(row), into.value_stride, 0.0F);
  for (std::int32_t first = 0; first < count; first += kMaxOneLevel) {
    AllLanes products;
    for (std::int32_t i = first; i < std::min(count, first + kMaxOneLevel); ++i) {
      const Partial part = part_at(i);
      if (part.m[row] == softmax::kNegInf) continue;
      const float weight = part_weight(part.m[row], whole.m);
      products.x[i - first] = part.l[row] * weight;
      add_row(into.o_row(row), part.o_row(row), weight);
    }
    whole.l += products.sum();
  }
  into.m[row] = whole.m;
  into.l[row] = whole.l;
}

/// The same for rows [0, rows).
template <typename TPartAt, typename TAddRow>
void merge_parts(const Partial& into, std::int32_t rows, std::int32_t count, const TPartAt& part_at,
                 const TAddRow& add_row) noexcept {
  for (std::int32_t row = 0; row < rows; ++row) merge_row_of_parts(into, row, count, part_at, add_row);
}

}  // namespace lean::fixup
