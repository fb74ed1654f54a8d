// The consumers of many rows: two warpgroups, which take the tiles of a segment one after the other. While the values of a tile are
// multiplied the scores of the next are, and become weights; and while one warpgroup does that the other's products run: they take
// turns to ask for theirs (FlashAttention-3, arXiv 2407.08608, sec. 3.1 and 3.2). Of a latent tile, of which registers hold no second
// one's scores, a warpgroup makes scores, weights and output in turn, and its softmax lies under the other's products alone.
#pragma once

#include <cstdint>

#include "backends/cuda/kernel/cta_memory.cuh"
#include "backends/cuda/kernel/fixup/wide_segment_end.cuh"
#include "backends/cuda/kernel/load/ring.cuh"
#include "backends/cuda/kernel/tile/wide_tile.cuh"
#include "backends/cuda/kernel/worker_track.cuh"
#include "backends/cuda/ptx/barrier.cuh"
#include "backends/cuda/ptx/copy.cuh"
#include "backends/cuda/ptx/grid.cuh"
#include "backends/cuda/ptx/shared.cuh"
#include "backends/cuda/ptx/warpgroup.cuh"
#include "backends/cuda/tensor_map.hpp"

namespace lean::cuda {

/// Of which warpgroup it is the turn to ask for products: a named barrier each.
inline constexpr std::uint32_t kTurnBarrier = 3;

/// Registers of a thread: a CTA begins with 168 each, the most that 384 threads may have. With 200 and 104 the producers' walk
/// spilled 176 bytes; 120 with 192 and 120, and 124 with 184 and 136, when these were compared: what is left is spilled before they
/// are dealt out anew. A latent tile's consumers have 128 of O and 32 of scores, which become 16 of weights, and spill one word a
/// segment. Those of 256 dims have all three at once, 176: with 200 the compiler lets no products run beside anything else.
template <KernelConfig kConfig>
inline constexpr int kWideConsumerRegisters = kConfig.head_dim > 192 && !kConfig.latent() ? 208 : 192;
template <KernelConfig kConfig>
inline constexpr int kWideProducerRegisters = 3 * 168 - 2 * kWideConsumerRegisters<kConfig>;

template <KernelConfig kConfig>
class WideConsumer {
 public:
  __device__ __forceinline__ WideConsumer(const DeviceCall& call, CtaMemory<kConfig>& memory)
      : call_(call),
        memory_(memory),
        stages_(ptx::shared_address(memory.ring(call))),
        keys_(call.load.ring_stages),
        values_(call.load.ring_stages) {
    values_.advance();
    if (group() != 0) ptx::named_barrier_arrive(kTurnBarrier, kConfig.consumer_threads());
  }

  __device__ __forceinline__ void run() {
    CtaShared<kConfig>& shared = memory_.shared;
    if (call_.launch.follows_append) ptx::await_earlier_kernels();  // they rotate the queries
    for (PipelineState records(kRecords);; records.advance()) {
      ptx::barrier_wait(&shared.record_full[records.index], records.phase);
      const SegmentRecord& record = shared.records[records.index];
      if (record.last) return end_track<kConfig>();
      note<kConfig>(timeline::EventKind::kStreamBegin, records.index);
      WideTile<kConfig> tile(call_);
      tile.begin(record, ptx::shared_address(memory_.queries_of(records.index)));
      ptx::barrier_wait(&shared.queries_full[records.index], records.phase);
      // Producer threads stored them, as threads do; the barrier orders that before this fence, and the fence before products, which
      // read by the async proxy (PTX ISA, "Memory Consistency Model: Causality order", proxy-preserved base causality order).
      ptx::fence_before_copies();
      if constexpr (kConfig.latent()) {
        take_latent_tiles(record, tile);
      } else {
        if (record.token_begin < record.token_end) {
          take_tiles(record, tile);
        } else if (kOnePlace) {
          free_queries();
        }
      }
      tile.finish();
      note<kConfig>(timeline::EventKind::kStreamEnd, records.index);
      ptx::barrier_wait(&shared.contributors_known[records.index], records.phase);
      deliver<kConfig>(call_, records.index, tile);
      ptx::barrier_arrive_by_warp(&shared.record_free[records.index], leads());
    }
  }

 private:
  static constexpr bool kOnePlace = kConfig.query_places() == 1;

  [[nodiscard]] __device__ __forceinline__ static std::int32_t group() {
    return static_cast<std::int32_t>(ptx::thread_index()) / ptx::kWarpgroupThreads;
  }
  [[nodiscard]] __device__ __forceinline__ static bool leads() { return ptx::thread_index() % kWarpThreads == 0; }

  /// What consumer threads stored to shared memory, before products read it.
  __device__ __forceinline__ static void publish_to_products() {
    ptx::fence_before_copies();
    consumer_sync<kConfig>();
  }

  [[nodiscard]] __device__ __forceinline__ static StagedTile tile_at(const SegmentRecord& record, std::int32_t token) {
    return {token, record.tokens_from(token, kConfig.tile_tokens)};
  }

