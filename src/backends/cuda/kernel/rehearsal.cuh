// Rehearsal: instruction caches are empty when a kernel begins, and what is fetched later waits behind K and V. So the consumers
// run the loop over tiles once, on leftovers, while the schedule is worked out: a segment without rows, announced by themselves.
#pragma once

#include <cstdint>

#include "backends/cuda/kernel/cta_shared.cuh"
#include "backends/cuda/kernel/ring.cuh"

namespace lean::cuda {

inline constexpr std::int32_t kRehearsedRecords = 1;
inline constexpr std::int32_t kRehearsedStages = 2;  // a K and a V tile

/// The merging pass has no tiles; and rules of scores would look up leftovers in masks.
[[nodiscard]] __device__ __forceinline__ bool rehearses(const DeviceCall& call) {
  return call.pass == Pass::kWhole && !call.score_rules && call.problem.scores.tree_mask == nullptr;
}

/// By one warp, in the producer's and the sharing thread's stead: the first record, and the first two stages full.
template <KernelConfig kConfig>
__device__ __forceinline__ void announce_rehearsal(const DeviceCall& call, CtaShared<kConfig>& shared) {
  const auto lane = static_cast<std::int32_t>(threadIdx.x);
  if (lane == 0) {
    shared.records[0] = {.token_end = kConfig.tile_tokens};
    ptx::barrier_arrive(&shared.record_full[0]);
    ptx::barrier_arrive(&shared.sharing_known[0]);
  }
  for (std::int32_t i = lane; i < (call.bulk_copies ? 0 : kProducerWarps); i += kWarpThreads) {
    ptx::barrier_arrive(&shared.record_free[0]);
  }
  for (std::int32_t i = lane; i < (call.bulk_copies ? 1 : kProducerThreads); i += kWarpThreads) {
    for (std::int32_t stage = 0; stage < kRehearsedStages; ++stage) ptx::barrier_arrive(&shared.stage_full[stage]);
  }
}

/// Where rings begin after it.
[[nodiscard]] __device__ __forceinline__ Turn first_record_turn(const DeviceCall& call) {
  return Turn(kRecords, rehearses(call) ? kRehearsedRecords : 0);
}
[[nodiscard]] __device__ __forceinline__ Turn first_stage_turn(const DeviceCall& call) {
  return Turn(call.ring_stages, rehearses(call) ? kRehearsedStages : 0);
}

}  // namespace lean::cuda
