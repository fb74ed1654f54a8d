// The consumers of many rows: two warpgroups, which take the tiles of a segment one after the other. While the values of a tile are
// multiplied the scores of the next are, and become weights (FlashAttention-3, arXiv 2407.08608, sec. 3.2); and while one warpgroup does
// that the other's products run, without a barrier that has them ask in turn (sec. 3.1). Of latent tiles a warpgroup has half the values'
// dims, and takes part in all of them: both make scores and weights of the same tile at one time, each of half its tokens, or of a long
// call's many rows of whole tiles in turn. Of few rows, with factors swapped, one warpgroup does all.
#pragma once

#include <cstdint>
#include <type_traits>
#include <utility>

#include "backends/cuda/kernel/cta_memory.cuh"
#include "backends/cuda/kernel/fixup/swapped_segment_end.cuh"
#include "backends/cuda/kernel/fixup/wide_segment_end.cuh"
#include "backends/cuda/kernel/load/ring.cuh"
#include "backends/cuda/kernel/load/stage_columns.cuh"
#include "backends/cuda/kernel/tile/swapped_tile.cuh"
#include "backends/cuda/kernel/tile/wide_tile.cuh"
#include "backends/cuda/kernel/worker_track.cuh"
#include "backends/cuda/ptx/barrier.cuh"
#include "backends/cuda/ptx/copy.cuh"
#include "backends/cuda/ptx/grid.cuh"
#include "backends/cuda/ptx/shared.cuh"
#include "backends/cuda/ptx/warpgroup.cuh"
#include "backends/cuda/tensor_map.hpp"

namespace lean::cuda {

/// Registers of a thread: a CTA begins with 168 each, the most that 384 threads may have. Consumers of 128 dims and more have O, scores
/// and weights of 160 and 176 at once: with 192 what the loop over tiles goes by is spilled, and with 200 at 256 dims the compiler lets
/// no products run beside anything else; with 208 and 88 neither they nor the producers' loop over tiles spill a word. Of fewer dims
/// they need no more than 192, and producers spill nothing with 120. A latent tile's consumers have 128 of O, 16 of scores and
/// 16 of weights; in turns 128, 32 and 16.
template <KernelConfig kConfig>
inline constexpr int kWideConsumerRegisters = kConfig.head_dim >= 128 && (!kConfig.latent() || kConfig.in_turns()) ? 208 : 192;
template <KernelConfig kConfig>
inline constexpr int kWideProducerRegisters = 3 * 168 - 2 * kWideConsumerRegisters<kConfig>;

/// A CTA of 256 threads has all that they can use.
template <KernelConfig kConfig>
inline constexpr bool kMovesRegisters = cta_threads(kConfig) > 256;

template <KernelConfig kConfig>
class WideConsumer {
  using Tile = std::conditional_t<kConfig.swaps_ab(), SwappedTile<kConfig>, WideTile<kConfig>>;

 public:
  __device__ __forceinline__ WideConsumer(const DeviceCall& call, CtaMemory<kConfig>& memory)
      : call_(call), memory_(memory), stages_(ptx::shared_address(memory.ring(call))), stage_(call.load.ring_stages) {}

