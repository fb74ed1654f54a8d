// bf16 queries beside fp8 keys become fp16 in registers (bf16_queries.hpp says how, and what that may lose).
#pragma once

#include <cstdint>

#include "backends/cuda/kernel/staged_queries.cuh"
#include "backends/cuda/kernel/tile/bf16_queries.hpp"
#include "backends/cuda/ptx/mma.cuh"
#include "backends/cuda/ptx/shared.cuh"
#include "backends/cuda/ptx/special_registers.cuh"
#include "backends/cuda/ptx/warp.cuh"

namespace lean::cuda {

/// Makes fp16 of bf16 queries beside fp8 keys, each row multiplied by a power of two; returns the inverse of that of the calling
/// lane's row. Four neighbouring lanes share a row. `visit` calls what it is given for each register of its queries.
template <typename TVisit>
[[nodiscard]] __device__ __forceinline__ float to_half(const TVisit& visit) {
  std::uint32_t largest = 0;
  visit([&](const std::uint32_t& x) { largest = __vmaxu2(largest, x & 0x7FFF7FFFU); });
  largest = max(largest >> 16, largest & 0xFFFFU);
  largest = max(largest, __shfl_xor_sync(ptx::kAllLanes, largest, 1));
  largest = max(largest, __shfl_xor_sync(ptx::kAllLanes, largest, 2));
  const QueryPower power = query_power(largest);
  const float up = __uint_as_float(power.up << 23);
  visit([&](std::uint32_t& x) {
    x = ptx::pack<DType::kFloat16>(__uint_as_float(x << 16) * up, __uint_as_float(x & 0xFFFF0000U) * up);
  });
  return __uint_as_float(power.down << 23);
}

/// The same of a row that is staged, where it lies, whose pieces the four lanes share out.
template <KernelConfig kConfig>
[[nodiscard]] __device__ __forceinline__ float queries_to_half(std::uint32_t staged, std::int32_t row) {
  return to_half([&](const auto& each) {
#pragma unroll 1
    for (auto pair = static_cast<std::int32_t>(ptx::thread_index() % 4); pair < kConfig.head_dim / (2 * kQueryPieceDims);
         pair += 4) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const std::uint32_t at = query_address<kConfig>(staged, row, 2 * pair + i);
        uint4 eight = ptx::load_shared_16(at);
        each(eight.x), each(eight.y), each(eight.z), each(eight.w);
        ptx::store_shared(at, eight);
      }
    }
  });
}

}  // namespace lean::cuda
