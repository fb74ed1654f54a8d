// RecordWriter: what is computed as one, segment by segment or chunk by chunk, and what the other warps are told of each: which
// tokens, and for its end who shares the output and where the result goes. It knows the cursor's segments, not the line; the
// producer announces what is written here.
#pragma once

#include <cstdint>

#include "backends/cuda/kernel/asked.cuh"
#include "backends/cuda/kernel/cta_memory.cuh"
#include "backends/cuda/kernel/plan/merge_run.cuh"
#include "backends/cuda/kernel/plan/worker_segments.cuh"
#include "backends/cuda/kernel/row_block.cuh"
#include "backends/cuda/kernel/segment_record.cuh"
#include "fixup/arrival.hpp"
#include "fixup/chunk_tree.hpp"
#include "problem/address.hpp"
#include "problem/kv_scales.hpp"
#include "problem/reach.hpp"

namespace lean::cuda {

/// Moves to the worker's next segment; in the merging pass, to the next whose output it is the first of several to share.
template <KernelConfig kConfig, typename TCursor>
[[nodiscard]] __device__ bool next_segment(const DeviceCall& call, TCursor& cursor) {
  if constexpr (kConfig.any_call()) {
    if (Asked<kConfig>(call).merge_only()) {
      while (cursor.next()) {
        if (!cursor.segment().sole() && cursor.segment().contributor == 0) return true;
      }
      return false;
    }
  }
  return cursor.next_run();
}

/// What is computed as one: a segment, or with fixed_chunk a chunk of it. Tiles [begin, end) of the output.
struct TileRange {
  std::int32_t tile_begin = 0;
  std::int32_t tile_end = 0;
};

/// kEndToEnd: K and V without pages or cumulative lengths, which the caller knows.
template <KernelConfig kConfig, bool kEndToEnd>
class RecordWriter {
 public:
  __device__ __forceinline__ explicit RecordWriter(const DeviceCall& call) : call_(call), asked_(call) {}

  /// Takes the one segment of an even stair; false where the worker has none.
  template <typename TCursor>
  [[nodiscard]] __device__ __forceinline__ bool take(const TCursor& cursor, TileRange& range) const {
    range = {cursor.segment().tile_begin, cursor.segment().tile_end};
    return range.tile_begin < range.tile_end;
  }

  /// Moves to what is computed next; false where the worker is done.
  template <typename TCursor>
  [[nodiscard]] __device__ bool next(TCursor& cursor, TileRange& range) const {
    const bool chunks = asked_.chunks() && !asked_.merge_only();
    const auto& segment = cursor.segment();
    if (chunks && range.tile_end < segment.tile_end) {
      range.tile_begin = range.tile_end;
    } else {
      if (!next_segment<kConfig>(call_, cursor)) return false;
      range.tile_begin = segment.tile_begin;
    }
    range.tile_end = segment.tile_end;
    if (chunks) {
      const std::int32_t first_tile = segment.output.first_tile;
      const std::int32_t chunk_end = (chunk_of(first_tile + range.tile_begin) + 1) * call_.plan.chunk_tiles - first_tile;
      range.tile_end = min(range.tile_end, chunk_end);
    }
    return true;
  }

  /// Writes what the first tiles need.
  template <typename TCursor>
  __device__ void write(const TCursor& cursor, const TileRange& range, SegmentRecord& record) {
    const auto& output = cursor.segment().output;
    const Sequence lengths = lengths_at(call_, cursor);
    const KeySpan seen = keys_of(output, lengths);
    const std::int32_t first_token = lengths.kv_begin + output.first_tile * kConfig.tile_tokens;
    std::int32_t begin = first_token + range.tile_begin * kConfig.tile_tokens;
    // With chunks a tile begins where it begins, whatever its row block sees: which lane sums which token must not depend on that.
    if (!asked_.windowed_chunks()) begin = max(begin, seen.begin);
    // What lies behind the last tile may not fit.
    const std::int32_t end = range.tile_end == output.tiles ? seen.end : first_token + range.tile_end * kConfig.tile_tokens;
    record.queries_asked = false;
    record.sequence = output.sequence;
    record.kv_head = output.kv_head;
    record.row_block = output.row_block;
    record.rows = output.rows;
    record.lengths = lengths;
    record.first_seen = seen.begin;
    record.token_begin = min(begin, seen.end);
    record.token_end = asked_.merge_only() ? record.token_begin : min(end, seen.end);
  }