  /// Before the first segment comes one of nothing, while producers find out what the first is: a rehearsal. What runs once waits for
  /// its instructions, which come from the L2 line after line; so they have come when they are needed.
  __device__ __forceinline__ void run() {
    CtaShared<kConfig>& shared = memory_.shared;
    rehearses_ = ptx::opaque(1);  // else the compiler might make a copy of the loop for it
    // The one segment of a short call is known before a rehearsal would be over.
    if (kConfig.swaps_ab() && call_.plan.even.outputs > 0 && call_.shape.batch == 1) begin_in_earnest();
    for (PipelineState records(kRecords);;) {
      wait(shared.record_full[records.index], records.phase);
      const SegmentRecord& record = rehearses_ != 0 ? shared.wide.rehearsed : shared.records[records.index];
      if (record.last) return end_track<kConfig>();
      if (rehearses_ == 0) note<kConfig>(timeline::EventKind::kStreamBegin, records.index);
      Tile tile(call_);
      tile.begin(record, ptx::shared_address(memory_.queries_of(records.index)));
      wait(shared.queries_full[records.index], records.phase);
      if constexpr (kConfig.converts()) {
        if (rehearses_ == 0 && call_.problem.q.dtype == DType::kBFloat16) {
          tile.convert_queries(shared);
          publish_to_products();
          tile.take_query_scales(shared);
        }
      }
      // Producer threads stored them, as threads do; the barrier orders that before this fence, and the fence before products, which
      // read by the async proxy (PTX ISA, "Memory Consistency Model: Causality order", proxy-preserved base causality order).
      ptx::fence_before_copies();
      if constexpr (kConfig.swaps_ab()) {
        take_swapped_tiles(record, tile);
      } else if constexpr (kConfig.in_turns()) {
        take_latent_tiles_in_turns(record, tile);
      } else if constexpr (kConfig.latent()) {
        take_latent_tiles(record, tile);
      } else {
        if (record.token_begin < record.token_end) {
          take_tiles(record, tile);
        } else if (kOnePlace) {
          free_queries();
        }
      }
      tile.finish(shared);
      if (rehearses_ != 0) {
        begin_in_earnest();
        continue;
      }
      note<kConfig>(timeline::EventKind::kStreamEnd, records.index);
      ptx::barrier_wait(&shared.contributors_known[records.index], records.phase);
      deliver(call_, records.index, tile);
      ptx::barrier_arrive_by_warp(&shared.record_free[records.index], leads_ != 0);
      records.advance();
    }
  }

 private:
  static constexpr int kColumns = WideTile<kConfig>::kScoreColumns;  // of tiles that are not swapped
  static constexpr int kAhead = kColumns / 2;  // of them, those whose weights are made before the values are awaited
  static constexpr bool kOnePlace = kConfig.query_places() == 1;

  [[nodiscard]] __device__ __forceinline__ static std::int32_t group() {
    return static_cast<std::int32_t>(ptx::thread_index()) / ptx::kWarpgroupThreads;
  }

  /// What consumer threads stored to shared memory, before products read it.
  __device__ __forceinline__ static void publish_to_products() {
    ptx::fence_before_copies();
    consumer_sync<kConfig>();
  }

  __device__ __forceinline__ void begin_in_earnest() {
    rehearses_ = 0;
    leads_ = ptx::opaque(ptx::thread_index() % kWarpThreads == 0 ? 1 : 0);
    stage_ = PipelineState(call_.load.ring_stages);
    if (call_.launch.follows_append) ptx::await_earlier_kernels();  // they rotate the queries
  }

  [[nodiscard]] __device__ __forceinline__ static StagedTile tile_at(const SegmentRecord& record, std::int32_t token) {
    return {token, record.tokens_from(token, kConfig.tile_tokens)};
  }
  /// The tile behind one, of tokens up to `end`: of none where that is the last.
  [[nodiscard]] __device__ __forceinline__ static StagedTile behind(StagedTile tile, std::int32_t end) {
    return {tile.end(), min(kConfig.tile_tokens, end - tile.end())};
  }

