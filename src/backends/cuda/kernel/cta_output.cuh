// Rows of O into the output.
#pragma once

#include <cstdint>

#include "backends/cuda/kernel/cta_shared.cuh"
#include "backends/cuda/ptx/mma.cuh"
#include "output/rows.hpp"

namespace lean::cuda {

/// Neighbouring elements of a row that are kept together.
inline constexpr std::int32_t kQuadDims = 4;

/// A row of the output: where it lies, and what its merged elements are multiplied by.
struct RowEnd {
  std::uint16_t* to = nullptr;
  float scale = 1.0F;
};

/// Finishes a row. Of a warp, one lane stores its lse, where that is asked for.
template <KernelConfig kConfig>
[[nodiscard]] __device__ __forceinline__ RowEnd end_row(const DeviceCall& call, const SegmentRecord& record, std::int32_t row,
                                                        softmax::State state, bool stores_lse) {
  const Problem& problem = call.problem;
  const HeadPosition kv_head{record.sequence, record.kv_head};
  const std::int64_t packed = std::int64_t{record.row_block} * kConfig.q_rows + row;
  const float sink = output::row_sink(problem, call.shape.group, kv_head, packed);
  if (stores_lse) output::write_lse(problem, call.shape.group, record.lengths, kv_head, packed, state, sink);
  const PackedRow at = packed_row(packed, call.shape.group);
  const std::int64_t offset = at.head_in_group * problem.o.strides.head + at.token * problem.o.strides.token;
  const float scale = softmax::output_scale(state, sink);
  return {.to = record.output + offset, .scale = kConfig.fp8() ? scale * record.v_scale : scale};
}

/// Two neighbouring elements of O as the output has them.
template <KernelConfig kConfig>
[[nodiscard]] __device__ __forceinline__ std::uint32_t pack_output(const DeviceCall& call, float low, float high) {
  const bool half = kConfig.fp8() ? call.problem.o.dtype == DType::kFloat16 : kConfig.dtype == DType::kFloat16;
  return half ? ptx::pack<DType::kFloat16>(low, high) : ptx::pack<DType::kBFloat16>(low, high);
}

/// Two merged elements of a row, if the problem has that many dims.
template <KernelConfig kConfig>
__device__ __forceinline__ void store_pair(const DeviceCall& call, const RowEnd& end, std::int32_t dim, const float2& o) {
  if (dim >= call.problem.head_dim) return;
  std::uint16_t* to = end.to + dim;
  const std::uint32_t pair = pack_output<kConfig>(call, o.x * end.scale, o.y * end.scale);
  if (call.vector_output) {
    *reinterpret_cast<std::uint32_t*>(to) = pair;
  } else {
    to[0] = static_cast<std::uint16_t>(pair);
    to[1] = static_cast<std::uint16_t>(pair >> 16);
  }
}

}  // namespace lean::cuda
