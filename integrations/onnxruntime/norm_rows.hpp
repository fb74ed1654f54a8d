// What head_norms.hpp asks of a processor: rows of heads, and where they go.
#pragma once

#include <cstdint>

#include "number.hpp"

namespace lean::ort {

/// Rows of heads, [rows, heads, dim], and where they go, densely.
struct NormRows {
  const void* from = nullptr;
  std::int64_t row_stride = 0;   // elements
  std::int64_t head_stride = 0;  // elements
  DType dtype{};
  void* to = nullptr;
  std::int64_t rows = 0;
  std::int64_t heads = 0;
  std::int64_t dim = 0;
  const float* weight = nullptr;  // [dim]
  float epsilon = 0.0F;

  [[nodiscard]] constexpr std::int64_t source(std::int64_t row, std::int64_t head) const noexcept {
    return row * row_stride + head * head_stride;
  }
};

}  // namespace lean::ort