  /// While a tile's scores become weights, the values of the one before are multiplied. From a tile's scores to the request for the
  /// next's a warpgroup does one thing after the other, so all that can be known is found out beside the exponentials: where the next
  /// factors lie, and whether they have come.
  __device__ __forceinline__ void take_tiles(const SegmentRecord& record, WideTile<kConfig>& tile) {
    const std::int32_t end = record.token_end;
    const bool in_boxes = whole_in_boxes(record);
    StagedTile now = tile_at(record, record.token_begin);
    PipelineState values_stage = stage_;  // of what is multiplied: at first of nothing
    await(record, now, stage_);
    const std::uint64_t first_queries = tile.queries_at();
    const std::uint64_t first_keys = tile.keys_at(address_of(stage_));
    tile.ask_for_scores(first_queries, first_keys);
    auto ruled = static_cast<std::uint32_t>(tile.has_rules(memory_.shared, record, now));
    tile.template await_scores<0>();
#pragma unroll 1
    for (bool first = true;; first = false) {
      const StagedTile next{now.end(), min(kConfig.tile_tokens, end - now.end())};
      tile.template await_scores<1>();
      free(stage_);
      const auto weighing = tile.update_softmax(memory_.shared, record, now, ruled != 0);
      if (kOnePlace && next.tokens <= 0) free_queries();
      tile.template make_weights<0, kAhead>(weighing);
      tile.keep_ahead(memory_.shared);
      const PipelineState multiplied = values_stage;
      values_stage = stage_;
      values_stage.advance();
      stage_ = values_stage;
      stage_.advance();
      const bool keys_came = has_come(next, stage_);
      const bool values_came = has_come(now, values_stage);
      const bool hides = tile.hides_values(record, now);
      const bool goes_on = ptx::opaque(static_cast<std::uint32_t>(in_boxes && keys_came && values_came && !hides)) != 0;
      tile.await_output();
      arrive(memory_.shared.stage_free[multiplied.index], !first);
      if (!first) tile.rescale();
      tile.template make_weights<kAhead, kColumns - kAhead>(weighing);
      tile.take_weights();
      const std::uint64_t queries = tile.queries_at();
      const std::uint64_t keys = tile.keys_at(address_of(stage_));
      const std::uint64_t values = tile.values_at(address_of(values_stage));
      if (!goes_on) {
        if (next.tokens <= 0) break;
        await(record, next, stage_);
        await_whole(record, now, values_stage);
        if (hides) clear_unseen(values_stage);
      }
      tile.ask_for_scores(queries, keys);
      // Here it costs nothing: what asks for the values' products waits until most of the scores' have run.
      ruled = ptx::opaque(static_cast<std::uint32_t>(tile.has_rules(memory_.shared, record, next)));
      tile.ask_for_output(values);
      now = next;
    }
    await_whole(record, now, values_stage);
    if (tile.hides_values(record, now)) clear_unseen(values_stage);
    tile.ask_for_output(tile.values_at(address_of(values_stage)));
    tile.await_output();
    free(values_stage);
  }

  /// Both warpgroups go through a tile together: each makes the scores and weights of half its tokens, and of the others' takes the
  /// weights. Scores made twice would take a third more products, and a warpgroup alone has nothing to do beside its softmax. The
  /// queries' one place is free once the last scores are there.
  __device__ __forceinline__ void take_latent_tiles(const SegmentRecord& record, WideTile<kConfig>& tile) {
    std::int32_t token = record.token_begin;
    if (token >= record.token_end) free_queries();
#pragma unroll 1
    while (token < record.token_end) {
      const StagedTile now = tile_at(record, token);
      await_whole(record, now, stage_);
      const std::uint64_t queries = tile.queries_at();
      const std::uint32_t stage = address_of(stage_);
      tile.ask_for_scores(queries, tile.keys_at(stage));
      const bool ruled = ptx::opaque(static_cast<std::uint32_t>(tile.has_rules(memory_.shared, record, now))) != 0;
      tile.template await_scores<0>();
      if (now.end() >= record.token_end) free_queries();
      tile.template make_weights<0, kColumns>(tile.update_softmax(memory_.shared, record, now, ruled));
      tile.rescale();
      tile.take_weights();
      tile.ask_for_own_output(stage);
      tile.take_others(stage, rehearses_ == 0);
      tile.ask_for_others_output(stage);
      tile.await_output();
      free(stage_);
      stage_.advance();
      token = now.end();
    }
  }

  /// One thing after the other, by the one warpgroup. A stage comes and goes part by part: scores are made of what is there, and the next
  /// tile comes where values are multiplied, so that the memory waits for weights and little more.
  __device__ __forceinline__ void take_swapped_tiles(const SegmentRecord& record, Tile& tile) {
    const bool in_boxes = whole_in_boxes(record);
    std::int32_t token = record.token_begin;
    if (kOnePlace && token >= record.token_end) free_queries();
#pragma unroll 1
    while (token < record.token_end) {
      const StagedTile now = tile_at(record, token);
      const std::uint64_t queries = tile.queries_at();
      const std::uint64_t keys = tile.keys_at(address_of(stage_));
      if (now.tokens != kConfig.tile_tokens) clear_rest_of(now, stage_);
      for_each_part([&]<int kPart>() {
        await_part(in_boxes, now, stage_, kPart);
        tile.template ask_for_scores<kPart>(queries, keys);
      });
      tile.await_scores();
      token = now.end();
      if (kOnePlace && token >= record.token_end) free_queries();
      tile.make_weights(record, now);
      tile.pin_output();
      for_each_part([&]<int kPart>() { tile.template ask_for_output<kPart>(keys); });
      for_each_part([&]<int kPart>() {
        ptx::await_products<kConfig.stage_parts() - 1 - kPart>();
        free_part(stage_, kPart);
      });
      tile.pin_output();
      stage_.advance();
    }
  }

