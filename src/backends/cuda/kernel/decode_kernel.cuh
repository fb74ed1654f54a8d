// The kernel: one CTA is one worker. The work line is built, by all threads where it is long; then the producer's warps walk the
// worker's segments and fill the ring, and the consumer warps compute LeanTiles and end each segment. One launch, nothing waits
// for another CTA (but a host block, where that is asked for).
#pragma once

#include "backends/cuda/kernel/append.cuh"
#include "backends/cuda/kernel/cta_chunks.cuh"
#include "backends/cuda/kernel/cta_combine.cuh"
#include "backends/cuda/kernel/cta_merge.cuh"
#include "backends/cuda/kernel/cta_shared.cuh"
#include "backends/cuda/kernel/lean_tile.cuh"
#include "backends/cuda/kernel/line_build.cuh"
#include "backends/cuda/kernel/producer.cuh"
#include "backends/cuda/kernel/rehearsal.cuh"

namespace lean::cuda {

/// Passed by the walking warps once the consumers have set up what is shared.
inline constexpr std::uint32_t kStartBarrier = 2;

template <KernelConfig kConfig>
__device__ void init_barriers(const DeviceCall& call, CtaShared<kConfig>& shared) {
  const auto i = static_cast<std::int32_t>(threadIdx.x);
  if (i < call.ring_stages) {
    ptx::barrier_init(&shared.stage_full[i], call.bulk_copies ? 1 : kProducerThreads);
    ptx::barrier_init(&shared.stage_free[i], kConfig.consumer_warps);
    ptx::barrier_init_fence();
  }
  if (i < kRecords) {
    ptx::barrier_init(&shared.record_full[i], 1);
    ptx::barrier_init(&shared.sharing_known[i], 1);
    ptx::barrier_init(&shared.record_free[i], kConfig.consumer_warps + (call.bulk_copies ? 0 : kProducerWarps));
  }
  if (i == 0) shared.lacks_pages = 0;
}

/// By the consumers, a word a thread.
template <KernelConfig kConfig>
__device__ __forceinline__ void copy_call(const DeviceCall& call, CtaShared<kConfig>& shared) {
  constexpr std::int32_t kWords = sizeof(DeviceCall) / sizeof(std::uint64_t);
  static_assert(sizeof(DeviceCall) % sizeof(std::uint64_t) == 0 && kWords <= kConfig.consumer_threads());
  const auto i = static_cast<std::int32_t>(threadIdx.x);
  if (i < kWords) reinterpret_cast<std::uint64_t*>(&shared.call)[i] = reinterpret_cast<const std::uint64_t*>(&call)[i];
}

/// Queries are few, and wanted when copies of K and V already fill the memory's queues: before that, every CTA asks for some rows,
/// which then wait in the L2. Called by a warp; what is beyond a row a lane, or packed by cumulative lengths, is not asked for.
__device__ inline void prefetch_queries(const Problem& problem) {
  const std::uint32_t row = blockIdx.x + threadIdx.x % kWarpThreads * gridDim.x;
  if (problem.cu_q_tokens != nullptr || row >= problem.batch * problem.q_heads) return;
  const std::uint32_t sequence = row / static_cast<std::uint32_t>(problem.q_heads);
  const std::uint32_t head = row - sequence * static_cast<std::uint32_t>(problem.q_heads);
  const auto* from =
      static_cast<const std::uint16_t*>(problem.q.data) + sequence * problem.q.strides.sequence + head * problem.q.strides.head;
  for (std::int32_t dim = 0; dim < problem.head_dim; dim += 64) ptx::prefetch_to_l2(from + dim);
}

template <KernelConfig kConfig, bool kWhole>
__device__ __forceinline__ void consume(const DeviceCall& call, CtaMemory<kConfig>& memory) {
  CtaShared<kConfig>& shared = memory.shared;
  Turn ring(call.ring_stages);
  const std::byte* stages = memory.ring(call);
  const bool leads = threadIdx.x % kWarpThreads == 0;
  const auto stage_address = [&] { return ptx::shared_address(stages + ring.place * call.stage_bytes); };
  const auto await_stage = [&] { ptx::barrier_wait(&shared.stage_full[ring.place], ring.parity); };
  const auto release_stage = [&] {
    __syncwarp();
    if (leads) ptx::barrier_arrive(&shared.stage_free[ring.place]);
    ring.advance();
  };
  for (Turn turn(kRecords);; turn.advance()) {
    ptx::barrier_wait(&shared.record_full[turn.place], turn.parity);
    const SegmentRecord& record = shared.records[turn.place];
    if (record.last) return;
    if (call.pass == Pass::kWhole) {
      if (call.problem.append.rotary_dim > 0) stage_turned_queries<kConfig>(call, turn.place);
      WarpTile<kConfig, kWhole> tile(call);  // anew: nothing of it is kept in registers across hand_over()
      tile.begin(memory, record);
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
      combine_warps(memory, turn.place, tile);
    } else {
      ptx::barrier_wait(&shared.sharing_known[turn.place], turn.parity);
    }
    if (record.slot != nullptr) hand_over<kConfig>(turn.place);
    __syncwarp();
    if (leads) ptx::barrier_arrive(&shared.record_free[turn.place]);
  }
}

/// The walking warps' part of a flat line: built, where it is short, and walked. Cumulative lengths are code of their own, since
/// whatever is jumped over on the way to the first copy costs a fetch of instructions (docs/cuda-backend.md).
template <KernelConfig kConfig, bool kCumulative>
__device__ __forceinline__ void walk_flat_line(const DeviceCall& call, CtaMemory<kConfig>& memory, bool walks) {
  const FlatRules<kConfig, kCumulative> rules = flat_rules_of<kConfig, kCumulative>(call);
  FlatLine line;
  if (call.short_line) {
    line = build_short_line<kConfig, kCumulative>(call, rules);
    ptx::named_barrier(kStartBarrier, cta_threads(kConfig));
  } else {
    line = memory.shared.flat_line.line;
  }
  if (!walks) return;
  schedule::FlatCursor<FlatRules<kConfig, kCumulative>> cursor(rules, line.plan, static_cast<std::int32_t>(blockIdx.x), line.start);
  Producer<kConfig>(call, memory.shared, memory.ring(call)).run(cursor);
}

/// The parameters name a KernelConfig; nvcc 13.0's host stubs do not compile with the value itself.
template <DType kType, std::int32_t kHeadDim, std::int32_t kRows>
__global__ void __launch_bounds__(cta_threads(config_of({kType, kHeadDim}, kRows)), 1)
    decode_kernel(const __grid_constant__ DeviceCall call) {
  constexpr KernelConfig kConfig = config_of({kType, kHeadDim}, kRows);
  constexpr std::int32_t kSharingThread = kConfig.consumer_threads() + kProducerThreads;
  CtaMemory<kConfig>& memory = cta_memory<kConfig>();
  const auto thread = static_cast<std::int32_t>(threadIdx.x);
  const bool consumes = thread < kConfig.consumer_threads();
  if (consumes) {
    init_barriers(call, memory.shared);
    copy_call(call, memory.shared);
    if (thread < kWarpThreads) prefetch_queries(call.problem);
  }
  if (!call.short_line) {
    __syncthreads();
    call.flat ? build_flat_line<kConfig>() : build_line<kConfig>();
  }
  if (consumes) {
    if (call.short_line) ptx::named_barrier_arrive(kStartBarrier, cta_threads(kConfig));
    consumer_sync<kConfig>();
    if (rehearses(call) && thread < kWarpThreads) announce_rehearsal(call, memory.shared);
    if (call.problem.head_dim == kConfig.head_dim) {
      consume<kConfig, true>(call, memory);
    } else {
      consume<kConfig, false>(call, memory);
    }
    return;
  }
  const bool walks = thread < kConfig.consumer_threads() + copying_threads(call) || thread == kSharingThread;
  if (call.flat && !call.cumulative) {
    walk_flat_line<kConfig, false>(call, memory, walks);
  } else if (call.flat) {
    walk_flat_line<kConfig, true>(call, memory, walks);
  } else if (walks) {
    DeviceCursor cursor(memory.line().line, memory.line().plan, static_cast<std::int32_t>(blockIdx.x));
    Producer<kConfig>(call, memory.shared, memory.ring(call)).run(cursor);
  }
}

}  // namespace lean::cuda
