// AlignedBuffer: zeroed memory aligned as a workspace must be, for benchmarks that call the library's pieces on their own.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/int_math.hpp"
#include "lean/lean.hpp"

namespace lean::bench {

class AlignedBuffer {
 public:
  explicit AlignedBuffer(std::int64_t bytes) : blocks_(static_cast<std::size_t>(ceil_div(bytes, sizeof(Block)))) {}

  [[nodiscard]] std::byte* data() { return blocks_.data()->bytes; }

 private:
  struct alignas(kWorkspaceAlignment) Block {
    std::byte bytes[kWorkspaceAlignment] = {};
  };

  std::vector<Block> blocks_;
};

}  // namespace lean::bench