  /// Calls `visit` with the number of each part of a stage, one after the other.
  template <typename TVisit>
  __device__ __forceinline__ static void for_each_part(const TVisit& visit) {
    [&]<int... kPart>(std::integer_sequence<int, kPart...>) {
      (visit.template operator()<kPart>(), ...);
    }(std::make_integer_sequence<int, kConfig.stage_parts()>());
  }

  /// What is known of a segment whose tiles are made in turns.
  struct Turns {
    std::int32_t end;
    bool in_boxes;  // whole_in_boxes()
  };

  /// The warpgroups make a segment's weights in turn, a tile each, and each multiplies those of all tiles, in their order: so what an
  /// output's maximum grew to is known to both in the same order. While one makes weights of its scores, the other has multiplied those
  /// of its own tile and nothing to do until they come: so it asks for what scores of the tile behind the stage's first part gives, and
  /// for the rest behind the given weights' products, whose end lets go of a stage. Sums are added up once the weights are given. The
  /// queries' one place is free once both have their last scores. In a rehearsal either makes weights, and neither waits for the other's.
  __device__ __forceinline__ void take_latent_tiles_in_turns(const SegmentRecord& record, WideTile<kConfig>& tile) {
    StagedTile own = tile_at(record, record.token_begin);
    if (own.tokens <= 0) return free_queries();
    const Turns turns{record.token_end, whole_in_boxes(record)};
    const bool second = group() != 0 && rehearses_ == 0;
    const StagedTile first = own;
    const PipelineState first_stage = stage_;
    if (second) {
      stage_.advance();
      own = behind(first, turns.end);
    }
    if (own.tokens > 0) {
      ask_for_own_scores(turns, tile, own);
      tile.template await_scores<0>();
    } else {
      free_queries();
    }
    if (second) {
      ask_for_given_output(turns, tile, first, first_stage);
      tile.await_output();
      free_part(first_stage, 1);
      if (own.tokens <= 0) return;
    }
    // Once the stage is full: whose pages lie outside the pool is known then.
    const auto has_rules = [&] {
      return ptx::opaque(static_cast<std::uint32_t>(tile.has_rules(memory_.shared, record, own))) != 0;
    };
    bool ruled = has_rules();
#pragma unroll 1
    while (true) {
      const std::uint32_t stage = address_of(stage_);
      tile.template make_weights<0, kColumns, false>(tile.update_softmax(memory_.shared, record, own, ruled));
      tile.take_weights();
      tile.give_weights(memory_.shared, stage, rehearses_ == 0);
      tile.rescale();
      tile.ask_for_output(tile.values_at(stage));
      tile.sum_weights();
      const StagedTile others = behind(own, turns.end);
      own = behind(others, turns.end);
      arrive(memory_.shared.queries_free, own.tokens <= 0);
      ptx::fence_before_copies();  // to where the weights are
      if (group() == 0) free_part(stage_, 1);
      tile.await_output();
      free_part(stage_, group());
      stage_.advance();
      if (others.tokens <= 0) return;
      const PipelineState others_stage = stage_;
      stage_.advance();
      if (own.tokens > 0) ask_for_first_scores(turns, tile, own);
      ask_for_given_output(turns, tile, others, others_stage);
      if (own.tokens <= 0) {
        tile.await_output();
        free_part(others_stage, group());
        return;
      }
      ask_for_last_scores(turns, tile, own);
      ruled = has_rules();
      tile.template await_scores<1>();
      free_part(others_stage, group());
      tile.template await_scores<0>();
    }
  }