  /// Writes what the segment's end needs.
  template <typename TCursor>
  __device__ __forceinline__ void write_contributors(const TCursor& cursor, const TileRange& range, SegmentRecord& record) {
    const DeviceCall& call = call_for_later<kConfig>(call_);
    record.contributor = cursor.segment().contributor;
    record.contributors = cursor.segment().contributors;
    record.slots = cursor.segment().slots;
    const auto& output = cursor.segment().output;
    const HeadPosition first_head{output.sequence, output.kv_head * call.shape.group};
    const OutputView& o = call.problem.o;
    record.output = static_cast<std::uint16_t*>(o.data) +
                    q_offset(o.strides, lengths_at(call, cursor), first_head, asked_.cumulative_queries());
    if constexpr (kConfig.scaled()) record.v_scale = v_scale_of(call.problem, output.kv_head);
    record.slot = nullptr;
    if (asked_.chunks()) {
      record.chunk = place_chunk(cursor.segment(), range);
      // Any call's warps leave their results in the slot first: where they merge them, registers are short.
      if (!kConfig.step() || record.chunk.ends_shared) {
        record.slot = call.fixup.slots.partial(record.slots.slot(record.contributor), record.chunk.place).o;
      }
    } else if (!record.sole()) {
      const fixup::Bundling bundling = kConfig.step_merges_jointly() ? fixup::Bundling{.size = record.contributors, .bundles = 1}
                                                                     : fixup::bundling_of(record.contributors);
      const std::int32_t bundle = bundling.bundles == 1 ? 0 : record.contributor / bundling.size;
      record.slot = call.fixup.slots.partial(record.slots.slot(record.contributor)).o;
      record.run = run_of_bundle(call.fixup.slots, record.slots, record.contributors, bundling, bundle, record.contributor);
      if constexpr (kConfig.wide() || kConfig.step_merges_jointly()) {
        record.stays = record.run.parts >= kConfig.fewest_joint_parts() && cursor.ends_share();
      }
    }
  }

 private:
  [[nodiscard]] __device__ std::int32_t chunk_of(std::int32_t tile) const { return quotient(tile, call_.plan.chunk_tiles); }

  /// What any of an output's rows sees.
  template <typename TOutput>
  [[nodiscard]] __device__ __forceinline__ KeySpan keys_of(const TOutput& output, const Sequence& lengths) const {
    if (kConfig.step() && call_.shape.reach.left < 0)
      return {lengths.kv_begin, lengths.kv_end};  // the last query sees the last key
    if constexpr (kConfig.step()) return visible_span(lengths, 0, lengths.q_tokens - 1, call_.shape.reach);
    return visible_span(lengths, row_of_block<kConfig>(call_, output.row_block, 0).token,
                        row_of_block<kConfig>(call_, output.row_block, output.rows - 1).token, call_.shape.reach);
  }

  /// Called for a segment's chunks one after the other.
  template <typename TSegment>
  [[nodiscard]] __device__ ChunkPlace place_chunk(const TSegment& segment, const TileRange& range) {
    const std::int32_t first_tile = segment.output.first_tile;
    if (range.tile_begin == segment.tile_begin) nodes_ = 0;
    const fixup::ChunkPush push = fixup::push_after(chunk_of(first_tile + segment.tile_begin), segment.contributor == 0,
                                                    {.level = 0, .index = chunk_of(first_tile + range.tile_begin)});
    const bool ends_segment = range.tile_end == segment.tile_end;
    const bool ends_output = ends_segment && segment.sole();
    const ChunkPlace chunk{.output_first = chunk_of(first_tile),
                           .place = nodes_,
                           .merges = ends_output ? nodes_ : push.merges,  // the tree's ragged right edge too
                           .node = push.node,
                           .ends_output = ends_output,
                           .ends_shared = ends_segment && !segment.sole()};
    nodes_ += 1 - push.merges;
    return chunk;
  }

  const DeviceCall& call_;
  Asked<kConfig, kEndToEnd> asked_;
  std::int32_t nodes_ = 0;  // on the stack of the segment's chunks
};

}  // namespace lean::cuda
