// Prefetch: the rows a worker reads next, asked for while it computes on the present ones. A tile's V is asked for during its
// scores, the next tile's K during accumulate, evenly over all steps, so that memory never waits for arithmetic.
//
// Into the L2, not the L1: an L1 prefetch holds one of 10-16 line-fill buffers for a whole memory latency, which caps a core
// at a third of its bandwidth (bench/results, Sapphire Rapids: 81 -> 92 GB/s on 16 cores, MHA fp16).
#pragma once

#include <cstddef>
#include <cstdint>

#include "backends/cpu/token_rows.hpp"

namespace lean::cpu {

/// Rows to ask for; no tokens: nothing.
struct Prefetch {
  TokenRows rows{};
  std::int32_t row_bytes = 0;
};

/// Asks for the rows in order, a fixed number of cache lines a step.
class PrefetchStream {
 public:
  PrefetchStream(const Prefetch& prefetch, std::int64_t steps) noexcept : rows_(prefetch.rows), row_bytes_(prefetch.row_bytes) {
    const std::int64_t lines = static_cast<std::int64_t>(rows_.tokens) * ((row_bytes_ + kLineBytes - 1) / kLineBytes);
    lines_per_step_ = static_cast<std::int32_t>(steps > 0 ? (lines + steps - 1) / steps : 0);
    if (rows_.tokens > 0) row_ = rows_.row(0);
  }

  void step() noexcept {
    for (std::int32_t i = 0; i < lines_per_step_ && token_ < rows_.tokens; ++i) {
      __builtin_prefetch(row_ + line_, 0, 2);
      if ((line_ += kLineBytes) >= row_bytes_) {
        line_ = 0;
        if (++token_ < rows_.tokens) row_ = rows_.row(token_);
      }
    }
  }

 private:
  static constexpr std::int32_t kLineBytes = 64;

  TokenRows rows_;
  std::int32_t row_bytes_;
  std::int32_t lines_per_step_ = 0;
  std::int32_t token_ = 0;
  std::int32_t line_ = 0;  // bytes into the row
  const std::byte* row_ = nullptr;
};

}  // namespace lean::cpu
