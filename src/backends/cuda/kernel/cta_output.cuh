// Rows of O into the output.
#pragma once

#include <cstdint>

#include "backends/cuda/kernel/cta_shared.cuh"
#include "backends/cuda/ptx/mma.cuh"
#include "output/rows.hpp"

namespace lean::cuda {

/// Four neighbouring elements of O, the unit of every exchange.
struct Quad {
  float x[4] = {};

  __device__ __forceinline__ void add(const float4& other, float weight) {
    x[0] = fmaf(other.x, weight, x[0]);
    x[1] = fmaf(other.y, weight, x[1]);
    x[2] = fmaf(other.z, weight, x[2]);
    x[3] = fmaf(other.w, weight, x[3]);
  }
};

inline constexpr std::int32_t kQuadDims = 4;

[[nodiscard]] __device__ __forceinline__ std::uint32_t pack_as(bool half, float low, float high) {
  return half ? ptx::pack<DType::kFloat16>(low, high) : ptx::pack<DType::kBFloat16>(low, high);
}

/// Finishes a row, and stores its lse where it is asked for. By one lane.
template <KernelConfig kConfig>
[[nodiscard]] __device__ __forceinline__ RowEnd end_row(const DeviceCall& call, const SegmentRecord& record, std::int32_t row,
                                                        softmax::State state) {
  const Problem& problem = call.problem;
  const HeadPosition kv_head{record.sequence, record.kv_head};
  const std::int64_t packed = std::int64_t{record.row_block} * kConfig.q_rows + row;
  const float sink = output::row_sink(problem, call.shape.group, kv_head, packed);
  output::write_lse(problem, call.shape.group, record.lengths, kv_head, packed, state, sink);
  const PackedRow at = packed_row(packed, call.shape.group);
  const std::int64_t offset = at.head_in_group * problem.o.strides.head + at.token * problem.o.strides.token;
  const float scale = softmax::output_scale(state, sink);
  return {.to = record.output + offset, .scale = kConfig.fp8() ? scale * record.v_scale : scale};
}

/// Four merged elements of a row, if the problem has that many dims.
template <KernelConfig kConfig>
__device__ __forceinline__ void store_quad(const DeviceCall& call, const RowEnd& end, std::int32_t dim, const Quad& o) {
  if (dim >= call.problem.head_dim) return;
  std::uint16_t* to = end.to + dim;
  const bool half = kConfig.fp8() ? call.problem.o.dtype == DType::kFloat16 : kConfig.dtype == DType::kFloat16;
  const std::uint32_t low = pack_as(half, o.x[0] * end.scale, o.x[1] * end.scale);
  const std::uint32_t high = pack_as(half, o.x[2] * end.scale, o.x[3] * end.scale);
  if (call.vector_output) {
    *reinterpret_cast<uint2*>(to) = {low, high};
  } else {
    to[0] = static_cast<std::uint16_t>(low);
    to[1] = static_cast<std::uint16_t>(low >> 16);
    to[2] = static_cast<std::uint16_t>(high);
    to[3] = static_cast<std::uint16_t>(high >> 16);
  }
}

}  // namespace lean::cuda