  /// Asks for the scores of the tile in stage_, part after part as they come. What one that is not whole lacks is cleared first, as by
  /// await_whole(), by this warpgroup alone.
  __device__ __forceinline__ void ask_for_own_scores(const Turns& turns, WideTile<kConfig>& tile, StagedTile own) {
    ask_for_first_scores(turns, tile, own);
    ask_for_last_scores(turns, tile, own);
  }
  /// What the first part of the stage adds to them, and what the last.
  __device__ __forceinline__ void ask_for_first_scores(const Turns& turns, WideTile<kConfig>& tile, StagedTile own) {
    if (own.tokens != kConfig.tile_tokens) clear_rest_of(own, stage_);
    await_part(turns.in_boxes, own, stage_, 0);
    tile.template ask_for_scores<0, kConfig.part_column(1)>(tile.queries_at(), tile.keys_at(address_of(stage_)));
  }
  __device__ __forceinline__ void ask_for_last_scores(const Turns& turns, WideTile<kConfig>& tile, StagedTile own) {
    await_part(turns.in_boxes, own, stage_, 1);
    tile.template ask_for_scores<kConfig.part_column(1)>(tile.queries_at(), tile.keys_at(address_of(stage_)));
  }

  /// Asks for the products of the weights that the other warpgroup gives, which it does once both parts of the stage have come.
  __device__ __forceinline__ void ask_for_given_output(const Turns& turns, WideTile<kConfig>& tile, StagedTile given,
                                                       const PipelineState& stage) {
    const std::uint64_t values = tile.values_at(address_of(stage));
    await_part(turns.in_boxes, given, stage, group());
    tile.take_given_weights(memory_.shared, address_of(stage));
    tile.ask_for_output(values);
    ptx::fence_before_copies();             // of the next keys to where the weights are
    if (group() == 0) free_part(stage, 1);  // it has read them
  }

  /// `in_boxes`: whole_in_boxes(). Those that convert have fenced themselves.
  __device__ __forceinline__ void await_part(bool in_boxes, StagedTile tile, const PipelineState& stage, std::int32_t part) const {
    wait(memory_.shared.stage_full[kConfig.part_of_stage(stage.index, part)], stage.phase);
    if (!kConfig.converts() && (!in_boxes || tile.tokens != kConfig.tile_tokens)) ptx::fence_before_copies();
  }
  __device__ __forceinline__ void free_part(const PipelineState& stage, std::int32_t part) const {
    arrive(memory_.shared.stage_free[kConfig.part_of_stage(stage.index, part)]);
  }

  __device__ __forceinline__ void free_queries() { arrive(memory_.shared.queries_free); }

  [[nodiscard]] __device__ __forceinline__ std::uint32_t address_of(const PipelineState& stage) const {
    return stages_ + static_cast<std::uint32_t>(kConfig.stage_place(call_.load.stage_bytes, stage.index));
  }

