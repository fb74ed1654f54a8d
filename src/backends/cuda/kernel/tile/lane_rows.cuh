// LaneRows: what a lane knows of the two rows of the block whose scores it holds, in either tile (lean_tile.cuh, narrow_tile.cuh):
// how far each sees, and what its weights refer to. The sums of weights are the tiles' own: they lie on different lanes.
#pragma once

#include <cstdint>

#include "backends/cuda/kernel/row_block.cuh"
#include "backends/cuda/kernel_config.hpp"
#include "backends/cuda/ptx/warp.cuh"
#include "problem/reach.hpp"
#include "softmax/state.hpp"

namespace lean::cuda {

/// A score may be larger than what its row's weights refer to by so much, in the log2 domain: weights may then be larger than 1 by
/// a factor of 2^kMaxSlack, and fit fp16, and nothing is scaled anew (FlashAttention-4 does so too).
inline constexpr float kMaxSlack = 8.0F;

/// The largest score that leaves a row as it is. Rounded down: beyond 2^27, where a unit in the last place is 16, a tie would be the next
/// number for every other maximum.
[[nodiscard]] __device__ __forceinline__ float slack_limit(float max) { return __fadd_rd(max, kMaxSlack); }

template <KernelConfig kConfig>
struct LaneRows {
  std::int32_t limit[2];     // tokens of the sequence from here on are not seen
  std::int32_t first_limit;  // the smallest of all the warp's rows
  float max[2];              // what weights refer to, log2 domain
  float scale[2];            // of fp8: products times this are scores in the log2 domain

  /// Begins with a segment's block, of which nothing is summed yet. `row_of`: which row of the block each of the two is.
  template <typename TRowOf>
  __device__ __forceinline__ void begin(const DeviceCall& call, const SegmentRecord& record, const TRowOf& row_of) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      limit[i] = record.lengths.kv_end;  // of a single query; a window to the right ends there too
      if (record.lengths.q_tokens > 1) {
        const std::int32_t token = query_of<kConfig>(call, record, row_of(i)).token;
        limit[i] = visible_span(record.lengths, token, token, call.shape.reach).end;
      }
      max[i] = softmax::kNegInf;
    }
    first_limit = __reduce_min_sync(ptx::kAllLanes, min(limit[0], limit[1]));
  }

  /// A row's products times this are scores in the log2 domain.
  [[nodiscard]] __device__ __forceinline__ float score_scale(const DeviceCall& call, int i) const {
    return kConfig.scaled() ? scale[i] : call.tile.log2_scale;
  }

  /// Whether a score is too far above what its row's weights refer to.
  [[nodiscard]] __device__ __forceinline__ bool outgrows(const float (&largest)[2], int i) const {
    return largest[i] > slack_limit(max[i]);
  }
  /// Whether that is so of any row of the warp; `largest`: of the lane's own scores.
  [[nodiscard]] __device__ __forceinline__ bool any_outgrows(const float (&largest)[2]) const {
    return __any_sync(ptx::kAllLanes, outgrows(largest, 0) || outgrows(largest, 1)) != 0;
  }

  /// Has a row refer to its largest score, where that outgrew it, and returns what its sums are to be multiplied by. A row by
  /// itself, whatever the warp's other rows do: its bits must not depend on them. Lanes kNearest, 2 kNearest, ... below kEnd apart
  /// hold the row too.
  template <int kNearest, int kEnd>
  [[nodiscard]] __device__ __forceinline__ float grow(float (&largest)[2], int i) {
    float& of_row = largest[i];
#pragma unroll
    for (int lanes = kNearest; lanes < kEnd; lanes *= 2) of_row = fmaxf(of_row, __shfl_xor_sync(ptx::kAllLanes, of_row, lanes));
    return refer_to(outgrows(largest, i) ? of_row : max[i], i);
  }

  /// Has a row refer to another maximum, and returns what its sums are to be multiplied by: NaN where that is +inf, which makes the row
  /// NaN. Its weights need not be: a scaled score may leave fp32 where the fma that scales and subtracts does not.
  [[nodiscard]] __device__ __forceinline__ float refer_to(float another, int i) {
    const float factor = another == -softmax::kNegInf ? another - another : softmax::rescale_factor(max[i], another);
    max[i] = another;
    return factor;
  }

  /// What is subtracted from a row's scores. An empty row's maximum is -inf: subtracting 0 instead leaves its scores at -inf and
  /// its weights at 0.
  [[nodiscard]] __device__ __forceinline__ float shift(int i) const { return max[i] == softmax::kNegInf ? 0.0F : max[i]; }
};

}  // namespace lean::cuda
