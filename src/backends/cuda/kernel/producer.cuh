// Producer: the warps that walk the worker's segments, announce each, and keep the ring of K and V tiles full.
// A stage holds the K or the V rows of one LeanTile, end to end as in memory; only rows that exist are copied.
#pragma once

#include <cstdint>

#include "backends/cuda/kernel/cta_shared.cuh"
#include "backends/cuda/kernel/ring.cuh"
#include "backends/cuda/ptx/copy.cuh"
#include "problem/address.hpp"

namespace lean::cuda {

/// The lengths of the cursor's sequence.
[[nodiscard]] __device__ inline Sequence lengths_at(const DeviceCall& call, const DeviceCursor& cursor) {
  return LengthSource(call.problem)(cursor.segment().output.sequence);
}
template <typename TRules>
[[nodiscard]] __device__ const Sequence& lengths_at(const DeviceCall&, const schedule::FlatCursor<TRules>& cursor) {
  return cursor.lengths();
}

/// Moves to the worker's next segment; in the merging pass, to the next whose output it is the first of several to share.
template <typename TCursor>
[[nodiscard]] __device__ bool next_segment(const DeviceCall& call, TCursor& cursor) {
  if (call.pass == Pass::kWhole) return cursor.next_run();
  while (cursor.next()) {
    if (!cursor.segment().sole() && cursor.segment().contributor == 0) return true;
  }
  return false;
}

/// Walks the worker's segments beside the producer, and says of each who shares the output: that is needed at the segment's end
/// only. Called by one thread, which also copies the call to where what runs once a segment reads it.
template <KernelConfig kConfig, typename TCursor>
__device__ void announce_sharing(const DeviceCall& call, CtaShared<kConfig>& shared, TCursor& cursor) {
  shared.call = call;
  for (Turn turn(kRecords); next_segment(call, cursor); turn.advance()) {
    cursor.find_contributors();
    ptx::barrier_wait(&shared.record_free[turn.place], turn.parity ^ 1U);
    SegmentRecord& record = shared.records[turn.place];
    record.contributor = cursor.segment().contributor;
    record.contributors = cursor.segment().contributors;
    record.slots = cursor.segment().slots;
    ptx::barrier_arrive(&shared.sharing_known[turn.place]);
  }
}

template <KernelConfig kConfig>
class Producer {
 public:
  __device__ Producer(const DeviceCall& call, CtaShared<kConfig>& shared, std::byte* ring_memory)
      : call_(call),
        shared_(shared),
        ring_memory_(ring_memory),
        ring_(call.ring_stages),
        row_bytes_(call.problem.head_dim * 2),
        thread_(static_cast<std::int32_t>(threadIdx.x) - kConfig.consumer_threads()) {}

  /// Called by the producer's threads; with bulk copies by its first thread alone. TCursor: DeviceCursor or FlatCursor.
  template <typename TCursor>
  __device__ void run(TCursor& cursor) {
    Turn record(kRecords);
    while (true) {
      if (thread_ == 0) {
        ptx::barrier_wait(&shared_.record_free[record.place], record.parity ^ 1U);
        announce(cursor, shared_.records[record.place]);
        ptx::barrier_arrive(&shared_.record_full[record.place]);
      } else {
        ptx::barrier_wait(&shared_.record_full[record.place], record.parity);
      }
      __syncwarp(call_.bulk_copies ? 1U : 0xFFFFFFFFU);
      const SegmentRecord& segment = shared_.records[record.place];
      if (segment.last) return;
      copy_segment(segment);
      if (!call_.bulk_copies) {
        __syncwarp();
        if (thread_ % kWarpThreads == 0) ptx::barrier_arrive(&shared_.record_free[record.place]);
      }
      record.advance();
    }
  }