  __device__ __forceinline__ void await(const SegmentRecord& record, StagedTile tile, const PipelineState& stage) {
    wait(memory_.shared.stage_full[stage.index], stage.phase);
    if (by_threads(record, tile)) ptx::fence_before_copies();
  }
  /// Of values, rows past the tile's tokens hold leftovers, which a weight of 0 may not make 0: they are cleared.
  __device__ __forceinline__ void await_whole(const SegmentRecord& record, StagedTile tile, const PipelineState& values) {
    await(record, tile, values);
    if (tile.tokens == kConfig.tile_tokens) return;
    clear_rest(tile, values, static_cast<std::int32_t>(ptx::thread_index()), kConfig.consumer_threads());
    publish_to_products();
  }
  /// Values of tokens that rules hide from all of the block's rows, which a weight of 0 may not make 0 either; by both warpgroups, once both
  /// have their weights.
  __device__ __forceinline__ void clear_unseen(const PipelineState& values) const {
    consumer_sync<kConfig>();
    constexpr std::int32_t kThreads = kConfig.consumer_threads() / kConfig.tile_tokens;  // of a token
    const auto thread = static_cast<std::int32_t>(ptx::thread_index());
    if (!Tile::is_seen(memory_.shared, thread / kThreads)) {
      const std::uint32_t row = address_of(values) + static_cast<std::uint32_t>(thread / kThreads * kConfig.column_bytes());
#pragma unroll 1
      for (std::int32_t piece = thread % kThreads; piece < kConfig.column_bytes() / kPieceBytes; piece += kThreads) {
#pragma unroll
        for (int column = 0; column < kConfig.value_columns(); ++column) {
          ptx::store_shared(row + column * column_stage_bytes<kConfig> + static_cast<std::uint32_t>(piece * kPieceBytes),
                            {0, 0, 0, 0});
        }
      }
    }
    publish_to_products();
  }
  /// Of a tile that is not whole and comes in parts: the same by this warpgroup alone, once all parts are there.
  __device__ __forceinline__ void clear_rest_of(StagedTile tile, const PipelineState& stage) const {
#pragma unroll
    for (int part = 0; part < kConfig.stage_parts(); ++part) await_part(false, tile, stage, part);
    clear_rest(tile, stage, static_cast<std::int32_t>(ptx::thread_index()) % ptx::kWarpgroupThreads, ptx::kWarpgroupThreads);
    ptx::fence_before_copies();
    ptx::named_barrier(kGroupBarrier + static_cast<std::uint32_t>(group()), ptx::kWarpgroupThreads);
  }
  /// By so many threads, of which this is one.
  __device__ __forceinline__ void clear_rest(StagedTile tile, const PipelineState& values, std::int32_t thread,
                                             std::int32_t threads) const {
    const std::uint32_t stage = address_of(values);
    constexpr std::int32_t kPieces = kConfig.column_bytes() / kPieceBytes;
#pragma unroll 1
    for (std::int32_t i = tile.tokens * kPieces + thread; i < kConfig.tile_tokens * kPieces; i += threads) {
#pragma unroll
      for (int column = 0; column < kConfig.value_columns(); ++column) {
        ptx::store_shared(stage + column * column_stage_bytes<kConfig> + static_cast<std::uint32_t>(i * kPieceBytes), {0, 0, 0, 0});
      }
    }
  }

  /// Whether threads copied some of a tile, which products see after a fence only (Producer::boxed_tokens()). Those that convert have
  /// fenced themselves.
  [[nodiscard]] __device__ __forceinline__ bool by_threads(const SegmentRecord& record, StagedTile tile) const {
    if constexpr (kConfig.converts()) return false;
    return (tile.token | tile.tokens) % kBoxRows != 0 || !has_boxes(record);
  }
  [[nodiscard]] __device__ __forceinline__ bool has_boxes(const SegmentRecord& record) const {
    return call_.load.box_tokens != 0 && has_box_places(record.lengths);
  }

  /// Whether whole tiles need no fence: threads copy none of their tokens, or those that convert have fenced themselves.
  [[nodiscard]] __device__ __forceinline__ bool whole_in_boxes(const SegmentRecord& record) const {
    if constexpr (kConfig.converts()) return true;
    return has_boxes(record) && record.lengths.kv_begin % kBoxRows == 0;
  }

  /// Whether a tile that needs nothing but to be waited for has come.
  [[nodiscard]] __device__ __forceinline__ bool has_come(StagedTile tile, const PipelineState& stage) const {
    const bool passed =
        ptx::barrier_has_passed(&memory_.shared.stage_full[stage.index], stage.phase);  // asked for without a branch
    return passed && tile.tokens == kConfig.tile_tokens;
  }

  /// A rehearsal waits for nobody, and arrives nowhere.
  __device__ __forceinline__ void wait(std::uint64_t& barrier, std::uint32_t phase) const {
    if (rehearses_ == 0) ptx::barrier_wait(&barrier, phase);
  }
  __device__ __forceinline__ void arrive(std::uint64_t& barrier, bool arrives = true) const {
    if (ptx::kWarpArrivals > 1 && (rehearses_ != 0 || !arrives)) return;  // all lanes' would count
    ptx::barrier_arrive_by_warp(&barrier, leads_ != 0 && arrives);
  }

  __device__ __forceinline__ void free(const PipelineState& stage) const { arrive(memory_.shared.stage_free[stage.index]); }

  const DeviceCall& call_;
  CtaMemory<kConfig>& memory_;
  std::uint32_t stages_;
  PipelineState stage_;          // of the next keys; values lie in the one behind, where they are not the same
  std::uint32_t rehearses_ = 1;  // else 0
  std::uint32_t leads_ = 0;      // 1 in the lane that arrives for its warp; in a rehearsal in none
};

}  // namespace lean::cuda
