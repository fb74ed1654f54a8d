// Prefetch: the rows a worker reads next, asked for while it computes on the present ones. A tile's V is asked for during its
// scores, the next tile's K during accumulate, evenly over all steps, so that memory never waits for arithmetic.
//
// Into the L2, not the L1: an L1 prefetch holds one of 10-16 line-fill buffers for a whole memory latency, which caps a core
// at a third of its bandwidth (bench/results, Sapphire Rapids: 81 -> 92 GB/s on 16 cores, MHA fp16).
#pragma once

#include <cstddef>
#include <cstdint>

namespace lean::cpu {

/// Rows to ask for; no tokens: nothing.
struct Prefetch {
  const std::byte* data = nullptr;
  std::int64_t token_stride_bytes = 0;
  std::int32_t tokens = 0;
  std::int32_t row_bytes = 0;
};

/// Asks for the rows in order, a fixed number of cache lines a step.
class PrefetchStream {
 public:
  PrefetchStream(const Prefetch& rows, std::int64_t steps) noexcept : rows_(rows) {
    const std::int64_t lines = static_cast<std::int64_t>(rows.tokens) * ((rows.row_bytes + kLineBytes - 1) / kLineBytes);
    lines_per_step_ = static_cast<std::int32_t>(steps > 0 ? (lines + steps - 1) / steps : 0);
  }

  void step() noexcept {
    for (std::int32_t i = 0; i < lines_per_step_ && token_ < rows_.tokens; ++i) {
      __builtin_prefetch(rows_.data + offset_, 0, 2);
      offset_ += kLineBytes;
      if ((line_ += kLineBytes) >= rows_.row_bytes) {
        line_ = 0;
        ++token_;
        offset_ = token_ * rows_.token_stride_bytes;
      }
    }
  }

 private:
  static constexpr std::int32_t kLineBytes = 64;

  Prefetch rows_;
  std::int32_t lines_per_step_ = 0;
  std::int32_t token_ = 0;
  std::int32_t line_ = 0;    // bytes into the row
  std::int64_t offset_ = 0;  // bytes from rows_.data
};

}  // namespace lean::cpu
