// Producer: the producer warps of the warp-specialised kernel. They walk the worker's segments, announce each to the consumer
// warps, and keep the ring of K and V tiles full. A stage holds the K or the V rows of one LeanTile: end to end but for what fills
// a row up to 16 bytes, or in columns (load/stage_columns.cuh). Only rows that exist are copied.
#pragma once

#include <cstdint>

#include "backends/cuda/kernel/cta_memory.cuh"
#include "backends/cuda/kernel/kv_rows.cuh"
#include "backends/cuda/kernel/load/box_copies.cuh"
#include "backends/cuda/kernel/load/converted_rows.cuh"
#include "backends/cuda/kernel/load/page_copies.cuh"
#include "backends/cuda/kernel/load/queries.cuh"
#include "backends/cuda/kernel/load/ring.cuh"
#include "backends/cuda/kernel/load/row_pieces.cuh"
#include "backends/cuda/kernel/load/stage_columns.cuh"
#include "backends/cuda/kernel/load/thread_copies.cuh"
#include "backends/cuda/kernel/plan/record_writer.cuh"
#include "backends/cuda/kernel/plan/side_workers.cuh"
#include "backends/cuda/kernel/plan/worker_segments.cuh"
#include "backends/cuda/kernel/tuning.hpp"
#include "backends/cuda/ptx/copy.cuh"
#include "backends/cuda/ptx/grid.cuh"
#include "backends/cuda/ptx/shared.cuh"
#include "backends/cuda/ptx/special_registers.cuh"
#include "backends/cuda/ptx/warp.cuh"
#include "backends/cuda/sticky.cuh"
#include "problem/address.hpp"
#include "problem/pages.hpp"

namespace lean::cuda {

/// Producer threads that copy: one where a tile is one run of bytes, a warp where pages hold runs, else all.
template <KernelConfig kConfig>
[[nodiscard]] __device__ __forceinline__ std::int32_t copying_threads(const DeviceCall& call) {
  const Asked<kConfig> asked(call);
  if (!asked.bulk_copies()) return kConfig.producer_threads();
  return asked.pages() ? kWarpThreads : 1;
}

/// kEndToEnd: K and V without pages or cumulative lengths, which the caller knows.
template <KernelConfig kConfig, bool kEndToEnd>
class Producer {
 public:
  __device__ Producer(const DeviceCall& call, const TensorMaps& maps, CtaShared<kConfig>& shared, std::byte* ring_memory)
      : call_(call),
        maps_(maps),
        asked_(call),
        shared_(shared),
        ring_memory_(ring_memory),
        ring_(call.load.ring_stages),
        row_bytes_(row_bytes<kConfig>(call)),
        thread_(static_cast<std::int32_t>(threadIdx.x) - kConfig.consumer_threads()),
        by_threads_(call, thread_),
        writer_(call) {}

  /// Called by the producer's copying_threads(), and by the contributors' thread, if there is one, which walks the same segments
  /// and says of each who shares its output: that is needed at the segment's end only. One loop for both, so that the walk is there
  /// once.
  template <typename TCursor>
  __device__ void run(TCursor& cursor) {
    TileRange range;
    bool first_segment = true;
    for (PipelineState records(kRecords);; records.advance()) {
      const bool rehearses = first_segment && rehearses_walk();
      bool more = false;
      if (thread_ == 0 && first_segment && is_even(cursor)) {
        more = writer_.take(cursor, range);
      } else if (thread_ == 0 || finds_contributors() || rehearses) {
        more = writer_.next(cursor, range);
      }
      SegmentRecord& record = shared_.records[records.index];
      if (finds_contributors()) {
        if (!more) return;
        cursor.find_contributors();
        ptx::barrier_wait(&shared_.record_free[records.index], records.phase ^ 1U);
        announce_contributors(cursor, range, records);
        continue;
      }
      if (thread_ == 0) ptx::barrier_wait(&shared_.record_free[records.index], records.phase ^ 1U);
      if (thread_ == 0 || rehearses) {
        SegmentRecord& written = shared_.records[rehearses ? kRecords : records.index];
        written.last = !more;
        if (more) writer_.write(cursor, range, written);
      }
      if (thread_ == 0) {
        ptx::barrier_arrive(&shared_.record_full[records.index]);
      } else {
        ptx::barrier_wait(&shared_.record_full[records.index], records.phase);
      }
      sync_copying_warp();
      if (record.last) return;
      copy_segment(record, records.index, first_segment, [&] {
        if constexpr (!kConfig.has_contributors_warp()) {
          if (!asked_.chunks() || range.tile_begin == cursor.segment().tile_begin) cursor.find_contributors();
          announce_contributors(cursor, range, records);
        }
      });
      first_segment = false;
      sync_copying_warp();
      if (!asked_.bulk_copies()) ptx::barrier_arrive_by_warp(&shared_.record_free[records.index], thread_ % kWarpThreads == 0);
    }
  }

