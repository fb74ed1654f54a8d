// What Scores asks of a score beyond a scale: softcap, ALiBi, masks, the left end of a window; and tokens of pages that are not
// there. A slow path: the warp's scores go through shared memory, so that one loop of little code serves all of them.
#pragma once

#include <cstdint>

#include "backends/cuda/kernel/cta_memory.cuh"
#include "backends/cuda/kernel/elements.cuh"
#include "backends/cuda/kernel/kv_rows.cuh"
#include "backends/cuda/ptx/warp.cuh"
#include "problem/pages.hpp"
#include "problem/tree_mask.hpp"
#include "softmax/scale.hpp"
#include "tile/score_rules.hpp"

namespace lean::cuda {

/// Whether the rules have to be looked at in a tile of `tile_tokens` from `tile_token` on: a tree mask is about the last keys only.
[[nodiscard]] __device__ __forceinline__ bool tile_has_rules(const DeviceCall& call, const SegmentRecord& record,
                                                             std::int32_t tile_token, std::int32_t tile_tokens) {
  if (call.tile.score_rules) return true;
  return call.problem.scores.tree_mask != nullptr && tile_token > first_draft(record.lengths) - tile_tokens;
}

/// Element of an additive mask.
[[nodiscard]] __device__ inline float additive_bias(const Scores& scores, std::int64_t offset) {
  if (scores.mask_dtype == DType::kFloat32) return static_cast<const float*>(scores.mask)[offset];
  const std::uint16_t bits = static_cast<const std::uint16_t*>(scores.mask)[offset];
  return scores.mask_dtype == DType::kFloat16 ? to_float<DType::kFloat16>(bits) : to_float<DType::kBFloat16>(bits);
}

/// What is added to the score of query `at` and key `key`, an absolute token of the sequence, in the log2 domain; -inf where a
/// window, a mask or a page that is not there hides the key. Only what a row may see is looked up.
[[nodiscard]] __device__ inline float key_bias(const DeviceCall& call, const SegmentRecord& record, PackedRow at, std::int32_t key,
                                               bool lacks_pages) {
  const KeySpan seen = visible_span(record.lengths, at.token, at.token, call.shape.reach);
  if (key < seen.begin || key >= seen.end) return softmax::kNegInf;
  if (lacks_pages) {
    const PagedKv& pages = call.problem.pages;
    if (!in_pool(pages, page_ids(pages, record.lengths, record.sequence)[page_of(call, key)])) return softmax::kNegInf;
  }
  const HeadPosition q_head{record.sequence, record.kv_head * call.shape.group + at.head_in_group};
  return tile::mask_bias(call.problem, record.lengths, q_head, at.token, key,
                         [](const Scores& scores, std::int64_t offset) { return additive_bias(scores, offset); });
}

/// A scaled score of query `at` and key `key` in the log2 domain after the rules but key_bias(), in the order of
/// reference::biased_score().
[[nodiscard]] __device__ inline float ruled_score(const DeviceCall& call, const SegmentRecord& record, float score, PackedRow at,
                                                  std::int32_t key) {
  const Scores& scores = call.problem.scores;
  float x = score;
  if (scores.softcap > 0.0F) x = softmax::soft_cap(x, tile::log2_cap(scores));
  if (scores.alibi_slopes != nullptr) {
    const float slope = tile::log2_slope(scores, {record.sequence, record.kv_head * call.shape.group + at.head_in_group});
    x = fmaf(-slope, fabsf(static_cast<float>(query_position(record.lengths, at.token) - key)), x);
  }
  return x;
}

/// Bit j of a lane's word: its score j is of a key that its row sees. Afterwards the bits of scores 0 and 1 of every 4 say so of
/// any of the warp's rows: those scores' tokens are what the lane holds of V.
[[nodiscard]] __device__ __forceinline__ std::uint32_t seen_by_warp(std::uint32_t seen) {
  seen |= seen >> 2;
#pragma unroll
  for (int lanes = 4; lanes < kWarpThreads; lanes *= 2) seen |= __shfl_xor_sync(ptx::kAllLanes, seen, lanes);
  return seen;
}

}  // namespace lean::cuda
