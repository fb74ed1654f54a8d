// Rows of fp32 as a worker's private memory has them: the first at a cache line, `stride` floats apart.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "backends/cpu/tile_kernels.hpp"

namespace lean::support {

class AlignedRows {
 public:
  AlignedRows(std::int32_t rows, std::int32_t stride, float fill = 0.0F)
      : rows_(rows), stride_(stride), values_(static_cast<std::size_t>(rows) * static_cast<std::size_t>(stride) + kLine, fill) {}

  [[nodiscard]] cpu::RowBuffer buffer() {
    const auto past_line = reinterpret_cast<std::uintptr_t>(values_.data()) / sizeof(float) % kLine;
    return {values_.data() + (kLine - past_line) % kLine, rows_, stride_};
  }

 private:
  static constexpr std::size_t kLine = 16;

  std::int32_t rows_;
  std::int32_t stride_;
  std::vector<float> values_;
};

/// Stride of scores: of whole sixteens of tokens, and room for three more, since they are written in fours.
[[nodiscard]] constexpr std::int32_t score_stride(std::int32_t tokens) { return ((tokens + 15) / 16 * 16 + 3 + 15) / 16 * 16; }

}  // namespace lean::support