 private:
  template <typename TCursor>
  __device__ void announce(TCursor& cursor, SegmentRecord& record) {
    record.last = !next_segment(call_, cursor);
    if (record.last) return;
    const auto& segment = cursor.segment();
    const auto& output = segment.output;
    const Sequence lengths = lengths_at(call_, cursor);
    const std::int64_t last_row = std::int64_t{output.row_block} * kConfig.q_rows + output.rows - 1;
    const std::int32_t visible = visible_end(lengths, packed_row(last_row, call_.shape.group).token, call_.problem.scores.causal);
    const std::int64_t begin = lengths.kv_begin + std::int64_t{segment.tile_begin} * kConfig.tile_tokens;
    const std::int64_t end = lengths.kv_begin + std::int64_t{segment.tile_end} * kConfig.tile_tokens;
    record.sequence = output.sequence;
    record.kv_head = output.kv_head;
    record.row_block = output.row_block;
    record.rows = output.rows;
    record.lengths = lengths;
    record.token_begin = static_cast<std::int32_t>(min_of(begin, visible));
    record.token_end = call_.pass == Pass::kMergeOnly ? record.token_begin : static_cast<std::int32_t>(min_of(end, visible));
  }

  __device__ void copy_segment(const SegmentRecord& record) {
    const HeadPosition at{record.sequence, record.kv_head};
    const bool cumulative = call_.problem.cu_kv_tokens != nullptr;
    const Strides& k_strides = call_.problem.k.strides;
    const Strides& v_strides = call_.problem.v.strides;
    const std::int64_t k_step = k_strides.token * 2;
    const std::int64_t v_step = v_strides.token * 2;
    const std::byte* k = static_cast<const std::byte*>(call_.problem.k.data) +
                         2 * kv_offset(k_strides, record.lengths, at, cumulative) + record.token_begin * k_step;
    const std::byte* v = static_cast<const std::byte*>(call_.problem.v.data) +
                         2 * kv_offset(v_strides, record.lengths, at, cumulative) + record.token_begin * v_step;
    for (std::int32_t left = record.token_end - record.token_begin; left > 0; left -= kConfig.tile_tokens) {
      const std::int32_t tokens = min(left, kConfig.tile_tokens);
      copy_tile(k, k_step, tokens);
      copy_tile(v, v_step, tokens);
      k += k_step * kConfig.tile_tokens;
      v += v_step * kConfig.tile_tokens;
    }
  }

  __device__ void copy_tile(const std::byte* rows, std::int64_t step, std::int32_t tokens) {
    ptx::barrier_wait(&shared_.stage_free[ring_.place], ring_.parity ^ 1U);
    std::byte* stage = ring_memory_ + ring_.place * call_.stage_bytes;
    std::uint64_t* full = &shared_.stage_full[ring_.place];
    if (call_.bulk_copies) {
      const auto bytes = static_cast<std::uint32_t>(tokens * row_bytes_);
      ptx::barrier_arrive_expect(full, bytes);
      ptx::bulk_copy(stage, rows, bytes, full);
    } else {
      copy_rows(ptx::shared_address(stage), rows, step, tokens);
      ptx::barrier_arrive_after_copies(full);
    }
    ring_.advance();
  }

  /// The 16-byte pieces of all rows in turn, dealt out over the threads: piece i lies at i x 16 in the stage.
  __device__ void copy_rows(std::uint32_t stage, const std::byte* rows, std::int64_t step, std::int32_t tokens) const {
    const std::int32_t row_pieces = row_bytes_ / 16;
    std::int32_t row = thread_ / row_pieces;
    std::int32_t piece = thread_ % row_pieces;
    const std::int32_t row_stride = kProducerThreads / row_pieces;
    const std::int32_t piece_stride = kProducerThreads % row_pieces;
    const std::byte* from = rows + row * step + piece * 16;
    const std::int64_t from_stride = row_stride * step + piece_stride * 16;
    const std::int64_t from_wrap = step - row_bytes_;
    for (std::uint32_t to = stage + static_cast<std::uint32_t>(thread_) * 16; row < tokens; to += kProducerThreads * 16) {
      ptx::async_copy_16(to, from);
      row += row_stride;
      piece += piece_stride;
      from += from_stride;
      if (piece >= row_pieces) {
        piece -= row_pieces;
        ++row;
        from += from_wrap;
      }
    }
  }

  const DeviceCall& call_;
  CtaShared<kConfig>& shared_;
  std::byte* ring_memory_;
  Turn ring_;
  std::int32_t row_bytes_;
  std::int32_t thread_;
};

}  // namespace lean::cuda
