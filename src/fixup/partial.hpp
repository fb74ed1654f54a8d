// Partial: the un-scaled result of a segment, and the merge of two; ordered_merge.hpp merges any number. Source: LeanAttention, Alg. 2 lines 28-36, with
// O re-scaled too (the paper's pseudo-code leaves that out).
#pragma once

#include <cstdint>

#include "base/hd.hpp"
#include "softmax/state.hpp"

namespace lean::fixup {

/// Rows of (O, m, l) somewhere in memory, fp32: O [rows, value_stride], m [rows], l [rows].
struct Partial {
  float* o = nullptr;
  float* m = nullptr;
  float* l = nullptr;
  std::int64_t value_stride = 0;  // elements from a row of O to the next

  [[nodiscard]] LEAN_HD float* o_row(std::int32_t row) const noexcept { return o + row * value_stride; }
  [[nodiscard]] LEAN_HD softmax::State state(std::int32_t row) const noexcept { return {m[row], l[row]}; }
};

/// One row block's worth of a Partial, laid out as [O][m][l] in one run of floats.
struct PartialLayout {
  std::int32_t q_rows = 0;
  std::int32_t value_stride = 0;

  [[nodiscard]] LEAN_HD constexpr std::int64_t floats() const noexcept {
    return static_cast<std::int64_t>(q_rows) * (value_stride + 2);
  }
  [[nodiscard]] LEAN_HD Partial at(float* base) const noexcept {
    float* m = base + static_cast<std::int64_t>(q_rows) * value_stride;
    return {.o = base, .m = m, .l = m + q_rows, .value_stride = value_stride};
  }
};

/// into = merge(into, other). TMergeRow: (const MergeStep&, float* into_row, const float* other_row), a backend's vector loop.
template <typename TMergeRow>
LEAN_HD void merge_into(const Partial& into, const Partial& other, std::int32_t rows, TMergeRow&& merge_row) noexcept {
  for (std::int32_t row = 0; row < rows; ++row) {
    const softmax::MergeStep step = softmax::merge_step(into.state(row), other.state(row));
    merge_row(step, into.o_row(row), other.o_row(row));
    into.m[row] = step.merged.m;
    into.l[row] = step.merged.l;
  }
}

}  // namespace lean::fixup
