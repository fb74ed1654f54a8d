// The loops that say what this machine can do at best: reading memory, and multiply-adds. Compiled through Highway for
// every instruction set; ceilings.cpp runs them on all threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace lean::cli {

struct ReadKernel {
  const char* name;
  /// Reads every byte once and returns the xor of all 64-bit words; `bytes` is a multiple of 8.
  std::uint64_t (*read)(const std::byte* data, std::int64_t bytes) noexcept;
};

/// A loop of independent multiply-adds in registers.
struct ProductKernel {
  std::int64_t (*run)(std::int64_t steps, float* sink) noexcept;  // returns the multiply-adds made; null: not on this machine
};

/// Different numbers of concurrent streams, with and without software prefetch: no one of them is best everywhere.
[[nodiscard]] std::span<const ReadKernel> read_kernels();

/// fp32 multiply-adds on the widest vectors of this machine.
[[nodiscard]] ProductKernel fp32_product_kernel();

/// bf16 products added in pairs to fp32 (vdpbf16ps).
[[nodiscard]] ProductKernel bf16_product_kernel();

/// The kernel of bf16 products on tile registers (tdpbf16ps).
[[nodiscard]] ProductKernel bf16_tile_product_kernel();

}  // namespace lean::cli
