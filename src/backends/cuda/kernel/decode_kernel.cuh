// The kernel, warp-specialised: one CTA is one worker. One launch, or one of two side by side (plan/side_workers.cuh), of which the
// chunks' waits for earlier kernels ahead of all else and the steps' not at all; nothing depends on another CTA but a host block, where
// that is asked for. Who stays for a joint merge waits for others, and not for long.
//
//   warps           number    what they do
//   consumers       4, 8      set up what is shared; per segment take the queries, compute LeanTiles from the ring, merge their
//                             parts, and write the output or hand over a partial; the last contributor to arrive merges those
//     first thread            initialises the barriers, asks for the first segment's queries, unless the producer has
//     last warp               in a decode step: the first read, K and V of an early tile into the L2
//   producers       1 to 8    walk the worker's segments and announce each (first thread), keep the ring full (as many as copy)
//   contributors'   0, 1      any call: walks the segments too, and says who shares each output; in a decode step a producer does
//   all                       build the line together where it is long; a short one each warp that walks it builds for itself
//
//   shared memory, from low addresses to high (CtaMemory)
//   +----------------------+----------------+---------------------------+-------------------+-----------------------+--------+
//   | CtaShared: barriers, | queries        | exchange, the consumers': | CtaLine           | ring: stages of a K   | a row: |
//   | 2 records, the call, | of 2 segments, | queries that they stage,  | of a general line | or V tile each, 2 and | read,  |
//   | a flat line, then    | where bulk     | scores under rules,       |                   | more, as many as fit  | never  |
//   | states of parts      | copies bring   | O of parts                |                   | up to 96 KB or all    | used   |
//   +----------------------+----------------+---------------------------+-------------------+-----------------------+--------+
//
//   Of two CTAs of a multiprocessor (ScopeTraits::ctas) each has 4 consumer warps and up to 64 KB of stages.
//
//   barrier              who waits         until
//   stage_full, _free    consumers, prod.  a tile, or a part of it, has come; every consumer warp that reads it has
//   record_full, _free   the others, prod. a segment is announced; everybody is done with the one before in its place
//   queries_full         consumers         the queries have come
//   queries_free         producers         consumers have read those of the segment before, where both have one place
//   contributors_known   consumers         the rest of the record is there, which a segment's end needs
#pragma once

#include "backends/cuda/kernel/cta_memory.cuh"
#include "backends/cuda/kernel/fixup/segment_end.cuh"
#include "backends/cuda/kernel/load/producer.cuh"
#include "backends/cuda/kernel/load/queries.cuh"
#include "backends/cuda/kernel/load/ring.cuh"
#include "backends/cuda/kernel/plan/l2_warming.cuh"
#include "backends/cuda/kernel/plan/side_workers.cuh"
#include "backends/cuda/kernel/plan/worker_segments.cuh"
#include "backends/cuda/kernel/tile/tile.cuh"
#include "backends/cuda/kernel/wide_consumer.cuh"
#include "backends/cuda/kernel/worker_track.cuh"
#include "backends/cuda/kernel_rows.hpp"
#include "backends/cuda/ptx/arch.cuh"
#include "backends/cuda/ptx/grid.cuh"
#include "backends/cuda/ptx/shared.cuh"