  /// Does what run() does for a worker that has one segment, by one thread of its warp: it is announced when its first tile is asked for,
  /// and not before. False where the lengths that it was made of do not hold: then it is as if nothing had been asked for.
  template <typename TCursor, typename THolds>
  [[nodiscard]] __device__ __forceinline__ bool run(OneSegment<TCursor, THolds> one) {
    static_assert(kEndToEnd && kConfig.copies_runs() && !kConfig.has_contributors_warp() && kConfig.bulk_queries());
    TCursor& cursor = one.cursor;
    PipelineState records(kRecords);
    TileRange range;
    SegmentRecord record;
    HeadRows v;
    std::int32_t token = 0;
    std::int32_t tokens = 0;
    const bool any = writer_.next(cursor, range);
    if (any) {
      writer_.write(cursor, range, record);
      const HeadRows k = rows_of(call_, true, record);
      v = rows_of(call_, false, record);
      token = record.token_begin;
      tokens = record.tokens_from(token, kConfig.tile_tokens);
      if (tokens > 0) copy_tile(k, record, token, tokens);
    }
    const std::uint32_t keys_asked = ptx::clock_cycles();
    record.queries_asked = any && one.ahead;
    if (record.queries_asked && thread_ == 0) copy_queries<kConfig>(call_, record, records.index);
    if (!one.holds()) {
      if (any && thread_ == 0) take_back(tokens > 0);
      __syncwarp();
      return false;
    }
    if (thread_ != 0) return true;
    if (any) {
      shared_.records[records.index] = record;
      ptx::barrier_arrive(&shared_.record_full[records.index]);
      announce_contributors(cursor, range, records);
      while (ptx::clock_cycles() - keys_asked < kValuesAfterCycles) {
      }
      if (tokens > 0) copy_tile(v, record, token, tokens);
      const HeadRows k = rows_of(call_, true, record);
      for (token += tokens; token < record.token_end; token += tokens) {
        tokens = record.tokens_from(token, kConfig.tile_tokens);
        copy_tile(k, record, token, tokens);
        copy_tile(v, record, token, tokens);
      }
      records.advance();
    }
    shared_.records[records.index].last = true;
    ptx::barrier_arrive(&shared_.record_full[records.index]);
    return true;
  }

 private:
  [[nodiscard]] __device__ bool finds_contributors() const {
    return kConfig.has_contributors_warp() && thread_ == kConfig.producer_threads();
  }

  /// Of many rows a second thread walks, and writes, what nobody looks at, while the first builds a stair line (CtaWide).
  [[nodiscard]] __device__ bool rehearses_walk() const {
    return kConfig.stairs() && thread_ == kWarpThreads && call_.plan.flat && call_.stair.even.outputs == 0;
  }

  template <typename TCursor>
  [[nodiscard]] __device__ __forceinline__ static bool is_even(const TCursor& cursor) {
    if constexpr (kConfig.stairs()) return cursor.is_even();
    return false;
  }

  __device__ void sync_copying_warp() const { __syncwarp(copying_threads<kConfig>(call_) == 1 ? 1U : ptx::kAllLanes); }

  template <typename TCursor>
  __device__ __forceinline__ void announce_contributors(const TCursor& cursor, const TileRange& range,
                                                        const PipelineState& records) {
    writer_.write_contributors(cursor, range, shared_.records[records.index]);
    ptx::barrier_arrive(&shared_.contributors_known[records.index]);
  }

  /// Waits for the first keys and queries, which nobody else knows of, and has their places as if none had been asked for.
  __device__ __forceinline__ void take_back(bool keys) {
    const auto end = [](std::uint64_t& full) {
      ptx::barrier_wait(&full, 0);
      ptx::barrier_end(&full);
      ptx::barrier_init(&full, 1);
    };
    if (keys) end(shared_.stage_full[0]);
    end(shared_.queries_full[0]);
    ptx::barrier_init_fence();
  }

