// Rows of a row block: which query token and head of the group each is.
#pragma once

#include <cstdint>

#include "backends/cuda/kernel/device_call.hpp"
#include "backends/cuda/kernel/segment_record.cuh"
#include "base/int_math.hpp"
#include "problem/address.hpp"

namespace lean::cuda {

/// packed_row() of a row of a row block. Wide kernels are asked for no more rows than 31 bits count (call_plan.cpp).
template <KernelConfig kConfig>
[[nodiscard]] __device__ __forceinline__ PackedRow row_of_block(const DeviceCall& call, std::int32_t row_block, std::int32_t row) {
  if constexpr (kConfig.wide()) {
    const std::int32_t packed = row_block * kConfig.q_rows + row;
    const std::int32_t token = quotient(packed, call.stair.group);
    return {token, packed - token * call.shape.group};
  }
  return packed_row(std::int64_t{row_block} * kConfig.q_rows + row, call.shape.group);
}

/// The same of a row of the record's block. A decode step has one block of few rows, for which a product does instead of a division.
template <KernelConfig kConfig>
[[nodiscard]] __device__ __forceinline__ PackedRow row_in_block(const DeviceCall& call, const SegmentRecord& record,
                                                                std::int32_t row) {
  if constexpr (!kConfig.step()) return row_of_block<kConfig>(call, record.row_block, row);
  static_assert(!kConfig.step() || kConfig.q_rows * kConfig.q_rows < 1 << kGroupInverseBits);
  const std::int32_t token = row * call.group_inverse >> kGroupInverseBits;
  return {token, row - token * call.shape.group};
}

/// Which query a row of the block is; rows that do not exist are the block's first.
template <KernelConfig kConfig>
[[nodiscard]] __device__ __forceinline__ PackedRow query_of(const DeviceCall& call, const SegmentRecord& record, std::int32_t row) {
  return row_in_block<kConfig>(call, record, row < record.rows ? row : 0);
}

}  // namespace lean::cuda
