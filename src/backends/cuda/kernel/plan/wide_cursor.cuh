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

  /// The segment is known, and it is the only one: next_run() is for others.
  [[nodiscard]] __device__ __forceinline__ bool is_even() const { return walk_.even; }

  __device__ __forceinline__ bool next_run() {
    if (is_even()) return false;
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
    if (is_even()) return;
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
    return is_even() || (call_.plan.flat && walk_.walk.share.end - walk_.walk.place <= walk_.plan.snap_units);
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

/// What a producers' warp does of a short line's building: the first all of it, the last two rehearse stages that come later. Where a
/// line may be an even stair, whether it is or not, nothing is rehearsed.
template <KernelConfig kConfig>
[[nodiscard]] __device__ __forceinline__ LineStage first_stage() {
  static_assert(kConfig.producer_warps() == 4);
  const std::uint32_t warp = threadIdx.x / kWarpThreads - kConfig.consumer_warps;
  return warp == 0 ? LineStage::kLengths : warp == 1 ? LineStage::kNone : warp == 2 ? LineStage::kSums : LineStage::kPlan;
}

/// Whether the line is an even stair; if so the warp that walks has left its segment. By a warp, all of which find the same. Code of its
/// own, in which nothing is jumped over on the way to the first copy, and which finds out no more than an even line needs.
template <KernelConfig kConfig>
[[nodiscard]] __device__ __forceinline__ bool begin_even_walk(const DeviceCall& call, CtaWalk& walk) {
  const FlatRules<kConfig, false> rules = flat_rules_of<kConfig, false>(call);
  const auto lane = static_cast<std::int32_t>(threadIdx.x) % kWarpThreads;
  const auto batch = static_cast<std::int32_t>(call.shape.batch);
  Sequence lengths = rules.lengths().unreported(min(lane, batch - 1));
  const schedule::SequenceWork work = schedule::work_of(lengths);
  bool clamped = lengths.clamped;
  bool alike = true;
#pragma unroll 1
  for (std::int32_t sequence = lane + kWarpThreads; sequence < batch; sequence += kWarpThreads) {
    const Sequence further = rules.lengths().unreported(sequence);
    clamped = clamped || further.clamped;
    alike = alike && schedule::work_of(further).kv_tokens == work.kv_tokens;
  }
  const bool walks = threadIdx.x == kConfig.consumer_threads();
  if (clamped && threadIdx.x / kWarpThreads == kConfig.consumer_warps) rules.lengths().report();
  schedule::BasicSegment<std::int32_t> segment;
  if ((batch > 1 && !all_alike(work.kv_tokens, alike)) ||
      !schedule::find_even_segment(call.stair.even, rules, work, static_cast<std::int32_t>(blockIdx.x), segment)) {
    if (walks) walk.even = false;
    return false;
  }
  const std::int32_t sequence = min(static_cast<std::int32_t>(segment.output.sequence), batch - 1);
  if (batch > kWarpThreads) {
    lengths = rules.lengths().unreported(sequence);
  } else if (batch > 1) {
    lengths = lengths_of_lane<false>(lengths, sequence);
  }
  if (walks) {
    walk.even = true;
    walk.walk.lengths = lengths;
    walk.walk.segment = segment;
  }
  return true;
}

/// Builds the line of a worker of many rows, unless it is short, or even: who walks finds the segment of an even one, and where the line is
/// not short everybody finds out that it is.
template <KernelConfig kConfig>
__device__ __forceinline__ void build_wide_line(const DeviceCall& call) {
  const bool in_walking_warp = threadIdx.x / kWarpThreads == kConfig.consumer_warps;
  bool even = false;
  if (call.stair.even.outputs > 0 && (in_walking_warp || !call.plan.short_line)) {
    even = begin_even_walk<kConfig>(call, cta_memory<kConfig>().shared.wide.walks[0]);
  }
  if (call.plan.short_line) return;
  __syncthreads();
  if (even) return;
  Asked<kConfig>(call).flat() ? build_flat_line<kConfig>() : build_general_line<kConfig>();
}

/// Called by the producers' warps, before the thread that walks makes use of a cursor.
template <KernelConfig kConfig>
__device__ __forceinline__ void begin_walk(const DeviceCall& call, CtaMemory<kConfig>& memory) {
  const bool walks = threadIdx.x == kConfig.consumer_threads();
  const bool in_walking_warp = threadIdx.x / kWarpThreads == kConfig.consumer_warps;
  const auto await_setup = [in_walking_warp] {
    if (in_walking_warp) {
      ptx::named_barrier(kWalkBarrier, kConfig.consumer_threads() + kWarpThreads);
    } else {
      ptx::named_barrier(kSetupBarrier, cta_threads(kConfig) - kWarpThreads);
    }
  };
  const bool may_be_even = call.stair.even.outputs > 0;
  __syncwarp();  // begin_even_walk() has said whether it is
  if (may_be_even && (!in_walking_warp || memory.shared.wide.walks[0].even)) {
    if (call.plan.short_line) await_setup();
    return;
  }
  if (walks) memory.shared.wide.walks[0].even = false;
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
    if (from != LineStage::kNone) {
      Sequence lengths[1];
      if (from == LineStage::kLengths) {
        lengths[0] = rules.lengths().unreported(lane_sequence(call));
      } else {
        lengths[0].q_tokens = 8 * kConfig.q_rows;
        lengths[0].kv_end = 16 * kConfig.q_rows;
      }
      line = line_of_lanes<true, kConfig, true>(call, rules, lengths, true, from);
    }
  } else if (walks) {  // nobody else: consumers may have their parts in its place already
    line = memory.shared.flat_line.line;
    line.lengths = rules.lengths()(line.start.sequence);
  }
  if (walks) {
    line.plan.kind = Policy::Kind::kLean;  // known to the compiler
    line.plan.granularity_tiles = 1;
    memory.shared.wide.walks[0].plan = line.plan;
    memory.shared.wide.walks[0].walk = schedule::StairCursor<FlatRules<kConfig, true>>::begin(
        line.plan, worker_of<kConfig>(call, line.plan), line.share, line.start, line.lengths);
  }
  if (!call.plan.short_line) return;
  await_setup();
}

}  // namespace lean::cuda
