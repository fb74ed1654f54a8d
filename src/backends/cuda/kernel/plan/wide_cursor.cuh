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
  /// `walk`: shared.wide's, or what is rehearsed in its place.
  __device__ __forceinline__ WideCursor(const DeviceCall& call, CtaWalk& walk) : call_(call), walk_(walk) {}

  __device__ __forceinline__ bool next_run() {
    if (call_.plan.flat) {
      const Rules rules = flat_rules_of<kConfig, true>(call_);
      return schedule::StairCursor<Rules>(rules, walk_.plan, walk_.walk).next_run();
    }
    if (!general().next_run()) return false;
    take_general();
    walk_.walk.lengths = LengthSource(call_.problem)(segment().output.sequence);
    return true;
  }

  __device__ __forceinline__ void find_contributors() {
    if (call_.plan.flat) {
      const Rules rules = flat_rules_of<kConfig, true>(call_);
      schedule::StairCursor<Rules>(rules, walk_.plan, walk_.walk).find_contributors();
    } else {
      general().find_contributors();
      take_general();
    }
  }

  [[nodiscard]] __device__ __forceinline__ const schedule::BasicSegment<std::int32_t>& segment() const {
    return walk_.walk.segment;
  }
  /// Whether the worker has nothing to do behind its segment. Of a general line nobody asks: no.
  [[nodiscard]] __device__ __forceinline__ bool ends_share() const {
    return call_.plan.flat && walk_.walk.share.end - walk_.walk.place <= walk_.plan.snap_units;
  }
  [[nodiscard]] __device__ __forceinline__ const Sequence& lengths() const { return walk_.walk.lengths; }

 private:
  using Rules = FlatRules<kConfig, true>;

  [[nodiscard]] __device__ __forceinline__ DeviceCursor& general() const {
    return *std::launder(reinterpret_cast<DeviceCursor*>(walk_.general));
  }

  /// What is read of a segment; its place on the line is not, and may need 64 bits.
  __device__ __forceinline__ void take_general() const {
    const schedule::Segment& from = general().segment();
    walk_.walk.segment = {.output = {.sequence = from.output.sequence,
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
  CtaWalk& walk_;
};

/// What a producers' warp does of a short line's building: the first all of it, the last two rehearse stages that come later.
template <KernelConfig kConfig>
[[nodiscard]] __device__ __forceinline__ LineStage first_stage() {
  static_assert(kConfig.producer_warps() == 4);
  const std::uint32_t warp = threadIdx.x / kWarpThreads - kConfig.consumer_warps;
  return warp == 0 ? LineStage::kLengths : warp == 1 ? LineStage::kNone : warp == 2 ? LineStage::kSums : LineStage::kPlan;
}

/// Called by the producers' warps, before the thread that walks makes use of a cursor.
template <KernelConfig kConfig>
__device__ __forceinline__ void begin_walk(const DeviceCall& call, CtaMemory<kConfig>& memory) {
  const bool walks = threadIdx.x == kConfig.consumer_threads();
  if (!call.plan.flat) {
    if (walks) {
      new (memory.shared.wide.walks[0].general)
          DeviceCursor(memory.line().line, memory.line().plan, static_cast<std::int32_t>(blockIdx.x));
    }
    return;
  }
  const FlatRules<kConfig, true> rules = flat_rules_of<kConfig, true>(call);
  FlatLine<kConfig> line;
  if (call.plan.short_line) {
    const LineStage from = first_stage<kConfig>();
    if (from != LineStage::kNone) line = build_lanes_line<kConfig, true, 1>(call, rules, from);
  } else if (walks) {  // nobody else: consumers may have their parts in its place already
    line = memory.shared.flat_line.line;
    line.lengths = rules.lengths()(line.start.sequence);
  }
  if (walks) {
    line.plan.kind = Policy::Kind::kLean;  // known to the compiler
    line.plan.granularity_tiles = 1;
    memory.shared.wide.walks[0].plan = line.plan;
    memory.shared.wide.walks[0].walk = schedule::StairCursor<FlatRules<kConfig, true>>::begin(line.plan, worker_of(line.plan),
                                                                                              line.share, line.start, line.lengths);
  }
  if (!call.plan.short_line) return;
  if (threadIdx.x / kWarpThreads == kConfig.consumer_warps) {
    ptx::named_barrier(kWalkBarrier, kConfig.consumer_threads() + kWarpThreads);
  } else {
    ptx::named_barrier(kSetupBarrier, cta_threads(kConfig) - kWarpThreads);
  }
}

}  // namespace lean::cuda
