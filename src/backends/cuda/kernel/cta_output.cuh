// Where a row of O goes: the output, or a slot (docs/fixup.md).
#pragma once

#include <cstdint>

#include "backends/cuda/kernel/cta_shared.cuh"
#include "backends/cuda/ptx/mma.cuh"
#include "fixup/partial.hpp"
#include "output/rows.hpp"

namespace lean::cuda {

/// Four neighbouring elements of O, the unit of every exchange.
struct Quad {
  float x[4] = {};

  __device__ __forceinline__ void add(const float4& other) {
    x[0] += other.x;
    x[1] += other.y;
    x[2] += other.z;
    x[3] += other.w;
  }
  __device__ __forceinline__ void add(const float4& other, float weight) {
    x[0] = fmaf(other.x, weight, x[0]);
    x[1] = fmaf(other.y, weight, x[1]);
    x[2] = fmaf(other.z, weight, x[2]);
    x[3] = fmaf(other.w, weight, x[3]);
  }
};

inline constexpr std::int32_t kQuadDims = 4;

/// Four elements of a finished row: scaled, rounded, stored; with dim 0 the row's lse too.
template <KernelConfig kConfig>
__device__ __forceinline__ void write_output(const DeviceCall& call, const SegmentRecord& record, std::int32_t row,
                                             std::int32_t dim, const Quad& o, softmax::State state) {
  const Problem& problem = call.problem;
  const HeadPosition kv_head{record.sequence, record.kv_head};
  const std::int64_t packed = std::int64_t{record.row_block} * kConfig.q_rows + row;
  const softmax::Finished finished = softmax::finalize(state, output::row_sink(problem, call.shape.group, kv_head, packed));
  auto* to = static_cast<std::uint16_t*>(problem.o.data) +
             output::row_offset(problem, call.shape.group, record.lengths, kv_head, packed) + dim;
  const std::uint32_t low = ptx::pack<kConfig.dtype>(o.x[0] * finished.scale, o.x[1] * finished.scale);
  const std::uint32_t high = ptx::pack<kConfig.dtype>(o.x[2] * finished.scale, o.x[3] * finished.scale);
  if (call.vector_output) {
    *reinterpret_cast<uint2*>(to) = {low, high};
  } else {
    to[0] = static_cast<std::uint16_t>(low);
    to[1] = static_cast<std::uint16_t>(low >> 16);
    to[2] = static_cast<std::uint16_t>(high);
    to[3] = static_cast<std::uint16_t>(high >> 16);
  }
  if (dim == 0) output::write_lse(problem, call.shape.group, record.lengths, kv_head, packed, finished.lse);
}

/// Four elements and their row's state into `to`, or into the output where that is nowhere.
template <KernelConfig kConfig>
__device__ __forceinline__ void deliver(const DeviceCall& call, const SegmentRecord& record, const fixup::Partial& to,
                                        std::int32_t row, std::int32_t dim, const Quad& o, softmax::State state) {
  if (to.o == nullptr) return write_output<kConfig>(call, record, row, dim, o, state);
  *reinterpret_cast<float4*>(to.o_row(row) + dim) = {o.x[0], o.x[1], o.x[2], o.x[3]};
  if (dim != 0) return;
  to.m[row] = state.m;
  to.l[row] = state.l;
}

}  // namespace lean::cuda
