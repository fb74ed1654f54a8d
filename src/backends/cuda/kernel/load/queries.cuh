// Queries: where the rows of a row block lie in memory and, 8 dims at a time, in the exchange area from which warps load them.
#pragma once

#include <cstdint>

#include "backends/cuda/kernel/cta_memory.cuh"
#include "backends/cuda/kernel/kv_rows.cuh"
#include "backends/cuda/kernel/row_block.cuh"
#include "backends/cuda/kernel/staged_queries.cuh"
#include "backends/cuda/ptx/barrier.cuh"
#include "backends/cuda/ptx/copy.cuh"
#include "backends/cuda/ptx/shared.cuh"
#include "backends/cuda/ptx/special_registers.cuh"
#include "backends/cuda/tensor_map.hpp"
#include "problem/address.hpp"

namespace lean::cuda {

[[nodiscard]] __device__ __forceinline__ const std::uint16_t* query_row(const DeviceCall& call, const SegmentRecord& record,
                                                                        PackedRow at) {
  const Problem& problem = call.problem;
  const HeadPosition head{record.sequence, record.kv_head * call.shape.group + at.head_in_group};
  return static_cast<const std::uint16_t*>(problem.q.data) +
         q_offset(problem.q.strides, record.lengths, head, problem.cu_q_tokens != nullptr) + at.token * problem.q.strides.token;
}

/// Dims that queries lack are 0, and stay so: nobody copies anything there. By all consumer threads, once.
template <KernelConfig kConfig>
__device__ __noinline__ void pad_queries(const DeviceCall& call) {
  if constexpr (!kConfig.bulk_queries()) return;
  const std::int32_t first = call.problem.head_dim * kQueryBytes / kPieceBytes;
  constexpr std::int32_t kPieces = kConfig.head_dim * kQueryBytes / kPieceBytes;
  const std::uint32_t staged = ptx::shared_address(cta_memory<kConfig>().queries);
  for (auto i = static_cast<std::int32_t>(ptx::thread_index()); i < kRecords * kConfig.q_rows * kPieces;
       i += kConfig.consumer_threads()) {
    if (i % kPieces < first) continue;
    ptx::store_shared(staged + static_cast<std::uint32_t>(i / kPieces * kQueryRowBytes<kConfig> + i % kPieces * kPieceBytes),
                      {0, 0, 0, 0});
  }
}

/// Brings the record's queries to where they are staged, by one thread: a bulk copy a row.
template <KernelConfig kConfig>
__device__ __forceinline__ void copy_queries(const DeviceCall& call, const SegmentRecord& record, std::int32_t record_index) {
  const std::int32_t row_bytes = (kConfig.fills_rows() ? call.problem.head_dim : kConfig.head_dim) * kQueryBytes;
  CtaMemory<kConfig>& memory = cta_memory<kConfig>();
  std::uint64_t* full = &memory.shared.queries_full[record_index];
  const std::int32_t rows = record.rows;
  ptx::barrier_arrive_expect(full, static_cast<std::uint32_t>(rows * row_bytes));
  const Strides& strides = call.problem.q.strides;
  const std::uint16_t* token = query_row(call, record, {});  // of a flat line: one row block, which begins with token 0
  std::byte* to = memory.queries_of(record_index);
  const std::byte* const end = to + rows * kQueryRowBytes<kConfig>;
  for (; to < end; token += strides.token) {
    const std::uint16_t* from = token;
#pragma unroll 1
    for (std::int32_t head = 0; head < call.shape.group; ++head) {
      ptx::bulk_copy(to, from, static_cast<std::uint32_t>(row_bytes), full);
      to += kQueryRowBytes<kConfig>;
      from += strides.head;
    }
  }
}

/// The queries of a record's row block to the exchange area, by all consumer threads; rows and dims that do not exist are 0. Called
/// before a segment begins, when nothing is kept in registers yet.
template <KernelConfig kConfig>
__device__ __forceinline__ void stage_queries(const DeviceCall& call, std::int32_t record_index) {
  CtaMemory<kConfig>& memory = cta_memory<kConfig>();
  const SegmentRecord& record = memory.shared.records[record_index];
  const std::uint32_t staged = ptx::shared_address(memory.exchange);
  consumer_sync<kConfig>();  // what the segment before had there is read
#pragma unroll 1
  for (auto i = static_cast<std::int32_t>(ptx::thread_index()); i < kConfig.q_rows * kQueryPieces<kConfig>;
       i += kConfig.consumer_threads()) {
    const std::int32_t row = i / kQueryPieces<kConfig>;
    const std::int32_t dim = i % kQueryPieces<kConfig> * kQueryPieceDims;
    uint4 eight = {0, 0, 0, 0};
    if (row < record.rows && dim < call.problem.head_dim) {
      const std::uint16_t* from = query_row(call, record, query_of<kConfig>(call, record, row)) + dim;
      if (call.load.vector_queries) {
        eight = *reinterpret_cast<const uint4*>(from);
      } else {
        const auto* pairs = reinterpret_cast<const std::uint32_t*>(from);
        eight = {pairs[0], pairs[1], pairs[2], pairs[3]};
      }
    }
    ptx::store_shared(query_address<kConfig>(staged, row, dim / kQueryPieceDims), eight);
  }
}

/// Of one place for queries: until the segment before is done with it. Segments and records count alike, by twos.
template <KernelConfig kConfig>
__device__ __forceinline__ void await_free_queries(CtaShared<kConfig>& shared, std::int32_t record_index) {
  static_assert(kRecords == 2);
  ptx::barrier_wait(&shared.queries_free, static_cast<std::uint32_t>(record_index) ^ 1U);
}

/// Has a record's queries copied to its place, of many rows: by one thread, a box a column. Consumers of the segment before go on
/// meanwhile, and read the other place; where there is one place, they are waited for.
template <KernelConfig kConfig>
__device__ __forceinline__ void copy_query_boxes(const DeviceCall& call, const TensorMap& map, const SegmentRecord& record,
                                                 std::int32_t record_index) {
  constexpr std::int32_t kColumns = kConfig.stage_row_bytes(kConfig.head_dim) / wide::kColumnBytes;
  constexpr std::int32_t kColumnRows = kConfig.q_rows * wide::kColumnBytes;  // bytes of a column of all rows
  CtaMemory<kConfig>& memory = cta_memory<kConfig>();
  std::uint64_t* const full = &memory.shared.queries_full[record_index];
  if constexpr (kConfig.query_places() == 1) await_free_queries(memory.shared, record_index);
  const PackedRow at = row_in_block<kConfig>(call, record, 0);
  const bool packed = call.problem.cu_q_tokens != nullptr;
  const std::int32_t head = record.kv_head * call.shape.group + at.head_in_group;
  const std::int32_t token = at.token + (packed ? static_cast<std::int32_t>(record.lengths.q_first_token) : 0);
  const std::int32_t sequence = packed ? 0 : static_cast<std::int32_t>(record.sequence);
  ptx::fence_before_copies();  // rows of an output may have lain there, which consumers stored
  ptx::barrier_arrive_expect(full, kColumns * kColumnRows);
  std::byte* const to = memory.queries_of(record_index);
#pragma unroll
  for (std::int32_t column = 0; column < kColumns; ++column) {
    const ptx::TensorPlace from = ptx::place_of_queries(column * wide::kColumnBytes, head, token, sequence);
    ptx::tensor_copy(to + column * kColumnRows, &map, from, full);
  }
}

/// The same of rows that no box has: by all producer threads, pieces of 16 bytes one after the other; rows
/// and dims that do not exist become 0. A row's place among tokens and heads follows from that of the row before it, without a division.
template <KernelConfig kConfig>
__device__ __forceinline__ void copy_all_queries(const DeviceCall& call, const SegmentRecord& record, std::int32_t record_index,
                                                 std::int32_t thread) {
  constexpr std::int32_t kPieces = kQueryPieces<kConfig>;
  constexpr std::int32_t kThreads = (kPieces % (2 * wide::kPieces) == 0 ? 2 : 1) * wide::kPieces;  // of a row
  constexpr std::int32_t kAtOnce = kConfig.producer_threads() / kThreads;                          // rows
  static_assert(kAtOnce * kThreads == kConfig.producer_threads() && kConfig.q_rows % kAtOnce == 0 && kPieces % kThreads == 0);
  CtaMemory<kConfig>& memory = cta_memory<kConfig>();
  if constexpr (kConfig.query_places() == 1) await_free_queries(memory.shared, record_index);
  static_assert(kAtOnce % wide::kAtomRows == 0);  // pieces of rows so far apart are swizzled alike
  const Strides& strides = call.problem.q.strides;
  const PackedRow step = row_of_block<kConfig>(call, 0, kAtOnce);
  const std::int64_t to_next = step.token * strides.token + step.head_in_group * strides.head;
  const std::int32_t piece = thread % kThreads;
  std::int32_t row = thread / kThreads;
  const PackedRow at = row_in_block<kConfig>(call, record, row);
  std::int32_t head = at.head_in_group;
  const std::uint16_t* from = query_row(call, record, at) + piece * kQueryPieceDims;
  std::uint32_t to = query_address<kConfig>(ptx::shared_address(memory.queries_of(record_index)), row, piece);
#pragma unroll 1
  for (; row < kConfig.q_rows; row += kAtOnce) {
#pragma unroll
    for (std::int32_t first = 0; first < kPieces; first += kThreads) {
      ptx::async_copy_16(to + wide::piece_place(kConfig.q_rows, 0, first), from + first * kQueryPieceDims,
                         row < record.rows && has_piece<kConfig>(call, first + piece));  // else nothing is read, wherever it lies
    }
    to += kAtOnce * wide::kColumnBytes;
    from += to_next;
    head += step.head_in_group;
    if (head >= call.shape.group) {
      head -= call.shape.group;
      from += strides.token - call.shape.group * strides.head;
    }
  }
  ptx::barrier_arrive_after_copies(&memory.shared.queries_full[record_index]);
}

/// stage_queries() as a function that is called: with the widest row blocks of any call fewer registers are spilled so, with others
/// more.
template <KernelConfig kConfig>
inline constexpr bool kStagesQueriesApart = kConfig.any_call() && kConfig.q_rows == 128;
template <KernelConfig kConfig>
__device__ __noinline__ void stage_queries_apart(const DeviceCall& call, std::int32_t record_index) {
  stage_queries<kConfig>(call, record_index);
}

}  // namespace lean::cuda
