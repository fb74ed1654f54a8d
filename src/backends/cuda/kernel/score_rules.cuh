// What Scores asks of a score beyond a scale: softcap, ALiBi, the left end of a window; and tokens of pages that are not there.
// A slow path: the warp's scores go through shared memory, so that one loop of little code serves all of them.
#pragma once

#include <cmath>
#include <cstdint>

#include "backends/cuda/kernel/cta_shared.cuh"
#include "problem/address.hpp"
#include "problem/pages.hpp"

namespace lean::cuda {

/// A raw score (q k) of query `at` and key `key`, an absolute token of the sequence, in the log2 domain after the rules, in the
/// order of reference::biased_score().
[[nodiscard]] __device__ inline float ruled_score(const DeviceCall& call, const SegmentRecord& record, float score, PackedRow at,
                                                  std::int32_t key, bool lacks_pages) {
  const Scores& scores = call.problem.scores;
  float x = score * call.log2_scale;
  if (scores.softcap > 0.0F) {
    const float cap = scores.softcap * softmax::kLog2E;
    x = cap * tanhf(x / cap);
  }
  if (scores.alibi_slopes != nullptr) {
    const float slope = scores.alibi_slopes[record.kv_head * call.shape.group + at.head_in_group];
    const std::int64_t position = std::int64_t{record.lengths.kv_end} - record.lengths.q_tokens + at.token;
    x = fmaf(-slope * softmax::kLog2E, fabsf(static_cast<float>(position - key)), x);
  }
  if (key < visible_span(record.lengths, at.token, at.token, call.shape.reach).begin) return softmax::kNegInf;
  if (lacks_pages && key < record.token_end) {
    const PagedKv& pages = call.problem.pages;
    if (!in_pool(pages, page_ids(pages, record.lengths, record.sequence)[page_of(call, key)])) return softmax::kNegInf;
  }
  return x;
}

}  // namespace lean::cuda
