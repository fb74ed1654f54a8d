// A flat line, or of many rows a stair line, and its plan from lengths in device memory. Every CTA builds the same: short ones each
// walking warp for itself, longer ones all threads together. A short flat one may be even, and its segments known by arithmetic.
#pragma once

#include <cstdint>

#include "backends/cuda/kernel/cta_memory.cuh"
#include "backends/cuda/kernel/lines.cuh"
#include "backends/cuda/kernel/plan/line_sums.cuh"
#include "backends/cuda/kernel/plan/side_workers.cuh"
#include "backends/cuda/kernel/tuning.hpp"
#include "backends/cuda/ptx/arch.cuh"
#include "backends/cuda/ptx/warp.cuh"

namespace lean::cuda {

template <KernelConfig kConfig>
[[nodiscard]] __device__ __forceinline__ FlatShape<kConfig> flat_shape_of(const DeviceCall& call) {
  if constexpr (kConfig.stairs()) {
    static_assert(cost_model(kConfig).row_units == 0);  // schedule::is_stair()
    return FlatShape<kConfig>(call.shape, call.stair.step);
  } else {
    return FlatShape<kConfig>(call.shape);
  }
}

template <KernelConfig kConfig, bool kCumulative>
[[nodiscard]] __device__ __forceinline__ FlatRules<kConfig, kCumulative> flat_rules_of(const DeviceCall& call) {
  return {BasicDeviceLengths<kCumulative>(call.problem, call.plan.queries, call.fixup.slots.header()), flat_shape_of<kConfig>(call),
          cost_model(kConfig), schedule::Measure::kCost};
}

/// A flat line's policy is lean, or fixed_chunk in the variant for it. Packed queries of which some are several sequences' may be more
/// outputs than 32 bits hold the costs of: nobody has work then, the call writes nothing, and its counters stay 0.
template <KernelConfig kConfig>
[[nodiscard]] __device__ __forceinline__ FlatPlan<kConfig> flat_plan(const DeviceCall& call, const FlatSums<kConfig>& sums) {
  const std::int32_t grid = workers_of_launch<kConfig>(call);
  if constexpr (kConfig.stairs()) {
    schedule::CostModel model = cost_model(kConfig);
    if constexpr (kConfig.latent()) model.part_tiles = latent_part_tiles(call.shape.group * call.problem.q_tokens);
    FlatSums<kConfig> counted = sums;
    if (counted.outputs > call.stair.most_outputs) counted.outputs = 0;  // of a line without outputs nothing else is looked at
    return schedule::make_stair_plan(counted, model, kConfig.tile_tokens, grid);
  } else {
    const bool chunks = kConfig.chunks_only();
    const Policy policy = chunks ? Policy::fixed_chunk(call.plan.policy.chunk_tokens) : Policy::lean();
    schedule::CostModel model = cost_model(kConfig);
    if (kConfig.step() && !call.plan.spares_workers) model.spare_tiles = 0;
    return schedule::make_plan(sums, policy, model, kConfig.tile_tokens, grid);
  }
}

/// This worker, or the first that has no share.
template <KernelConfig kConfig>
[[nodiscard]] __device__ __forceinline__ std::int32_t worker_of(const DeviceCall& call,
                                                                const schedule::BasicPlan<std::int32_t>& plan) {
  return schedule::spread_worker(static_cast<std::int32_t>(blockIdx.x), plan.workers, workers_of_launch<kConfig>(call));
}

/// Its share, and where it begins on the line.
template <KernelConfig kConfig>
[[nodiscard]] __device__ __forceinline__ FlatRange share_of_worker(const DeviceCall& call, const FlatPlan<kConfig>& plan) {
  const std::int32_t worker = worker_of<kConfig>(call, plan);
  if constexpr (kConfig.stairs()) return plan.share_of(worker);
  return plan.shares.range(worker);
}
template <KernelConfig kConfig>
[[nodiscard]] __device__ __forceinline__ std::int32_t begin_of_worker(const DeviceCall& call, const FlatPlan<kConfig>& plan,
                                                                      const FlatRange& share) {
  if constexpr (kConfig.stairs()) return plan.begin_of(worker_of<kConfig>(call, plan), share);
  return share.begin;
}

/// What another lane read.
template <bool kCumulative>
[[nodiscard]] __device__ __forceinline__ Sequence lengths_of_lane(Sequence lengths, int lane) {
  lengths.kv_begin = __shfl_sync(ptx::kAllLanes, lengths.kv_begin, lane);
  lengths.kv_end = __shfl_sync(ptx::kAllLanes, lengths.kv_end, lane);
  lengths.q_tokens = __shfl_sync(ptx::kAllLanes, lengths.q_tokens, lane);
  lengths.clamped = __shfl_sync(ptx::kAllLanes, static_cast<int>(lengths.clamped), lane) != 0;
  if constexpr (kCumulative) {
    lengths.q_first_token = __shfl_sync(ptx::kAllLanes, lengths.q_first_token, lane);
    lengths.kv_first_token = __shfl_sync(ptx::kAllLanes, lengths.kv_first_token, lane);
    lengths.first_page = __shfl_sync(ptx::kAllLanes, lengths.first_page, lane);
  }
  return lengths;
}

/// Whether a variant looks if a short line is even.
template <KernelConfig kConfig, bool kCumulative>
inline constexpr bool kMayBeEven = kConfig.looks_for_even_lines() && !kCumulative;

/// All lanes bring the same number, and true.
[[nodiscard]] __device__ __forceinline__ bool all_alike(std::int32_t x, bool alike) {
  const std::int32_t of_first = __shfl_sync(ptx::kAllLanes, x, 0);  // by all lanes, whatever each of them found
  return __all_sync(ptx::kAllLanes, alike && x == of_first) != 0;
}

/// One of a lane's sequences, in registers.
template <int kSequences>
[[nodiscard]] __device__ __forceinline__ Sequence pick(const Sequence (&lengths)[kSequences], std::int32_t i) {
  Sequence picked = lengths[0];
#pragma unroll
  for (int j = 1; j < kSequences; ++j) {
    if (i == j) picked = lengths[j];
  }
  return picked;
}

/// Whether the producers of a call plan it while kernels ahead of it still run. What these may be writing, its lengths, is looked at again
/// once they have ended: nearly always they are what they were, and the plan is there. Of short lines, a sequence a lane; where all threads
/// build a line, planning beside the kernel ahead took calls up to 11 % longer (docs/notebook/short-calls.md).
template <KernelConfig kConfig>
[[nodiscard]] __device__ __forceinline__ bool plans_ahead(const DeviceCall& call) {
  if constexpr (!kConfig.step() || kConfig.may_run_beside()) return false;
  return call.launch.waits() && call.plan.short_line && !call.plan.cumulative && call.shape.batch <= kWarpThreads;
}

/// The sequence of a lane, of a short line that has one each: beyond the last the last.
[[nodiscard]] __device__ __forceinline__ std::int32_t lane_sequence(const DeviceCall& call) {
  return min(static_cast<std::int32_t>(threadIdx.x % kWarpThreads), static_cast<std::int32_t>(call.shape.batch) - 1);
}

/// Its lengths, of a call without cumulative ones.
[[nodiscard]] __device__ __forceinline__ Sequence lengths_of_own(const DeviceCall& call) {
  return BasicLengthSource<false, PastL1>(call.problem)(lane_sequence(call));
}

/// Whether all lanes' lengths are what they were. A clamped one is made anew, and reported then. By a warp.
[[nodiscard]] __device__ __forceinline__ bool are_same(const Sequence& before, const Sequence& now) {
  const bool same = now.kv_begin == before.kv_begin && now.kv_end == before.kv_end && !now.clamped;
  return __all_sync(ptx::kAllLanes, same) != 0;
}

/// Stages of a short line's building. A warp that begins with a later one rehearses those from there on (CtaWide), by numbers of which
/// it is only known that they take the way of most.
enum class LineStage : std::int32_t { kLengths, kSums, kPlan, kNone };

/// Sums of a chunk as others are.
[[nodiscard]] __device__ __forceinline__ schedule::BasicStairSums<std::int32_t> likely_sums() {
  return {{.cost = 1 << 16,
           .tiles = 3000,
           .outputs = 128,
           .max_output_tiles = 32,
           .max_tile_cost = 18,
           .min_output_cost = 400,
           .max_output_cost = 576},
          256,
          976};
}

/// A short flat line, by a warp for itself, of its lanes' lengths: a lane has kSequences neighbouring sequences, those beyond the last as
/// the last. An even one is known at once, where it may be one. Else the lane with the sequence that holds the beginning of this worker's
/// share tells where that is and how long: nobody searches, nothing is read twice. `settled`: nobody writes the lengths any more.
template <bool kLooksForEven, KernelConfig kConfig, bool kCumulative, int kSequences>
[[nodiscard]] __device__ __forceinline__ FlatLine<kConfig> line_of_lanes(const DeviceCall& call,
                                                                         const FlatRules<kConfig, kCumulative>& rules,
                                                                         const Sequence (&lengths)[kSequences], bool settled,
                                                                         LineStage from = LineStage::kLengths) {
  const auto first = static_cast<std::int32_t>(threadIdx.x % kWarpThreads) * kSequences;
  const auto batch = static_cast<std::int32_t>(call.shape.batch);
  FlatSums<kConfig> each[kSequences];
  bool alike = true;
  bool clamped = false;
#pragma unroll
  for (int i = 0; i < kSequences; ++i) {
    clamped = clamped || lengths[i].clamped;
    if (from != LineStage::kPlan) {
      each[i] = rules.sum_sequence(schedule::work_of(lengths[i]));
    } else if constexpr (kConfig.stairs()) {
      each[i] = likely_sums();
    }
    alike = alike && each[i].max_output_cost == each[0].max_output_cost;
  }
  if (clamped && settled) rules.lengths().report();
  if constexpr (kLooksForEven && kMayBeEven<kConfig, kCumulative>) {
    if (call.plan.even.outputs > 0 && (batch == 1 || all_alike(each[0].max_output_cost, alike))) {
      FlatLine<kConfig> line{.lengths = lengths[0]};
      line.even = schedule::even_share(call.plan.even, each[0], rules.cost_model(), static_cast<std::int32_t>(blockIdx.x));
      if (line.even.even) {
        const std::int32_t sequence = min(line.even.output * call.plan.kv_heads_inverse >> kOutputInverseBits, batch - 1);
        line.start.sequence = sequence;
        if (batch > 1) line.lengths = lengths_of_lane<kCumulative>(pick(lengths, sequence % kSequences), sequence / kSequences);
        return line;
      }
    }
  }
  FlatSums<kConfig> own;
#pragma unroll
  for (int i = 0; i < kSequences; ++i) {
    if (first + i < batch) own = own.plus(each[i]);
  }
  FlatLine<kConfig> line{.plan = flat_plan<kConfig>(call, sum_over_warp(own))};
  if (kConfig.stairs() && line.plan.level_parts > 0) own.cost = own.outputs * line.plan.level_parts;
  std::int32_t begin = ptx::warp_sum_before(own.cost);
  if constexpr (kConfig.stairs()) begin += line.plan.line_begin();
  line.share = share_of_worker<kConfig>(call, line.plan);
  const std::int32_t place = begin_of_worker<kConfig>(call, line.plan, line.share);
  const std::uint32_t holds = __ballot_sync(ptx::kAllLanes, begin <= place && place - begin < own.cost);
  const int holder = max(__ffs(static_cast<int>(holds)), 1) - 1;
  std::int32_t in_lane = 0;
  std::int32_t begins = begin;
#pragma unroll
  for (int i = 1, end = begin; i < kSequences; ++i) {
    end += each[i - 1].cost;
    if (place < end) break;
    in_lane = i;
    begins = end;
  }
  const std::int32_t held = __shfl_sync(ptx::kAllLanes, in_lane, holder);
  line.start = {holder * kSequences + held, __shfl_sync(ptx::kAllLanes, begins, holder)};
  line.lengths = lengths_of_lane<kCumulative>(pick(lengths, held), holder);
  return line;
}

/// Builds a short line of more sequences than a warp has lanes: a function that is called, so that it is no code on the way of
/// fewer. It makes the rules itself: a reference to its caller's would keep these in memory.
template <KernelConfig kConfig, bool kCumulative, bool kLooksForEven = true>
[[nodiscard]] __device__ __noinline__ FlatLine<kConfig> build_longer_line(const DeviceCall& call) {
  const FlatRules<kConfig, kCumulative> rules = flat_rules_of<kConfig, kCumulative>(call);
  Sequence lengths[kLaneSequences];
#pragma unroll
  for (int i = 0; i < kLaneSequences; ++i) {
    const std::int64_t sequence = static_cast<std::int64_t>(threadIdx.x % kWarpThreads) * kLaneSequences + i;
    lengths[i] = rules.lengths().unreported(min(sequence, call.shape.batch - 1));
  }
  return line_of_lanes<kLooksForEven, kConfig, kCumulative>(call, rules, lengths, true);
}

/// The line of a call that was planned ahead, of other lengths than it has: walked, even where it is even, whose shares are the same.
template <KernelConfig kConfig, bool kCumulative>
[[nodiscard]] __device__ __forceinline__ FlatLine<kConfig> build_line_anew(const DeviceCall& call) {
  return build_longer_line<kConfig, kCumulative, false>(call);
}

/// `own`: what the line is made of where it is planned ahead, the lengths of the lane's sequence.
template <KernelConfig kConfig, bool kCumulative>
[[nodiscard]] __device__ __forceinline__ FlatLine<kConfig> build_short_line(const DeviceCall& call,
                                                                            const FlatRules<kConfig, kCumulative>& rules,
                                                                            bool settled, Sequence& own) {
  if constexpr (kMayBeEven<kConfig, kCumulative>) {  // others have shorter ones only
    if (call.shape.batch > kWarpThreads) return build_longer_line<kConfig, kCumulative>(call);
  }
  if constexpr (kConfig.step() && !kCumulative) {
    own = lengths_of_own(call);
  } else {
    own = rules.lengths().unreported(lane_sequence(call));
  }
  const Sequence lengths[1] = {own};
  return line_of_lanes<true, kConfig, kCumulative>(call, rules, lengths, settled);
}

/// Any flat line, by all threads, a strip each.
template <KernelConfig kConfig>
__device__ LEAN_CUDA_CALLED void build_flat_line() {
  CtaShared<kConfig>& shared = cta_memory<kConfig>().shared;
  CtaFlatLine<kConfig>& built = shared.flat_line;
  constexpr std::uint32_t kThreads = cta_threads(kConfig);
  const FlatRules<kConfig, true> rules = flat_rules_of<kConfig, true>(shared.call);
  const std::uint32_t warp = threadIdx.x / kWarpThreads;
  const std::uint32_t lane = threadIdx.x % kWarpThreads;
  const std::uint32_t strip_sequences = (static_cast<std::uint32_t>(shared.call.shape.batch) + kThreads - 1) / kThreads;
  const std::int64_t first = std::int64_t{threadIdx.x} * strip_sequences;
  // Where no strip below holds the beginning of the worker's share, the first sequence is as good as any: there is no share, all
  // sequences are another launch's, or so many have the same queries that a strip's costs leave 32 bits (flat_plan()).
  if (threadIdx.x == 0) built.line.start = {};
  const auto [own, clamped] = sum_sequences(rules, first, first + strip_sequences);
  std::int32_t begin = ptx::warp_sum_before(own.cost);
  const std::int32_t outputs_before = kConfig.stairs() ? ptx::warp_sum_before(own.outputs) : 0;
  {
    const FlatSums<kConfig> sums = sum_over_warp(own);
    if (lane == 0) built.warp_sums[warp] = sums;
  }
  __syncthreads();
  FlatSums<kConfig> sums;
  if (lane < kThreads / kWarpThreads) sums = built.warp_sums[lane];
  begin += ptx::warp_sum(lane < warp ? sums.cost : 0);
  const std::int32_t outputs_of_warps = kConfig.stairs() ? ptx::warp_sum(lane < warp ? sums.outputs : 0) : 0;
  sums = sum_over_warp(sums);
  const FlatPlan<kConfig> plan = flat_plan<kConfig>(shared.call, sums);
  std::int32_t length = own.cost;
  if constexpr (kConfig.stairs()) {
    if (plan.level_parts > 0) {
      begin = plan.line_begin() + (outputs_of_warps + outputs_before) * plan.level_parts;
      length = own.outputs * plan.level_parts;
    }
  }
  const FlatRange share = share_of_worker<kConfig>(shared.call, plan);
  const std::int32_t place = begin_of_worker<kConfig>(shared.call, plan, share);
  if (begin <= place && place - begin < length) built.line.start = {first, begin};
  if (threadIdx.x == 0) {
    built.line.plan = plan;
    built.line.share = share;
  }
  if (clamped) rules.lengths().report();  // ahead of the barrier: who is done with the call looks (sticky.cuh)
  __syncthreads();
}

}  // namespace lean::cuda