namespace lean::cuda {

/// Called by one thread: a thread for each barrier costs more, since their addresses go one after the other anyway.
template <KernelConfig kConfig>
__device__ __forceinline__ void init_barriers(const DeviceCall& call, CtaShared<kConfig>& shared) {
  const bool bulk = Asked<kConfig>(call).bulk_copies();
#pragma unroll
  for (std::int32_t part = 0; part < max_stages(kConfig) * kConfig.stage_parts(); ++part) {
    ptx::barrier_init(&shared.stage_full[part], bulk ? 1 : kConfig.producer_threads());
    // Of the first of two parts the first warpgroup alone says so: the other has made its scores before, or none.
    const std::int32_t releasing_warps = kConfig.in_turns() && part % 2 == 0 ? kConfig.consumer_warps / 2 : kConfig.consumer_warps;
    ptx::barrier_init(&shared.stage_free[part], releasing_warps * ptx::kWarpArrivals);
  }
#pragma unroll
  for (std::int32_t record = 0; record < kRecords; ++record) {
    ptx::barrier_init(&shared.record_full[record], 1);
    ptx::barrier_init(&shared.contributors_known[record], 1);
    ptx::barrier_init(&shared.queries_full[record], kConfig.wide() && !call.load.query_boxes ? kConfig.producer_threads() : 1);
    const std::int32_t releasing_warps = kConfig.consumer_warps + (bulk ? 0 : kConfig.producer_warps());
    ptx::barrier_init(&shared.record_free[record], static_cast<std::uint32_t>(releasing_warps) * ptx::kWarpArrivals);
  }
  if constexpr (kConfig.query_places() == 1) ptx::barrier_init(&shared.queries_free, kConfig.consumer_warps * ptx::kWarpArrivals);
  ptx::barrier_init_fence();
  shared.lacks_pages = 0;
}

/// Copies the call into shared memory. Called by the consumer warps; the first and the last, which has the L2 warmed, leave it to
/// the others.
template <KernelConfig kConfig>
__device__ __forceinline__ void copy_call(const DeviceCall& call, CtaShared<kConfig>& shared) {
  constexpr std::int32_t kWords = sizeof(DeviceCall) / sizeof(std::uint64_t);
  constexpr std::int32_t kThreads = kConfig.consumer_threads() - 2 * kWarpThreads;
  static_assert(sizeof(DeviceCall) % sizeof(std::uint64_t) == 0);
  const std::int32_t thread = static_cast<std::int32_t>(threadIdx.x) - kWarpThreads;
  if (thread < 0 || thread >= kThreads) return;
#pragma unroll
  for (std::int32_t first = 0; first < kWords; first += kThreads) {
    const std::int32_t word = first + thread;
    if (word >= kWords) return;
    reinterpret_cast<std::uint64_t*>(&shared.call)[word] = reinterpret_cast<const std::uint64_t*>(&call)[word];
  }
}

template <KernelConfig kConfig, bool kWhole>
__device__ __forceinline__ void consume(const DeviceCall& call, CtaMemory<kConfig>& memory) {
  const Asked<kConfig> asked(call);
  CtaShared<kConfig>& shared = memory.shared;
  PipelineState ring(call.load.ring_stages);
  const std::byte* stages = memory.ring(call);
  const bool leads = threadIdx.x % kWarpThreads == 0;
  const auto stage_address = [&] { return ptx::shared_address(stages + ring.index * call.load.stage_bytes); };
  const auto await_stage = [&] { ptx::barrier_wait(&shared.stage_full[ring.index], ring.phase); };
  const auto release_stage = [&] {
    ptx::barrier_arrive_by_warp(&shared.stage_free[ring.index], leads);
    ring.advance();
  };
  bool first_segment = true;                                     // while the producer asks for its keys
  if (call.launch.follows_append) ptx::await_earlier_kernels();  // they rotate the queries
  for (PipelineState records(kRecords);; records.advance()) {
    ptx::barrier_wait(&shared.record_full[records.index], records.phase);
    const SegmentRecord& record = shared.records[records.index];
    if (record.last) {
      if constexpr (kConfig.exchanges()) collect_rows<kConfig>();
      return end_track<kConfig>();
    }
    if (kConfig.bulk_queries() && first_segment && !record.queries_asked && threadIdx.x == 0)
      copy_queries<kConfig>(call, record, records.index);
    first_segment = false;
    if (!asked.merge_only()) {
      note<kConfig>(timeline::EventKind::kStreamBegin, records.index);
      if constexpr (kStagesQueriesApart<kConfig>) {
        stage_queries_apart<kConfig>(call, records.index);
      } else if constexpr (!kConfig.bulk_queries()) {
        stage_queries<kConfig>(call, records.index);
      }
      TileOf<kConfig, kWhole> tile(call);  // anew: nothing of it is kept in registers across hand_over()
      tile.begin(memory, records);
      for (std::int32_t token = record.token_begin; token < record.token_end;) {
        const std::int32_t tokens = record.tokens_from(token, kConfig.tile_tokens);
        const bool idle = tile.idle(tokens);
        await_stage();
        if (!idle) tile.scores(stage_address());
        release_stage();
        if (!idle) tile.update_softmax(memory, record, token, tokens);
        await_stage();
        if (!idle) tile.accumulate(memory, stage_address(), tokens);
        release_stage();
        token += tokens;
      }
      tile.finish();
      note<kConfig>(timeline::EventKind::kStreamEnd, records.index);
      ptx::barrier_wait(&shared.contributors_known[records.index], records.phase);
      combine_warps<kConfig>(memory, records.index, tile);
      note_stored<kConfig>(records.index);
    } else {
      ptx::barrier_wait(&shared.contributors_known[records.index], records.phase);
    }
    if (record.slot != nullptr) hand_over<kConfig>(records.index);
    ptx::barrier_arrive_by_warp(&shared.record_free[records.index], leads);
  }
}

/// What every CTA does. `exchange`: of a variant that has one.
template <KernelConfig kConfig>
__device__ __forceinline__ void work(const DeviceCall& call, const TensorMaps& maps, [[maybe_unused]] const Exchange* exchange) {
  const Asked<kConfig> asked(call);
  CtaMemory<kConfig>& memory = cta_memory<kConfig>();
  const auto warp = static_cast<std::int32_t>(threadIdx.x) / kWarpThreads;
  const bool consumes = warp < kConfig.consumer_warps;
  const bool beside = runs_beside<kConfig>(call);
  if constexpr (kConfig.may_run_beside()) {
    if (beside && !begin_beside<kConfig>(call)) return end_beside<kConfig>(call);
  }
  begin_track<kConfig>(call);
  if (consumes) {
    if (threadIdx.x == 0) init_barriers(call, memory.shared);
    if (asked.tensor_copies() && threadIdx.x == kWarpThreads) {
      ptx::prefetch_tensor_map(&maps.k.tall);
      ptx::prefetch_tensor_map(&maps.v.tall);
    }
    copy_call(call, memory.shared);
    if constexpr (kConfig.wide()) {
      if (threadIdx.x == 2 * kWarpThreads) memory.shared.wide.begin_rehearsal();
      if (call.load.query_boxes && threadIdx.x == 3 * kWarpThreads) ptx::prefetch_tensor_map(&maps.q);
    }
  }
  if (consumes) setup_done<kConfig>(call);
  const bool waits = call.launch.waits() && !beside;
  if constexpr (kWarmsL2<kConfig>) {
    if (warp == kConfig.consumer_warps - 1 && !beside) {
      if (waits && !may_warm_early<kConfig>(call)) ptx::await_earlier_kernels();
      call.plan.cumulative ? warm_l2<kConfig, true>(call) : warm_l2<kConfig, false>(call);
    }
  }
  if (waits && (consumes || !plans_ahead<kConfig>(call))) ptx::await_earlier_kernels();
  build_line<kConfig>(call);
  if constexpr (kConfig.wide()) {
    if (consumes) {
      if constexpr (kMovesRegisters<kConfig>) ptx::take_registers<kWideConsumerRegisters<kConfig>>();
      consumer_sync<kConfig>();  // a short line is not built by all threads together
      WideConsumer<kConfig>(call, memory).run();
    } else {
      if constexpr (kMovesRegisters<kConfig>) ptx::give_up_registers<kWideProducerRegisters<kConfig>>();
      visit_segments<kConfig>(call, memory, Produce<kConfig>{call, maps, memory});
    }
  } else if (consumes) {
    if (kConfig.fills_rows() && call.problem.head_dim < kConfig.head_dim) pad_queries<kConfig>(call);
    if constexpr (kConfig.exchanges()) {
      const std::uint64_t calls = join_exchange<kConfig>(*exchange, memory.shared);
      consumer_sync<kConfig>();
      joined_exchange<kConfig>(calls, memory.shared);
    } else {
      consumer_sync<kConfig>();
    }
    if (kConfig.step() || call.problem.head_dim == kConfig.head_dim) {
      consume<kConfig, true>(call, memory);
    } else {
      consume<kConfig, false>(call, memory);
    }
  } else {
    visit_segments<kConfig>(call, memory, Produce<kConfig>{call, maps, memory});
  }
  end_beside<kConfig>(call);
}

/// The template's parameters name a KernelConfig; nvcc 13.0's host stubs do not compile with the value itself.
template <Architecture kArchitecture, DType kType, std::int32_t kHeadDim, std::int32_t kRows, Scope kScope>
__global__ void __launch_bounds__(cta_threads(config_of(kArchitecture, {kType, kHeadDim}, kRows, kScope)), traits_of(kScope).ctas)
    decode_kernel(const __grid_constant__ DeviceCall call, const __grid_constant__ TensorMaps maps) {
  constexpr KernelConfig kConfig = config_of(kArchitecture, {kType, kHeadDim}, kRows, kScope);
  if constexpr (runs(ptx::kCompiledFor, kArchitecture)) work<kConfig>(call, maps, nullptr);  // else never launched
}

/// The same as one rank's part of an exchange.
template <Architecture kArchitecture, DType kType, std::int32_t kHeadDim, std::int32_t kRows, Scope kScope>
__global__ void __launch_bounds__(cta_threads(config_of(kArchitecture, {kType, kHeadDim}, kRows, kScope)), 1)
    exchanging_decode_kernel(const __grid_constant__ DeviceCall call, const __grid_constant__ TensorMaps maps,
                             const __grid_constant__ Exchange exchange) {
  constexpr KernelConfig kConfig = config_of(kArchitecture, {kType, kHeadDim}, kRows, kScope);
  if constexpr (runs(ptx::kCompiledFor, kArchitecture)) work<kConfig>(call, maps, &exchange);
}

}  // namespace lean::cuda
