// The kernel: one CTA is one worker. All threads build the work line; then the producer's warps walk the worker's segments and
// fill the ring, and the consumer warps compute LeanTiles and end each segment. One launch, nothing waits for another CTA
// (but a host block, where that is asked for).
#pragma once

#include "backends/cuda/kernel/cta_combine.cuh"
#include "backends/cuda/kernel/cta_merge.cuh"
#include "backends/cuda/kernel/cta_shared.cuh"
#include "backends/cuda/kernel/lean_tile.cuh"
#include "backends/cuda/kernel/line_build.cuh"
#include "backends/cuda/kernel/producer.cuh"

namespace lean::cuda {

template <KernelConfig kConfig>
__device__ void init_barriers(const DeviceCall& call, CtaShared<kConfig>& shared) {
  const auto i = static_cast<std::int32_t>(threadIdx.x);
  if (i < call.ring_stages) {
    ptx::barrier_init(&shared.stage_full[i], call.bulk_copies ? 1 : kProducerThreads);
    ptx::barrier_init(&shared.stage_free[i], kConfig.consumer_warps);
    if (i < kRecords) {
      ptx::barrier_init(&shared.record_full[i], 1);
      ptx::barrier_init(&shared.sharing_known[i], 1);
      ptx::barrier_init(&shared.record_free[i], kConfig.consumer_warps + (call.bulk_copies ? 0 : kProducerWarps));
    }
    if (i == 0) shared.lacks_pages = 0;
    ptx::barrier_init_fence();
  }
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
      WarpTile<kConfig, kWhole> tile(call);  // anew: nothing of it is kept in registers across merge_shared()
      tile.begin(memory, record);
      for (std::int32_t token = record.token_begin; token < record.token_end;) {
        const std::int32_t tokens = record.tokens_from(token, kConfig.tile_tokens);
        const bool idle = tile.idle(tokens);
        await_stage();
        if (!idle) tile.scores(stage_address());
        release_stage();
        if (!idle) tile.update_softmax(memory, record, token, tokens);
        await_stage();
        if (!idle) tile.accumulate(stage_address(), tokens);
        release_stage();
        token += tokens;
      }
      tile.finish();
      ptx::barrier_wait(&shared.sharing_known[turn.place], turn.parity);
      combine_warps(memory, turn.place, tile);
    } else {
      ptx::barrier_wait(&shared.sharing_known[turn.place], turn.parity);
    }
    if (!record.sole()) merge_shared<kConfig>(turn.place);
    __syncwarp();
    if (leads) ptx::barrier_arrive(&shared.record_free[turn.place]);
  }
}

/// The parameters name a KernelConfig; nvcc 13.0's host stubs do not compile with the value itself.
template <DType kType, std::int32_t kHeadDim, std::int32_t kRows>
__global__ void __launch_bounds__(cta_threads(config_of({kType, kHeadDim}, kRows)), 1)
    decode_kernel(const __grid_constant__ DeviceCall call) {
  constexpr KernelConfig kConfig = config_of({kType, kHeadDim}, kRows);
  CtaMemory<kConfig>& memory = cta_memory<kConfig>();
  CtaShared<kConfig>& shared = memory.shared;
  init_barriers(call, shared);
  constexpr std::int32_t kSharingThread = kConfig.consumer_threads() + kProducerThreads;
  if (threadIdx.x >= kSharingThread) prefetch_queries(call.problem);
  const FlatRules<kConfig> flat_rules(DeviceLengths(call.problem, &call.slots.header()),
                                      schedule::OneBlockShape<kConfig.tile_tokens>(call.shape), cost_model(),
                                      schedule::Measure::kCost);
  FlatPlan flat_plan;
  if (call.flat) flat_plan = build_flat_line<kConfig>(call, flat_rules, shared.flat_line);
  const std::int32_t workers = call.flat ? flat_plan.workers : build_line(call, memory.line());
  const auto worker = static_cast<std::int32_t>(blockIdx.x);
  if (worker >= workers) return;
  if (threadIdx.x < kConfig.consumer_threads()) {
    if (call.problem.head_dim == kConfig.head_dim) {
      consume<kConfig, true>(call, memory);
    } else {
      consume<kConfig, false>(call, memory);
    }
    return;
  }
  const auto produces = static_cast<std::int32_t>(threadIdx.x) < kConfig.consumer_threads() + copying_threads(call);
  if (!produces && threadIdx.x != kSharingThread) return;
  Producer<kConfig> producer(call, shared, memory.ring(call));
  if (call.flat) {
    schedule::FlatCursor<FlatRules<kConfig>> cursor(flat_rules, flat_plan, worker, shared.flat_line.start);
    producer.run(cursor);
  } else {
    DeviceCursor cursor(memory.line().line, memory.line().plan, worker);
    producer.run(cursor);
  }
}

}  // namespace lean::cuda
