// The kernel: one CTA is one worker. The work line is built, by all threads where it is long; then the producer's warps walk the
// worker's segments and fill the ring, and the consumer warps compute LeanTiles and end each segment. One launch, nothing waits
// for another CTA (but a host block, where that is asked for).
#pragma once

#include "backends/cuda/kernel/cta_memory.cuh"
#include "backends/cuda/kernel/fixup/chunks.cuh"
#include "backends/cuda/kernel/fixup/merge.cuh"
#include "backends/cuda/kernel/fixup/segment_end.cuh"
#include "backends/cuda/kernel/load/producer.cuh"
#include "backends/cuda/kernel/load/queries.cuh"
#include "backends/cuda/kernel/load/ring.cuh"
#include "backends/cuda/kernel/plan/l2_warming.cuh"
#include "backends/cuda/kernel/plan/line_build.cuh"
#include "backends/cuda/kernel/tile/narrow_tile.cuh"
#include "backends/cuda/ptx/grid.cuh"

namespace lean::cuda {

/// Passed by the walking warps once the consumers have set up what is shared.
inline constexpr std::uint32_t kStartBarrier = 2;

/// By one thread, one after the other: a thread each costs more, since their addresses take turns anyway.
template <KernelConfig kConfig>
__device__ __forceinline__ void init_barriers(const DeviceCall& call, CtaShared<kConfig>& shared) {
  const bool bulk = Asked<kConfig>(call).bulk_copies();
#pragma unroll
  for (std::int32_t stage = 0; stage < max_stages(kConfig); ++stage) {
    ptx::barrier_init(&shared.stage_full[stage], bulk ? 1 : kConfig.producer_threads());
    ptx::barrier_init(&shared.stage_free[stage], kConfig.consumer_warps * ptx::kWarpArrivals);
  }
#pragma unroll
  for (std::int32_t record = 0; record < kRecords; ++record) {
    ptx::barrier_init(&shared.record_full[record], 1);
    ptx::barrier_init(&shared.sharing_known[record], 1);
    ptx::barrier_init(&shared.queries_full[record], 1);
    const std::int32_t releasing_warps = kConfig.consumer_warps + (bulk ? 0 : kConfig.producer_warps());
    ptx::barrier_init(&shared.record_free[record], static_cast<std::uint32_t>(releasing_warps) * ptx::kWarpArrivals);
  }
  ptx::barrier_init_fence();
  shared.lacks_pages = 0;
}

/// By the consumer warps from the second on but for the last, which has the L2 warmed.
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
  Turn ring(call.ring_stages);
  const std::byte* stages = memory.ring(call);
  const bool leads = threadIdx.x % kWarpThreads == 0;
  const auto stage_address = [&] { return ptx::shared_address(stages + ring.place * call.stage_bytes); };
  const auto await_stage = [&] { ptx::barrier_wait(&shared.stage_full[ring.place], ring.parity); };
  const auto release_stage = [&] {
    ptx::barrier_arrive_by_warp(&shared.stage_free[ring.place], leads);
    ring.advance();
  };
  bool first_segment = true;                              // while the producer asks for its keys
  if (call.follows_append) ptx::await_earlier_kernels();  // they turn the queries
  for (Turn turn(kRecords);; turn.advance()) {
    ptx::barrier_wait(&shared.record_full[turn.place], turn.parity);
    const SegmentRecord& record = shared.records[turn.place];
    if (record.last) return;
    if (kConfig.bulk_queries() && first_segment && threadIdx.x == 0) copy_queries<kConfig>(call, record, turn.place);
    first_segment = false;
    if (!asked.merge_only()) {
      if constexpr (kStagesQueriesApart<kConfig>) {
        stage_queries_apart<kConfig>(call, turn.place);
      } else if constexpr (!kConfig.bulk_queries()) {
        stage_queries<kConfig>(call, turn.place);
      }
      TileOf<kConfig, kWhole> tile(call);  // anew: nothing of it is kept in registers across hand_over()
      tile.begin(memory, turn);
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
      ptx::barrier_wait(&shared.sharing_known[turn.place], turn.parity);
      combine_warps<kConfig>(memory, turn.place, tile);
    } else {
      ptx::barrier_wait(&shared.sharing_known[turn.place], turn.parity);
    }
    if (record.slot != nullptr) hand_over<kConfig>(turn.place);
    ptx::barrier_arrive_by_warp(&shared.record_free[turn.place], leads);
  }
}

template <KernelConfig kConfig, typename TCursor>
__device__ __forceinline__ void walk(const DeviceCall& call, const TensorMaps& maps, CtaMemory<kConfig>& memory, TCursor& cursor) {
  const auto thread = static_cast<std::int32_t>(threadIdx.x) - kConfig.consumer_threads();
  if (thread >= copying_threads<kConfig>(call) && thread != kConfig.producer_threads()) return;
  Producer<kConfig, false>(call, maps, memory.shared, memory.ring(call)).run(cursor);
}

/// Whether the calling warp walks the line: the first producer's and, if there is one, the sharing warp do. Others copy what they are told.
template <KernelConfig kConfig>
[[nodiscard]] __device__ __forceinline__ bool needs_line() {
  const std::int32_t warp = static_cast<std::int32_t>(threadIdx.x) / kWarpThreads - kConfig.consumer_warps;
  return warp == 0 || warp == kConfig.producer_warps();
}

