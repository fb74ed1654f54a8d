// The one way to ask for a worker's segments, whatever the line: setup_done(), build_line(), and visit_segments(), which hands a
// cursor to whoever makes use of the segments. Behind it lie six kinds of line:
//   general         any policy, any rows: summed by all threads, walked in 64 bits
//   flat            every kv head of a sequence is one output, or of many rows its row blocks are a stair: summed by all threads,
//                   walked in 32 bits
//   short           flat, of few sequences: built by each warp that walks it, for itself
//   even            short, all outputs alike: the worker's one segment is known by arithmetic
//   even, by bulk   the same without pages: the compiler sees that it is OneSegment
//   even stair      of many rows: the same for chunks that are alike, of up to 128 sequences (wide_cursor.cuh)
#pragma once

#include <cstdint>

#include "backends/cuda/kernel/asked.cuh"
#include "backends/cuda/kernel/cta_memory.cuh"
#include "backends/cuda/kernel/lines.cuh"
#include "backends/cuda/kernel/plan/flat_line.cuh"
#include "backends/cuda/kernel/plan/general_line.cuh"
#include "backends/cuda/kernel/plan/wide_cursor.cuh"
#include "backends/cuda/ptx/barrier.cuh"
#include "backends/cuda/ptx/special_registers.cuh"

