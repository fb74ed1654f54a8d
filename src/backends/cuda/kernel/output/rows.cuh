// Finished rows of O into the output, with their LSE where it is asked for: the last stage of an output that one worker has whole,
// and what the fix-up ends in.
#pragma once

#include <cstdint>

#include "backends/cuda/kernel/device_call.hpp"
#include "backends/cuda/kernel/output/row_slice.cuh"
#include "backends/cuda/kernel/row_block.cuh"
#include "backends/cuda/kernel/segment_record.cuh"
#include "backends/cuda/kernel/tile/staged_parts.cuh"
#include "backends/cuda/ptx/mma.cuh"
#include "output/rows.hpp"
#include "problem/preconditions.hpp"

namespace lean::cuda {

/// A row of the output: where it lies, and what its merged elements are multiplied by.
struct RowEnd {
  std::uint16_t* to = nullptr;
  float scale = 1.0F;
  float value_scale = 1.0F;  // of fp8, by itself: the product of both may leave fp32's normal range
};

/// softmax::output_scale() within 2 ulp: a row's l is neither below 2^-126 nor above 2^126, where this quotient would be 0. An exact one
/// has a function behind it for what is out of range, and calls took 0.03 to 0.2 us longer for that (docs/notebook/merging.md). Wide kernels
/// have the exact one: with the other they spill up to 64 bytes more.
template <KernelConfig kConfig>
[[nodiscard]] __device__ __forceinline__ float output_scale(softmax::State state, float sink) {
  if constexpr (kConfig.wide()) return softmax::output_scale(state, sink);
  return softmax::output_scale(state, sink, [](float a, float b) { return __fdividef(a, b); });
}

/// Finishes a row. One lane of a warp stores its lse, where that is asked for.
template <KernelConfig kConfig>
[[nodiscard]] __device__ __forceinline__ RowEnd end_row(const DeviceCall& call, const SegmentRecord& record, std::int32_t row,
                                                        softmax::State state, bool stores_lse) {
  const Problem& problem = call.problem;
  const HeadPosition kv_head{record.sequence, record.kv_head};
  const PackedRow at = row_in_block<kConfig>(call, record, row);
  const float sink = output::row_sink(problem, call.shape.group, kv_head, at);
  if (stores_lse) output::write_lse(problem, call.shape.group, record.lengths, kv_head, at, state, sink);
  const std::int64_t offset = at.head_in_group * problem.o.strides.head + at.token * problem.o.strides.token;
  const float scale = output_scale<kConfig>(state, sink);
  // 0 x inf is no number: an empty row is 0 whatever its scale.
  const bool scaled = kConfig.scaled() && scale != 0.0F;
  return {.to = record.output + offset, .scale = scale, .value_scale = scaled ? record.v_scale : 1.0F};
}

/// Two neighbouring elements of O as the output has them.
template <KernelConfig kConfig>
[[nodiscard]] __device__ __forceinline__ std::uint32_t pack_output(const DeviceCall& call, float low, float high) {
  const bool half = kConfig.scaled() ? call.problem.o.dtype == DType::kFloat16 : kConfig.dtype == DType::kFloat16;
  return half ? ptx::pack<DType::kFloat16>(low, high) : ptx::pack<DType::kBFloat16>(low, high);
}

/// A lane's merged elements of a row as the output has them, in pairs.
template <KernelConfig kConfig, std::int32_t kDims = kLaneDims<kConfig>>
struct OutputPairs {
  std::uint32_t pairs[kDims / 2];

  __device__ __forceinline__ OutputPairs(const DeviceCall& call, const RowEnd& end, const LaneElements<kConfig, kDims>& o) {
#pragma unroll
    for (int i = 0; i < kDims / 2; ++i) {
      float low = o.x[2 * i] * end.scale;
      float high = o.x[2 * i + 1] * end.scale;
      if constexpr (kConfig.scaled()) {
        low *= end.value_scale;
        high *= end.value_scale;
      }
      pairs[i] = pack_output<kConfig>(call, low, high);
    }
  }
};

/// Stores four neighbouring elements of an output row, two a word.
__device__ __forceinline__ void store_four(const DeviceCall& call, std::uint16_t* to, const uint2& pairs) {
  if (call.output.vector_output) {
    *reinterpret_cast<uint2*>(to) = pairs;
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) to[i] = static_cast<std::uint16_t>((i < 2 ? pairs.x : pairs.y) >> (i % 2 * 16));
}

/// Stores a lane's merged elements of a row, if the problem has that many dims.
template <KernelConfig kConfig, std::int32_t kDims>
__device__ __forceinline__ void store_elements(const DeviceCall& call, const RowEnd& end, std::int32_t dim,
                                               const LaneElements<kConfig, kDims>& o) {
  if (kConfig.wide() ? dim >= value_dim_of(call.problem) : dim >= call.problem.head_dim) return;
  std::uint16_t* to = end.to + dim;
  const auto [pairs] = OutputPairs<kConfig, kDims>(call, end, o);
  if (call.output.vector_output) {
    if constexpr (kDims == 4) {
      *reinterpret_cast<uint2*>(to) = {pairs[0], pairs[1]};
    } else {
      *reinterpret_cast<std::uint32_t*>(to) = pairs[0];
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kDims; ++i) to[i] = static_cast<std::uint16_t>(pairs[i / 2] >> (i % 2 * 16));
}

/// Where the dims of a row lie that are kept from `dim` on.
template <KernelConfig kConfig>
[[nodiscard]] __device__ __forceinline__ std::int32_t output_dim(std::int32_t row, std::int32_t dim) {
  return swizzled_vector<kConfig>(row, dim / kVectorDims) * kVectorDims + dim % kVectorDims;
}

/// Stores a merged slice of a row into the output.
template <KernelConfig kConfig, std::int32_t kDims>
__device__ __forceinline__ void output_slice(const DeviceCall& call, const SegmentRecord& record, std::int32_t row,
                                             std::int32_t slice, const RowSlice<kConfig, kDims>& whole) {
  const std::int32_t dim = dim_of_lane<kConfig, kDims>(slice);
  const RowEnd end = end_row<kConfig>(call, record, row, whole.state, dim == 0);
  store_elements<kConfig>(call, end, output_dim<kConfig>(row, dim), whole.o);
}

}  // namespace lean::cuda