  [[nodiscard]] __device__ HeadRows rows_of(const DeviceCall& call, bool keys, const SegmentRecord& record) const {
    return head_rows(Asked<kConfig, kEndToEnd>(call), keys, record.lengths, {record.sequence, record.kv_head});
  }

  /// How many of a tile's first tokens come in boxes: of rows that exist and, with pages, lie in one.
  [[nodiscard]] __device__ __forceinline__ std::int32_t boxed_tokens(const SegmentRecord& record, std::int32_t token,
                                                                     std::int32_t tokens) const {
    if (!asked_.tensor_copies() || (asked_.pages() && token % kBoxRows != 0)) return 0;
    if (!has_box_places(record.lengths)) return 0;
    return tokens / kBoxRows * kBoxRows;
  }

  /// The queries are asked for after the first keys, which are longer under way, and before more would keep them waiting; the first
  /// segment's by whoever computes with them, beside all this. `then`: done once, by thread 0, when the first tiles are under way.
  template <typename TThen>
  __device__ __forceinline__ void copy_segment(const SegmentRecord& record, std::int32_t record_index, bool first_segment,
                                               const TThen& then) {
    const HeadRows k = rows_of(call_, true, record);
    HeadRows v;
    const auto after_first_keys = [&] {
      if (kConfig.bulk_queries() && !first_segment && thread_ == 0) {
        await_append();
        copy_queries<kConfig>(call_for_later<kConfig>(call_), record, record_index);
      }
      if constexpr (kConfig.wide()) {  // of the first segment too: consumers have nothing to do but wait
        await_append();
        if (call_.load.query_boxes) {
          if (thread_ == kWarpThreads) {  // of a warp that neither walks nor asks for tall boxes
            copy_query_boxes<kConfig>(call_for_later<kConfig>(call_), maps_.q, record, record_index);
          }
        } else {
          copy_all_queries<kConfig>(call_for_later<kConfig>(call_), record, record_index, thread_);
        }
      }
      if constexpr (!kConfig.latent()) v = rows_of(call_for_later<kConfig>(call_), false, record);
    };
    std::int32_t token = record.token_begin;
    if constexpr (kConfig.converts()) {
      convert_tiles(k, record, after_first_keys, then);
    } else if constexpr (kConfig.copies_runs() ||
                         kConfig.wide()) {  // K and V by one place in the code: less is fetched before the first
      const std::int32_t end = record.token_end;
      std::int32_t tokens = 0;
      // Keys wait for tiles of the segment before. Where its queries stay in a place of their own the next ones come before any keys.
      const std::int32_t first = kConfig.wide() && kConfig.query_places() == 2 && !first_segment ? -1 : 0;
      for (std::int32_t copy = first; copy < 2 || token < end; ++copy) {  // once each where there are no tokens
        const bool keys = kConfig.latent() || copy % 2 == 0;
        if (keys) tokens = record.tokens_from(token, kConfig.tile_tokens);
        if (copy >= 0 && token < end) copy_tile(either(keys, k, v), record, token, tokens);
        if (copy == first) after_first_keys();
        if (copy == 1 && thread_ == 0) then();
        if (copy >= 0 && (kConfig.latent() || !keys)) token += tokens;
        if constexpr (kConfig.wide()) {
          if (copy != 0 && (kConfig.latent() || !keys)) token = copy_whole_tiles(record, token, end);
        }
      }
    } else {
      if (kConfig.copies_by_threads() && asked_.pages() && token < record.token_end) {
        pages_ = ask_for_pages<kConfig>(call_, record, token, record.tokens_from(token, kConfig.tile_tokens), 0);
      }
      do {  // once where there are no tokens
        const std::int32_t tokens = record.tokens_from(token, kConfig.tile_tokens);
        const bool first = token == record.token_begin;
        const bool any = token < record.token_end;
        if (any) copy_tile(k, record, token, tokens);
        if (first) after_first_keys();
        LanePages<kConfig> next{};
        const std::int32_t behind = token + tokens;
        if (kConfig.copies_by_threads() && asked_.pages() && behind < record.token_end) {
          next = ask_for_pages<kConfig>(call_, record, behind, record.tokens_from(behind, kConfig.tile_tokens), 0);
        }
        if (any) copy_tile(v, record, token, tokens);
        if (kConfig.copies_by_threads()) pages_ = next;
        if (first && thread_ == 0) then();
        token += tokens;
      } while (token < record.token_end);
    }
  }

