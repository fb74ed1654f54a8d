// The walk of a worker of many rows. Its line is a stair line (schedule/stair_line.hpp), or a general one where the call's is none:
// one cursor serves both, so that what is made of segments is there once, and it keeps what it knows in shared memory.
#pragma once

#include <cstdint>
#include <new>

#include "backends/cuda/kernel/cta_memory.cuh"
#include "backends/cuda/kernel/lines.cuh"
#include "backends/cuda/kernel/plan/flat_line.cuh"
#include "backends/cuda/ptx/barrier.cuh"

namespace lean::cuda {

template <KernelConfig kConfig>
class WideCursor {
 public:
  __device__ __forceinline__ WideCursor(const DeviceCall& call, CtaMemory<kConfig>& memory) : call_(call), memory_(memory) {}

  __device__ __forceinline__ bool next_run() {
    if (call_.plan.flat) {
      const Rules rules = flat_rules_of<kConfig, true>(call_);
      return schedule::StairCursor<Rules>(rules, shared().plan, shared().walk).next_run();
    }
    if (!general().next_run()) return false;
    take_general();
    shared().walk.lengths = LengthSource(call_.problem)(segment().output.sequence);
    return true;
  }

  __device__ __forceinline__ void find_contributors() {
    if (call_.plan.flat) {
      const Rules rules = flat_rules_of<kConfig, true>(call_);
      schedule::StairCursor<Rules>(rules, shared().plan, shared().walk).find_contributors();
    } else {
      general().find_contributors();
      take_general();
    }
  }

  [[nodiscard]] __device__ __forceinline__ const schedule::BasicSegment<std::int32_t>& segment() const {
    return shared().walk.segment;
  }
  [[nodiscard]] __device__ __forceinline__ const Sequence& lengths() const { return shared().walk.lengths; }

 private:
  using Rules = FlatRules<kConfig, true>;

  [[nodiscard]] __device__ __forceinline__ CtaWalk& shared() const { return memory_.shared.wide.walk; }
  [[nodiscard]] __device__ __forceinline__ DeviceCursor& general() const {
    return *std::launder(reinterpret_cast<DeviceCursor*>(shared().general));
  }

  /// What is read of a segment; its place on the line is not, and may need 64 bits.
  __device__ __forceinline__ void take_general() const {
    const schedule::Segment& from = general().segment();
    shared().walk.segment = {.output = {.sequence = from.output.sequence,
                                        .kv_head = from.output.kv_head,
                                        .row_block = from.output.row_block,
                                        .rows = from.output.rows,
                                        .first_tile = from.output.first_tile,
                                        .tiles = from.output.tiles},
                             .tile_begin = from.tile_begin,
                             .tile_end = from.tile_end,
                             .contributor = from.contributor,
                             .contributors = from.contributors,
                             .slots = from.slots};
  }

  const DeviceCall& call_;
  CtaMemory<kConfig>& memory_;
};

/// Called by the producers' warps, before the thread that walks makes use of a cursor.
template <KernelConfig kConfig>
__device__ __forceinline__ void begin_walk(const DeviceCall& call, CtaMemory<kConfig>& memory) {
  const bool walks = threadIdx.x == kConfig.consumer_threads();
  if (!call.plan.flat) {
    if (walks) {
      new (memory.shared.wide.walk.general)
          DeviceCursor(memory.line().line, memory.line().plan, static_cast<std::int32_t>(blockIdx.x));
    }
    return;
  }
  const FlatRules<kConfig, true> rules = flat_rules_of<kConfig, true>(call);
  FlatLine line;
  if (call.plan.short_line) {
    if (threadIdx.x / kWarpThreads == kConfig.consumer_warps) line = build_short_line<kConfig, true>(call, rules);
  } else if (walks) {  // nobody else: consumers may have their parts in its place already
    line = memory.shared.flat_line.line;
    line.lengths = rules.lengths()(line.start.sequence);
  }
  if (walks) {
    line.plan.kind = Policy::Kind::kLean;  // known to the compiler
    line.plan.granularity_tiles = 1;
    memory.shared.wide.walk.plan = line.plan;
    memory.shared.wide.walk.walk = schedule::StairCursor<FlatRules<kConfig, true>>::begin(line.plan, worker_of(line.plan),
                                                                                          line.share, line.start, line.lengths);
  }
  if (call.plan.short_line) ptx::named_barrier(kSetupBarrier, cta_threads(kConfig));
}

}  // namespace lean::cuda
