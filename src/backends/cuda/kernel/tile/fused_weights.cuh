// Weights by one fma a score, exp2(score x scale - shift), as tiles of warpgroup products make them. The fma does not round the product,
// which the row's maximum was rounded from: they differ by up to half a unit in the maximum's last place. That is nothing in a score,
// but in a row whose maximum lies beyond kFar it is more than an exponent holds. So such a far row is settled first: by rounded
// products, those that equal the maximum become 0 and all others, 16 below or more, -inf, and nothing is subtracted.
#pragma once

#include "backends/cuda/kernel/tile/lane_rows.cuh"
#include "softmax/state.hpp"

namespace lean::cuda {

/// In the log2 domain. Below it a unit in the last place is 16 at most, so that products lie 8 above their rounded values at most, where
/// these may not lie above the maximum; of 8, 4 above, where they may by kMaxSlack: weights are below 2^12, and fit fp16.
inline constexpr float kFar = 0x1p28F;

/// Whether the fma cannot serve a row; of an empty one, whose maximum is -inf, it could not either.
[[nodiscard]] __device__ __forceinline__ bool is_far(float max) { return !(fabsf(max) < kFar); }

/// Whether a row's scores are to be settled before they become weights: an empty row has none.
[[nodiscard]] __device__ __forceinline__ bool settles(float max) { return is_far(max) && max != softmax::kNegInf; }

/// What is subtracted from a row's scores: of a row that is far or empty, whose scores are 0 and -inf, 0.
[[nodiscard]] __device__ __forceinline__ float fused_shift(float max) { return is_far(max) ? 0.0F : max; }

/// The largest score that leaves a row as it is: none in a row that is far or empty, which is to be looked at whatever it is.
[[nodiscard]] __device__ __forceinline__ float fused_limit(float max) { return is_far(max) ? softmax::kNegInf : slack_limit(max); }

/// A score of a far row, settled; NaN stays. Two roundings, as the maximum had.
[[nodiscard]] __device__ __forceinline__ float settled(float score, float scale, float max) {
  const float below = __fsub_rn(__fmul_rn(score, scale), max);
  return below < 0.0F ? softmax::kNegInf : below;
}

}  // namespace lean::cuda