  /// Converts a segment's tiles into the stages, keys and values in turn, or what is both. A tile may hold new tokens, so the first one
  /// waits for them.
  template <typename TAfterFirstKeys, typename TThen>
  __device__ __forceinline__ void convert_tiles(const HeadRows& k, const SegmentRecord& record,
                                                const TAfterFirstKeys& after_first_keys, const TThen& then) {
    const std::int32_t end = record.token_end;
    const auto tokens_from = [&](std::int32_t token) { return token < end ? record.tokens_from(token, kConfig.tile_tokens) : 0; };
    await_append();
    std::int32_t token = record.token_begin;
    std::int32_t tokens = tokens_from(token);
    const HeadRows v = kConfig.latent() ? k : rows_of(call_, false, record);
    ConvertedRows<kConfig> rows(call_, shared_, record, thread_);
    rows.send_for(k, token, tokens, kConfig.latent());
    rows.begin();
    after_first_keys();
    const std::uint32_t stages = ptx::shared_address(ring_memory_);
    bool keys = true;
#pragma unroll 1
    for (bool first = true; first || tokens > 0; first = false) {  // once where there are no tokens
      if (tokens > 0) {
        const bool values_next = !kConfig.latent() && keys;
        const std::int32_t next = values_next ? token : token + tokens;
        const std::int32_t next_tokens = values_next ? tokens : tokens_from(next);
        const std::uint32_t stage = stages + static_cast<std::uint32_t>(kConfig.stage_place(call_.load.stage_bytes, ring_.index));
        ptx::barrier_wait(&shared_.stage_free[ring_.index], ring_.phase ^ 1U);
        // Here, so that it is worked out beside conversions.
        rows.send_for(either(!values_next, k, v), next, next_tokens, kConfig.latent() || values_next);
        if (call_.problem.k.dtype == DType::kFloat8E5M2) {
          rows.template put<DType::kFloat8E5M2>(stage);
        } else {
          rows.template put<DType::kFloat8E4M3>(stage);
        }
        ptx::fence_before_copies();  // products read by the async proxy
        ptx::barrier_arrive(&shared_.stage_full[ring_.index]);
        ring_.advance();
        keys = !values_next;
        token = next;
        tokens = next_tokens;
      }
      if (first && thread_ == 0) then();
    }
    rows.end();
  }