namespace lean::cuda {

/// The one segment of a worker, or none, of K and V without pages or cumulative lengths: what is made of it has code of its own, in
/// which nothing is jumped over on the way to the first copy. Handed to the producer warp, which looks whether the lengths that this was made
/// of hold once it has asked for keys and queries, where the call was planned ahead.
template <typename TCursor, typename THolds>
struct OneSegment {
  TCursor& cursor;
  bool ahead;
  const THolds& holds;
};

/// The lengths of a cursor's sequence.
[[nodiscard]] __device__ inline Sequence lengths_at(const DeviceCall& call, const DeviceCursor& cursor) {
  return LengthSource(call.problem)(cursor.segment().output.sequence);
}
template <typename TRules>
[[nodiscard]] __device__ const Sequence& lengths_at(const DeviceCall&, const schedule::FlatCursor<TRules>& cursor) {
  return cursor.lengths();
}
template <KernelConfig kConfig>
[[nodiscard]] __device__ const Sequence& lengths_at(const DeviceCall&, const WideCursor<kConfig>& cursor) {
  return cursor.lengths();
}

/// Called by the consumer warps, once what is shared is set up: warps that build a short line wait for it before they announce a
/// segment.
template <KernelConfig kConfig>
__device__ __forceinline__ void setup_done(const DeviceCall& call) {
  if (!call.plan.short_line) return;
  if constexpr (kConfig.stairs()) {
    ptx::named_barrier_arrive(kSetupBarrier, cta_threads(kConfig) - kWarpThreads);
    ptx::named_barrier_arrive(kWalkBarrier, kConfig.consumer_threads() + kWarpThreads);
  } else {
    ptx::named_barrier_arrive(kSetupBarrier, cta_threads(kConfig));
  }
}

/// Called by all threads: builds what line they build together, and waits for what is shared to be set up; nothing of a short line.
template <KernelConfig kConfig>
__device__ __forceinline__ void build_line(const DeviceCall& call) {
  if constexpr (kConfig.stairs()) return build_wide_line<kConfig>(call);
  if (call.plan.short_line) return;
  __syncthreads();
  if constexpr (kConfig.step()) {
    build_flat_line<kConfig>();
  } else {
    Asked<kConfig>(call).flat() ? build_flat_line<kConfig>() : build_general_line<kConfig>();
  }
}

/// Whether the calling warp walks the line: the first producer's does and, if there is one, the warp that finds contributors.
/// Others copy what they are told.
template <KernelConfig kConfig>
[[nodiscard]] __device__ __forceinline__ bool needs_line() {
  const std::int32_t warp = static_cast<std::int32_t>(threadIdx.x) / kWarpThreads - kConfig.consumer_warps;
  return warp == 0 || warp == kConfig.producer_warps();
}

/// A flat line's segments: built, where it is short, and walked. In a decode step cumulative lengths are code of their own, since
/// whatever is jumped over on the way to the first copy costs a fetch of instructions (docs/notebook); elsewhere one walk
/// serves both, and is a sixth of the kernel less.
template <KernelConfig kConfig, bool kCumulative, typename TVisit>
__device__ __forceinline__ void visit_flat_line(const DeviceCall& call, CtaMemory<kConfig>& memory, const TVisit& visit) {
  const FlatRules<kConfig, kCumulative> rules = flat_rules_of<kConfig, kCumulative>(call);
  const bool ahead = !kCumulative && plans_ahead<kConfig>(call);
  FlatLine<kConfig> line;
  Sequence planned;
  if (call.plan.short_line) {
    if (needs_line<kConfig>()) line = build_short_line<kConfig, kCumulative>(call, rules, !ahead, planned);
    ptx::named_barrier(kSetupBarrier, cta_threads(kConfig));
  } else {
    line = memory.shared.flat_line.line;
    line.lengths = rules.lengths()(line.start.sequence);
    line.even = {};
  }
  Sequence now;  // asked for before all else, and looked at after it
  if (ahead) {
    ptx::await_earlier_kernels();
    now = lengths_of_own(call);
  }
  const auto holds = [&] { return !ahead || !needs_line<kConfig>() || are_same(planned, now); };
  // Known to the compiler, wherever the plan comes from.
  const auto know_plan = [&] {
    line.plan.level_parts = 0;
    if constexpr (kConfig.step() && !kConfig.chunks_only()) {
      line.plan.kind = Policy::Kind::kLean;
      line.plan.granularity_tiles = 1;
    }
  };
  know_plan();
  const auto make_anew = [&] {
    if constexpr (!kCumulative) line = build_line_anew<kConfig, kCumulative>(call);
    know_plan();
  };
  using Cursor = schedule::FlatCursor<FlatRules<kConfig, kCumulative>>;
  const auto even_cursor = [&] {
    const auto sequence = static_cast<std::int32_t>(line.start.sequence);
    return Cursor(rules, line.plan, line.even, {.sequence = sequence, .kv_head = line.even.output - sequence * call.shape.kv_heads},
                  line.lengths);
  };
  const auto flat_cursor = [&] {
    return Cursor(rules, line.plan, worker_of<kConfig>(call, line.plan), line.share, line.start, line.lengths);
  };
  if constexpr (!kMayBeEven<kConfig, kCumulative>) {
    if (!holds()) make_anew();
    Cursor cursor = flat_cursor();
    visit(cursor);
  } else if constexpr (kConfig.copies_runs()) {
    if (line.even.even) {
      Cursor cursor = even_cursor();
      if (!needs_line<kConfig>() || visit(OneSegment{cursor, ahead, holds})) return;
      make_anew();
    } else if (!holds()) {
      make_anew();
    }
    Cursor cursor = flat_cursor();
    visit(cursor);
  } else {
    if (!holds()) make_anew();
    Cursor cursor = line.even.even ? even_cursor() : flat_cursor();
    visit(cursor);
  }
}

/// Called by the warps that walk: calls `visit` once, with a cursor over the worker's segments or with a OneSegment.
template <KernelConfig kConfig, typename TVisit>
__device__ __forceinline__ void visit_segments(const DeviceCall& call, CtaMemory<kConfig>& memory, const TVisit& visit) {
  if constexpr (kConfig.stairs()) {
    begin_walk<kConfig>(call, memory);
    const std::uint32_t rehearses = threadIdx.x == kConfig.consumer_threads() ? 0 : 1;
    // Else the compiler chooses between the two for every member ahead of time.
    WideCursor<kConfig> cursor(call, memory.shared.wide.walks[ptx::opaque(rehearses)]);
    visit(cursor);
  } else if (kConfig.step() && !call.plan.cumulative) {
    visit_flat_line<kConfig, false>(call, memory, visit);
  } else if (Asked<kConfig>(call).flat()) {
    visit_flat_line<kConfig, true>(call, memory, visit);
  } else {
    DeviceCursor cursor(memory.line().line, memory.line().plan, static_cast<std::int32_t>(blockIdx.x));
    visit(cursor);
  }
}

}  // namespace lean::cuda