  __device__ __forceinline__ void take_tiles(const SegmentRecord& record, WideTile<kConfig>& tile) {
    StagedTile now = tile_at(record, record.token_begin);
    const std::int32_t end = record.token_end;
    await_keys(record, now);
    take_turn();
    tile.ask_for_scores(address_of(keys_));
    pass_turn();
    tile.template await_scores<0>();
    release(keys_);
    if (kOnePlace && now.end() >= end) free_queries();
    tile.update_softmax(memory_.shared, record, now);
    tile.weigh();
#pragma unroll 1
    while (now.end() < end) {
      const StagedTile next = tile_at(record, now.end());
      await_keys(record, next);
      await_values(record, now);
      take_turn();
      tile.ask_for_scores(address_of(keys_));
      tile.ask_for_output(address_of(values_));
      pass_turn();
      tile.template await_scores<1>();
      release(keys_);
      if (kOnePlace && next.end() >= end) free_queries();
      tile.update_softmax(memory_.shared, record, next);
      tile.keep_ahead(memory_.shared);
      tile.await_output();
      release(values_);
      tile.weigh();
      now = next;
    }
    await_values(record, now);
    tile.ask_for_output(address_of(values_));
    tile.await_output();
    release(values_);
  }

  /// The queries' one place is free once the last scores are there.
  __device__ __forceinline__ void take_latent_tiles(const SegmentRecord& record, WideTile<kConfig>& tile) {
    std::int32_t token = record.token_begin;
    if (token >= record.token_end) free_queries();
#pragma unroll 1
    while (token < record.token_end) {
      const StagedTile now = tile_at(record, token);
      await_whole(record, now, keys_);
      take_turn();
      tile.ask_for_scores(address_of(keys_));
      pass_turn();
      tile.template await_scores<0>();
      if (now.end() >= record.token_end) free_queries();
      tile.update_softmax(memory_.shared, record, now);
      tile.weigh();
      tile.ask_for_output(address_of(keys_));
      tile.await_output();
      release(keys_);
      token = now.end();
    }
  }

  __device__ __forceinline__ void free_queries() { ptx::barrier_arrive_by_warp(&memory_.shared.queries_free, leads()); }

  [[nodiscard]] __device__ __forceinline__ std::uint32_t address_of(const PipelineState& stage) const {
    return stages_ + static_cast<std::uint32_t>(kConfig.stage_place(call_.load.stage_bytes, stage.index));
  }

  __device__ __forceinline__ void await(const SegmentRecord& record, StagedTile tile, const PipelineState& stage) {
    ptx::barrier_wait(&memory_.shared.stage_full[stage.index], stage.phase);
    if (by_threads(record, tile)) ptx::fence_before_copies();
  }
  __device__ __forceinline__ void await_keys(const SegmentRecord& record, StagedTile tile) { await(record, tile, keys_); }

  __device__ __forceinline__ void await_values(const SegmentRecord& record, StagedTile tile) { await_whole(record, tile, values_); }

  /// Of values, rows past the tile's tokens hold leftovers, which a weight of 0 may not make 0: they are cleared.
  __device__ __forceinline__ void await_whole(const SegmentRecord& record, StagedTile tile, const PipelineState& values) {
    await(record, tile, values);
    if (tile.tokens == kConfig.tile_tokens) return;
    const std::uint32_t stage = address_of(values);
    constexpr std::int32_t kPieces = kConfig.column_bytes() / kPieceBytes;
    for (std::int32_t i = tile.tokens * kPieces + static_cast<std::int32_t>(ptx::thread_index()); i < kConfig.tile_tokens * kPieces;
         i += kConfig.consumer_threads()) {
#pragma unroll
      for (int column = 0; column < kConfig.value_columns(); ++column) {
        ptx::store_shared(stage + column * column_stage_bytes<kConfig> + static_cast<std::uint32_t>(i * kPieceBytes), {0, 0, 0, 0});
      }
    }
    publish_to_products();
  }

  /// Whether threads copied some of a tile, which products see after a fence only (Producer::boxed_tokens()).
  [[nodiscard]] __device__ __forceinline__ bool by_threads(const SegmentRecord& record, StagedTile tile) const {
    return (tile.token | tile.tokens) % kBoxRows != 0 || call_.load.box_tokens == 0 ||
           record.lengths.kv_first_token > INT32_MAX - record.lengths.kv_end;
  }

  /// Both are read by every other place of the ring, but where they are one.
  __device__ __forceinline__ void release(PipelineState& stage) {
    ptx::barrier_arrive_by_warp(&memory_.shared.stage_free[stage.index], leads());
    stage.advance();
    if constexpr (!kConfig.latent()) stage.advance();
  }

  __device__ __forceinline__ static void take_turn() {
    ptx::named_barrier(kTurnBarrier + static_cast<std::uint32_t>(group()), kConfig.consumer_threads());
  }
  __device__ __forceinline__ static void pass_turn() {
    ptx::named_barrier_arrive(kTurnBarrier + 1 - static_cast<std::uint32_t>(group()), kConfig.consumer_threads());
  }

  const DeviceCall& call_;
  CtaMemory<kConfig>& memory_;
  std::uint32_t stages_;
  PipelineState keys_;
  PipelineState values_;
};

}  // namespace lean::cuda