  /// Copies whole tiles that come in tall boxes, as far as there are any; returns the first token that is left. They are asked for as
  /// they are multiplied and let go of, which is the keys of a tile ahead of the values of the one before: in the order of the stages
  /// keys would wait for room for values that comes half a tile's time later. All that is to be found out is found out ahead, pages a
  /// tile ahead: from when a stage is free to when its tile is asked for took some 200 instructions, a good part of a tile's time.
  __device__ __forceinline__ std::int32_t copy_whole_tiles(const SegmentRecord& record, std::int32_t token, std::int32_t end) {
    constexpr std::int32_t kTokens = kConfig.tile_tokens;
    const PagedKv& pages = call_.problem.pages;
    const Sequence& lengths = record.lengths;
    const bool paged = asked_.pages();
    const std::int32_t in_box = call_.load.box_tokens - 1;  // a power of two, less one; below 0: there are no boxes
    const bool places = has_box_places(lengths);
    if (in_box < 0 || !places || call_.launch.follows_append || (paged && (token & in_box) != 0)) return token;
    if ((token - lengths.kv_begin) % kTokens != 0) return token;  // a window begins within its first tile
    const bool packed = call_.problem.cu_kv_tokens != nullptr;
    const LaneBox<kConfig> box;
    const bool asks = box.row < kTokens && (box.row & in_box) == 0;
    const std::int32_t* const ids = page_ids(pages, lengths, record.sequence);
    const std::int32_t tiles = (end - token) / kTokens;
    std::int32_t page_id = paged && asks && tiles > 0 ? ids[page_of(call_, token + box.row)] : 0;
    ptx::TensorPlace place{.byte = box.column * kConfig.column_bytes(),
                           .token = token + box.row + (packed ? static_cast<std::int32_t>(lengths.kv_first_token) : 0),
                           .head = record.kv_head,
                           .sequence = packed ? 0 : static_cast<std::int32_t>(record.sequence)};
    std::byte* const own =
        ring_memory_ + static_cast<std::uint32_t>(box.column) * column_stage_bytes<kConfig> + box.row * kConfig.column_bytes();
    const auto ask = [&](const TensorMap& map, std::int32_t columns, const ptx::TensorPlace& from, PipelineState& stage) {
#pragma unroll
      for (int part = 0; part < kConfig.stage_parts(); ++part) {
        const std::int32_t first_column = kConfig.part_column(part);
        const std::int32_t end_column = kConfig.stage_parts() > 1 ? kConfig.part_column(part + 1) : columns;
        const std::int32_t place = kConfig.part_of_stage(stage.index, part);
        std::uint64_t* const full = &shared_.stage_full[place];
        ptx::barrier_wait(&shared_.stage_free[place], stage.phase ^ 1U);
        if (thread_ == 0)
          ptx::barrier_expect(full, static_cast<std::uint32_t>(kTokens * (end_column - first_column) * kConfig.column_bytes()));
        if (asks && (part == 0 || box.column >= first_column) && box.column < end_column) {
          copy_box(asked_, own + kConfig.stage_place(call_.load.stage_bytes, stage.index), map, from, full);
        }
        ptx::barrier_arrive_for_warp(full, thread_ % kWarpThreads == 0);
      }
      stage.advance();
      if (!kConfig.latent()) stage.advance();
    };
    PipelineState values = ring_;  // a tile's lie behind its keys
    values.advance();
    ptx::TensorPlace before = place;  // of the tile before
#pragma unroll 1
    for (std::int32_t tile = 0; tile < tiles + (kConfig.latent() ? 0 : 1); ++tile) {
      if (tile < tiles) {
        if (paged) {
          const std::int32_t first = token + box.row;
          place.token = first - page_of(call_, first) * pages.page_tokens;
          place.sequence = page_id;
          if (asks && !in_pool(pages, page_id)) report_lacking_page(call_, shared_);
          if (asks && tile + 1 < tiles) page_id = ids[page_of(call_, first + kTokens)];
        }
        ask(maps_.k.tall, kConfig.columns(), place, ring_);
        token += kTokens;
      }
      if constexpr (!kConfig.latent()) {
        if (tile > 0) ask(maps_.v.tall, kConfig.value_columns(), before, values);
        before = place;
      }
      place.token += kTokens;
    }
    return token;
  }

  /// One of the two, in registers.
  [[nodiscard]] __device__ __forceinline__ static HeadRows either(bool keys, const HeadRows& k, const HeadRows& v) {
    return {keys, keys ? k.first : v.first, keys ? k.token_bytes : v.token_bytes, keys ? k.page_bytes : v.page_bytes};
  }

  /// Before new tokens and queries are read: the kernel ahead that makes them may still run. Older tokens are read meanwhile.
  __device__ __forceinline__ void await_append() const {
    if (call_.launch.follows_append) ptx::await_earlier_kernels();
  }