/// The walking warps' part of a flat line: built, where it is short, and walked. In a decode step cumulative lengths are code of their
/// own, since whatever is jumped over on the way to the first copy costs a fetch of instructions (docs/cuda-backend.md); elsewhere one
/// walk serves both, and is a sixth of the kernel less.
template <KernelConfig kConfig, bool kCumulative>
__device__ __forceinline__ void walk_flat_line(const DeviceCall& call, const TensorMaps& maps, CtaMemory<kConfig>& memory) {
  const FlatRules<kConfig, kCumulative> rules = flat_rules_of<kConfig, kCumulative>(call);
  FlatLine line;
  if (call.short_line) {
    if (needs_line<kConfig>()) line = build_short_line<kConfig, kCumulative>(call, rules);
    ptx::named_barrier(kStartBarrier, cta_threads(kConfig));
  } else {
    line = memory.shared.flat_line.line;
    line.lengths = rules.lengths()(line.start.sequence);
    line.even = {};
  }
  if constexpr (kConfig.step() && kConfig.scope != Scope::kChunkStep) {  // known to the compiler, wherever the plan comes from
    line.plan.kind = Policy::Kind::kLean;
    line.plan.granularity_tiles = 1;
  }
  using Cursor = schedule::FlatCursor<FlatRules<kConfig, kCumulative>>;
  const auto even_cursor = [&] {
    const auto sequence = static_cast<std::int32_t>(line.start.sequence);
    return Cursor(rules, line.plan, line.even, {.sequence = sequence, .kv_head = line.even.output - sequence * call.shape.kv_heads},
                  line.lengths);
  };
  const auto flat_cursor = [&] { return Cursor(rules, line.plan, worker_of(line.plan), line.share, line.start, line.lengths); };
  if constexpr (!kMayBeEven<kConfig, kCumulative>) {
    Cursor cursor = flat_cursor();
    walk<kConfig>(call, maps, memory, cursor);
  } else if constexpr (kConfig.bulk_step()) {
    // An even line has code of its own: nothing is jumped over on the way to the first copy.
    if (!line.even.even) {
      Cursor cursor = flat_cursor();
      walk<kConfig>(call, maps, memory, cursor);
    } else if (threadIdx.x == kConfig.consumer_threads()) {
      Cursor cursor = even_cursor();
      Producer<kConfig, true>(call, maps, memory.shared, memory.ring(call)).run_even(cursor);
    }
  } else {
    Cursor cursor = line.even.even ? even_cursor() : flat_cursor();
    walk<kConfig>(call, maps, memory, cursor);
  }
}

/// The template's parameters name a KernelConfig; nvcc 13.0's host stubs do not compile with the value itself.
template <DType kType, std::int32_t kHeadDim, std::int32_t kRows, Scope kScope>
__global__ void __launch_bounds__(cta_threads(config_of({kType, kHeadDim}, kRows, kScope)), 1)
    decode_kernel(const __grid_constant__ DeviceCall call, const __grid_constant__ TensorMaps maps) {
  constexpr KernelConfig kConfig = config_of({kType, kHeadDim}, kRows, kScope);
  if constexpr (kConfig.step() && !ptx::kHasCopyEngine) return;  // never launched there
  const Asked<kConfig> asked(call);
  CtaMemory<kConfig>& memory = cta_memory<kConfig>();
  const auto warp = static_cast<std::int32_t>(threadIdx.x) / kWarpThreads;
  const bool consumes = warp < kConfig.consumer_warps;
  if (consumes) {
    if (threadIdx.x == 0) init_barriers(call, memory.shared);
    if (asked.tensor_copies() && threadIdx.x == kWarpThreads) {
      ptx::prefetch_tensor_map(&maps.k.tall);
      ptx::prefetch_tensor_map(&maps.v.tall);
    }
    copy_call(call, memory.shared);
  }
  if (consumes && call.short_line) ptx::named_barrier_arrive(kStartBarrier, cta_threads(kConfig));
  if (call.dependent_launch) ptx::start_dependents();
  if constexpr (kWarmsL2<kConfig>) {
    if (warp == kConfig.consumer_warps - 1) {
      if (call.dependent_launch && !may_warm_early<kConfig>(call)) ptx::await_earlier_kernels();
      call.cumulative ? warm_l2<kConfig, true>(call) : warm_l2<kConfig, false>(call);
    }
  }
  if (call.dependent_launch) ptx::await_earlier_kernels();
  if (!call.short_line) {
    __syncthreads();
    if constexpr (kConfig.step()) {
      build_flat_line<kConfig>();
    } else {
      call.flat ? build_flat_line<kConfig>() : build_line<kConfig>();
    }
  }
  if (consumes) {
    if (kConfig.pads_rows() && call.problem.head_dim < kConfig.head_dim) pad_queries<kConfig>(call);
    consumer_sync<kConfig>();
    if (kConfig.step() || call.problem.head_dim == kConfig.head_dim) {
      consume<kConfig, true>(call, memory);
    } else {
      consume<kConfig, false>(call, memory);
    }
  } else if (kConfig.step() && !call.cumulative) {
    walk_flat_line<kConfig, false>(call, maps, memory);
  } else if (asked.flat()) {
    walk_flat_line<kConfig, true>(call, maps, memory);
  } else {
    DeviceCursor cursor(memory.line().line, memory.line().plan, static_cast<std::int32_t>(blockIdx.x));
    walk<kConfig>(call, maps, memory, cursor);
  }
}

}  // namespace lean::cuda
