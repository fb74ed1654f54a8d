// Rows of fp32 as a worker's private memory has them: the first at a cache line, `stride` floats apart.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "backends/cpu/worker_memory.hpp"
#include "base/int_math.hpp"

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

/// Stride of a tile's scores where a worker has so many tokens at least: of whole sixteens, as tiles are.
[[nodiscard]] constexpr std::int32_t score_stride(std::int32_t tokens) {
  cpu::WorkerMemoryLayout layout;
  layout.config.tile_tokens = static_cast<std::int32_t>(round_up(tokens, 16));
  return layout.score_stride();
}

}  // namespace lean::support