  /// Has some tokens of K or of V brought into the next stage. K is asked for first: V lies on the same pages.
  __device__ void copy_tile(const HeadRows& rows, const SegmentRecord& record, std::int32_t token, std::int32_t tokens) {
    std::byte* stage = ring_memory_ + kConfig.stage_place(call_.load.stage_bytes, ring_.index);
    std::uint64_t* full = &shared_.stage_full[kConfig.part_of_stage(ring_.index, 0)];
    if (asked_.windowed_chunks() && token < record.first_seen) {  // what no row sees is left out
      const std::int32_t unseen = min(record.first_seen - token, tokens);
      stage += unseen * stage_row_bytes<kConfig>(call_);
      token += unseen;
      tokens -= unseen;
    }
    const std::int32_t boxed = boxed_tokens(record, token, tokens);
    // Where threads copy all of a tile its pages are asked for a tile ahead, as copy_segment() does for steps.
    LanePages<kConfig> next{};
    const bool ahead = kConfig.wide() && asked_.pages() && !asked_.tensor_copies();
    const bool goes_on = kConfig.latent() || !rows.keys;  // to other pages
    if (!kConfig.copies_by_threads() && asked_.pages() && rows.keys && (!ahead || token == record.token_begin)) {
      pages_ = ask_for_pages<kConfig>(call_, record, token, tokens, boxed);
    }
    if (const std::int32_t behind = token + tokens; ahead && goes_on && behind < record.token_end) {
      next = ask_for_pages<kConfig>(call_, record, behind, record.tokens_from(behind, kConfig.tile_tokens), 0);
    }
#pragma unroll
    for (int part = 0; part < kConfig.stage_parts(); ++part) {
      ptx::barrier_wait(&shared_.stage_free[kConfig.part_of_stage(ring_.index, part)], ring_.phase ^ 1U);
    }
    if (call_.launch.follows_append && token + tokens > record.lengths.kv_end - record.lengths.q_tokens) await_append();
    if (asked_.bulk_copies() && asked_.pages()) {
      copy_page_runs<kConfig>(call_, rows, {rows.keys, stage, full, token, tokens, pages_.ids[0]});
    } else if (asked_.bulk_copies()) {
      const auto bytes = static_cast<std::uint32_t>(tokens * row_bytes_);
      if (thread_ == 0) {
        ptx::barrier_arrive_expect(full, bytes);
        ptx::bulk_copy(stage, rows.first + token * rows.token_bytes, bytes, full);
      }
    } else {
      if (boxed > 0) {
        const PageRuns runs{rows.keys, stage, full, token, boxed, pages_.ids[0]};
        copy_boxes<kConfig>(call_, rows.keys ? maps_.k : maps_.v, record, runs);
      }
      if (const StagedTokens rest{boxed, token + boxed, tokens - boxed}; rest.tokens > 0) {
        const std::uint32_t place = ptx::shared_address(stage);
        if (kConfig.wide() && lie_on_short_pages(call_, rest)) {
          copy_page_rows<kConfig>(rows, place, rest.token, rest.tokens, pages_);
        } else {
          // Of many rows few tokens come so: what that takes is worked out when they do, not ahead of the first copy.
          const ThreadCopies<kConfig> by_threads = kConfig.wide() ? ThreadCopies<kConfig>(call_, thread_) : by_threads_;
          by_threads.copy(shared_, place, rows, record, rest, pages_);
        }
      }
      if (piece_bytes<kConfig>(call_) == 1) {  // the arrival after copies says nothing of what threads stored
        ptx::await_async_copies();
        ptx::barrier_arrive(full);
      } else {  // boxes' bytes are promised on the first part, which whoever makes scores waits for, too
#pragma unroll
        for (int part = 0; part < kConfig.stage_parts(); ++part) ptx::barrier_arrive_after_copies(full + part);
      }
    }
    if (ahead && goes_on) pages_ = next;
    ring_.advance();
  }

  const DeviceCall& call_;
  const TensorMaps& maps_;
  Asked<kConfig, kEndToEnd> asked_;
  CtaShared<kConfig>& shared_;
  std::byte* ring_memory_;
  PipelineState ring_;
  std::int32_t row_bytes_;
  std::int32_t thread_;
  ThreadCopies<kConfig> by_threads_;
  LanePages<kConfig> pages_;  // of the tile that is being copied
  RecordWriter<kConfig, kEndToEnd> writer_;
};

/// What visit_segments() calls with a worker's segments, by all warps but the consumers'.
template <KernelConfig kConfig>
struct Produce {
  const DeviceCall& call;
  const TensorMaps& maps;
  CtaMemory<kConfig>& memory;

  template <typename TCursor>
  __device__ __forceinline__ void operator()(TCursor& cursor) const {
    const auto thread = static_cast<std::int32_t>(threadIdx.x) - kConfig.consumer_threads();
    if (thread >= copying_threads<kConfig>(call) && thread != kConfig.producer_threads()) return;
    Producer<kConfig, false>(call, maps, memory.shared, memory.ring(call)).run(cursor);
    end();
  }

  template <typename TCursor, typename THolds>
  [[nodiscard]] __device__ __forceinline__ bool operator()(OneSegment<TCursor, THolds> one) const {
    if (!Producer<kConfig, true>(call, maps, memory.shared, memory.ring(call)).run(one)) return false;
    if (threadIdx.x == kConfig.consumer_threads()) end();
    return true;
  }

 private:
  /// When everything is asked for, and consumers still compute. The kernel behind is let start here: from the launch's beginning on calls
  /// took 1 to 2 % longer, at the CTA's end those of two workers on a multiprocessor up to 10 % (docs/notebook/short-calls.md).
  __device__ __forceinline__ void end() const {
    if (call.launch.dependent && !runs_beside<kConfig>(call)) ptx::start_dependents();
    name_fault(call.problem, call.fixup.slots.header());
  }
};

}  // namespace lean::cuda
