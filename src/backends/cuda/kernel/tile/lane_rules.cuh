// LaneRules: the rules of scores of the two rows of the block whose scores a lane holds, in registers: softcap, ALiBi, masks, tree masks
// and windows whose left end differs from row to row. For decode steps and wide tiles; any call's kernels have the same rules in one loop
// through shared memory (score_rules.cuh), of little code and several times as long.
#pragma once

#include <cstddef>
#include <cstdint>

#include "backends/cuda/kernel/elements.cuh"
#include "backends/cuda/kernel/row_block.cuh"
#include "backends/cuda/kernel/tile/score_rules.cuh"
#include "backends/cuda/kernel_config.hpp"
#include "backends/cuda/ptx/mma.cuh"
#include "problem/reach.hpp"
#include "problem/tree_mask.hpp"
#include "softmax/scale.hpp"
#include "softmax/state.hpp"
#include "softmax/tanh_fit.hpp"
#include "tile/score_rules.hpp"

namespace lean::cuda {

/// softmax::soft_cap() by the tanh of softmax/tanh_fit.hpp, without a branch: by the CUDA library's calls with a softcap took 9 % longer
/// (docs/notebook/kernel.md). Its error is that of docs/numerics.md.
[[nodiscard]] __device__ __forceinline__ float soft_cap_of(float log2_score, float log2_cap, float inverse_cap) {
  const float x = log2_score * inverse_cap;
  const float square = x * x;
  float p = softmax::kTanh11;
  p = fmaf(p, square, softmax::kTanh9);
  p = fmaf(p, square, softmax::kTanh7);
  p = fmaf(p, square, softmax::kTanh5);
  p = fmaf(p, square, softmax::kTanh3);
  const float near_zero = fmaf(p * square, x, x);
  const float e = ptx::exp2_approx(fabsf(x) * (-2.0F * softmax::kLog2E));
  const float elsewhere = copysignf(__fdividef(1.0F - e, 1.0F + e), x);
  return log2_cap * (fabsf(x) < softmax::kTanhFitEnd ? near_zero : elsewhere);
}

/// kRuled: of other variants nothing.
template <KernelConfig kConfig, bool kRuled = kConfig.ruled()>
struct LaneRules {
  template <typename TRowOf>
  __device__ __forceinline__ void begin(const DeviceCall&, const SegmentRecord&, const TRowOf&) {}
};

template <KernelConfig kConfig>
struct LaneRules<kConfig, true> {
  std::int32_t token[2];       // query tokens
  std::int32_t first[2];       // keys from here on are seen, by position alone
  float slope[2];              // log2 domain; 0 where there is no ALiBi
  const std::byte* mask[2]{};  // of the rows' first keys

  /// Begins with a segment's block. `row_of`: which row of the block each of the two is.
  template <typename TRowOf>
  __device__ __forceinline__ void begin(const DeviceCall& call, const SegmentRecord& record, const TRowOf& row_of) {
    const Scores& scores = call.problem.scores;
    element_bytes_ = static_cast<std::int32_t>(mask_bytes(scores));
    end_to_end_ = scores.mask_strides.dim == 1;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const PackedRow at = query_of<kConfig>(call, record, row_of(i));
      token[i] = at.token;
      first[i] = visible_span(record.lengths, at.token, at.token, call.shape.reach).begin;
      const HeadPosition q_head{record.sequence, record.kv_head * call.shape.group + at.head_in_group};
      slope[i] = scores.alibi_slopes != nullptr ? tile::log2_slope(scores, q_head) : 0.0F;
      if (scores.mask == nullptr) continue;
      mask[i] =
          static_cast<const std::byte*>(scores.mask) + mask_offset(scores.mask_strides, q_head, at.token, 0) * mask_bytes(scores);
    }
  }

  /// Applies the rules to kScores scores of a tile that ends before key `tile_end`: score(j) of row row_of(j) and of a key, an absolute
  /// token of the sequence, token_of(j) behind `first_key`, of which the row sees those before limit[row_of(j)] at most, and all where the
  /// tile is `within_reach`. What is given times `scale` are scores, and what becomes of it is multiplied; a score that a rule hides is
  /// -inf. Bit j of what is returned, but of wide tiles, says that none does. `token_of` captures nothing.
  template <int kScores, typename TScore, typename TRowOf, typename TTokenOf>
  __device__ __forceinline__ std::uint32_t apply(const DeviceCall& call, const SegmentRecord& record, std::uint32_t tile_end,
                                                 const std::int32_t (&limit)[2], bool within_reach, const float (&scale)[2],
                                                 const TScore& score, const TRowOf& row_of, std::uint32_t first_key,
                                                 TTokenOf token_of) const {
    static_assert(kScores <= 32);
    const auto key_of = [first_key, token_of](int j) { return first_key + static_cast<std::uint32_t>(token_of(j)); };
    const Scores& scores = call.problem.scores;
    float unscaled[2] = {scale[0], scale[1]};  // what scores have not been multiplied by yet
    if (scores.softcap > 0.0F) {
      const float cap = tile::log2_cap(scores);
      const float inverse_cap = 1.0F / cap;
#pragma unroll
      for (int j = 0; j < kScores; ++j) score(j) = soft_cap_of(score(j) * scale[row_of(j)], cap, inverse_cap);
      unscaled[0] = unscaled[1] = 1.0F;
    }
    if (scores.alibi_slopes != nullptr) {
      const float distance[2] = {distance_of(record, 0, first_key), distance_of(record, 1, first_key)};
#pragma unroll
      for (int j = 0; j < kScores; ++j) {
        const int row = row_of(j);
        const float bias = -slope[row] * fabsf(distance[row] - static_cast<float>(token_of(j)));
        score(j) = fmaf(score(j), unscaled[row], bias);
      }
      unscaled[0] = unscaled[1] = 1.0F;
    } else if (scores.mask == nullptr && scores.softcap <= 0.0F) {
#pragma unroll
      for (int j = 0; j < kScores; ++j) score(j) *= scale[row_of(j)];
    }
    if (scores.mask == nullptr && scores.tree_mask == nullptr && call.shape.reach.left < 0) return ~0U;
    std::uint32_t sees = ~0U;
    if (!within_reach) {
      sees = 0;
#pragma unroll
      for (int j = 0; j < kScores; ++j) {
        const bool in_reach =
            key_of(j) >= static_cast<std::uint32_t>(first[row_of(j)]) && key_of(j) < static_cast<std::uint32_t>(limit[row_of(j)]);
        sees |= static_cast<std::uint32_t>(in_reach) << j;
      }
    }
    if (scores.mask != nullptr) {
      bool in_pairs = false;
      if constexpr (kConfig.wide()) {  // steps have fewer scores a lane, and spill for it
        in_pairs = within_reach && mask_comes_in_pairs(first_key);
        if (in_pairs) apply_mask_in_pairs<kScores>(scores, unscaled, score, row_of, first_key, token_of);
      }
      if (!in_pairs) sees = apply_mask<kScores>(scores, unscaled, sees, score, row_of, key_of);
    }
    if (scores.tree_mask != nullptr && static_cast<std::int64_t>(tile_end) > first_draft(record.lengths)) {
      if constexpr (TTokenOf{}(kScores - 1) < 64) {
        sees &= tree_bits<kScores, TTokenOf>(call.problem, record, row_of, first_key);
      } else {
        sees = apply_tree<kScores>(call.problem, record, sees, row_of, key_of);
      }
    }
    if (kConfig.wide() && sees == ~0U) return sees;
#pragma unroll
    for (int j = 0; j < kScores; ++j) {
      if ((sees >> j & 1U) == 0) score(j) = softmax::kNegInf;
    }
    return sees;
  }

 private:
  /// How far a row's query is from the lane's first key, in tokens.
  [[nodiscard]] __device__ __forceinline__ float distance_of(const SegmentRecord& record, int row, std::uint32_t first_key) const {
    return static_cast<float>(static_cast<std::int32_t>(query_position(record.lengths, token[row]) - first_key));
  }

  /// Bit j: the tree mask does not hide the key of score j. A lane's keys lie within 64, and what a row's bits say of these is two words.
  template <int kScores, typename TTokenOf, typename TRowOf>
  [[nodiscard]] __device__ __forceinline__ std::uint32_t tree_bits(const Problem& problem, const SegmentRecord& record,
                                                                   const TRowOf& row_of, std::uint32_t first_key) const {
    const std::int32_t words = quotient(problem.q_tokens + 31, 32);  // of a query
    const std::int64_t draft = first_key - first_draft(record.lengths);
    // Drafts before -64 are none, whatever their number, and those behind the last word's are not seen.
    const auto first = static_cast<std::int32_t>(draft < -96 ? -96 : draft > problem.q_tokens + 31 ? problem.q_tokens + 31 : draft);
    std::uint32_t window[2][2];
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const std::uint32_t* const of_row =
          problem.scores.tree_mask + (record.sequence * problem.q_tokens + token[row]) * std::int64_t{words};
      std::uint32_t word[3];
#pragma unroll
      for (int k = 0; k < 3; ++k) {
        const std::int32_t at = (first >> 5) + k;
        word[k] = at < 0 ? ~0U : at < words ? of_row[at] : 0U;
      }
#pragma unroll
      for (int k = 0; k < 2; ++k) window[row][k] = __funnelshift_r(word[k], word[k + 1], static_cast<std::uint32_t>(first));
    }
    std::uint32_t bits = 0;
#pragma unroll
    for (int j = 0; j < kScores; ++j) {
      constexpr TTokenOf kTokenOf{};
      bits |= (window[row_of(j)][kTokenOf(j) / 32] >> kTokenOf(j) % 32 & 1U) << j;
    }
    return bits;
  }

  /// Of keys that are seen so far: their bits, without those that the tree mask hides. Where a query has one word, it is loaded once.
  template <int kScores, typename TRowOf, typename TKeyOf>
  [[nodiscard]] __device__ __forceinline__ std::uint32_t apply_tree(const Problem& problem, const SegmentRecord& record,
                                                                    std::uint32_t sees, const TRowOf& row_of,
                                                                    const TKeyOf& key_of) const {
    const bool one_word = problem.q_tokens <= 32;
    const std::uint32_t* const words = problem.scores.tree_mask + record.sequence * problem.q_tokens;
    const std::uint32_t word[2] = {one_word ? words[token[0]] : 0U, one_word ? words[token[1]] : 0U};
#pragma unroll
    for (int j = 0; j < kScores; ++j) {
      const std::int64_t draft = key_of(j) - first_draft(record.lengths);
      const bool in_word = draft < 0 || (draft < 32 && (word[row_of(j)] >> draft & 1U) != 0);
      const bool seen = one_word || (sees >> j & 1U) == 0
                            ? in_word
                            : sees_in_tree(problem, record.lengths, record.sequence, token[row_of(j)], key_of(j));
      if (!seen) sees &= ~(1U << j);
    }
    return sees;
  }

  [[nodiscard]] __device__ __forceinline__ static std::int64_t mask_bytes(const Scores& scores) {
    return scores.mask_is_boolean ? 1 : bytes_of(scores.mask_dtype);
  }

  /// softmax::to_log2() without a branch.
  [[nodiscard]] __device__ __forceinline__ static float log2_bias(float natural) {
    const float near = fminf(fmaxf(natural, -softmax::kBend), softmax::kBend);
    return fmaf(near, softmax::kLog2E - 0.5F, 0.5F * natural);
  }

  /// Whether two neighbouring elements of the mask from the lane's first key on may be loaded at once, and others an even number of keys
  /// behind.
  [[nodiscard]] __device__ __forceinline__ bool mask_comes_in_pairs(std::uint32_t first_key) const {
    const auto low = [](const std::byte* x) { return static_cast<std::uint32_t>(reinterpret_cast<std::uintptr_t>(x)); };
    const std::uint32_t further = first_key * static_cast<std::uint32_t>(element_bytes_);
    const std::uint32_t places = (low(mask[0]) + further) | (low(mask[1]) + further);
    return end_to_end_ && (places & static_cast<std::uint32_t>(2 * element_bytes_ - 1)) == 0;
  }

  /// The same as apply_mask(), of keys all of which are seen so far: some loads at a time, without a question between them. Scores that
  /// the mask hides become -inf.
  template <int kScores, typename TScore, typename TRowOf, typename TTokenOf>
  __device__ __forceinline__ void apply_mask_in_pairs(const Scores& scores, const float (&scale)[2], const TScore& score,
                                                      const TRowOf& row_of, std::uint32_t first_key, TTokenOf token_of) const {
    const std::int64_t further = std::int64_t{first_key} * element_bytes_;
    const std::byte* const from[2] = {mask[0] + further, mask[1] + further};
    const auto add = [&]<typename TPair>(TPair, const auto& apply_to) {
      constexpr int kAtOnce = sizeof(TPair) > 4 ? 8 : 16;  // in 16 registers
      static_assert(kScores % (2 * kAtOnce) == 0);
#pragma unroll
      for (int first = 0; first < kScores; first += 2 * kAtOnce) {
        TPair pairs[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          const int j = first + 2 * i;
          pairs[i] = *reinterpret_cast<const TPair*>(from[row_of(j)] + token_of(j) * static_cast<int>(sizeof(TPair) / 2));
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          const int j = first + 2 * i;
          apply_to(score(j), scale[row_of(j)], pairs[i].x);
          apply_to(score(j + 1), scale[row_of(j)], pairs[i].y);
        }
      }
    };
    const auto with_bias = [](float& x, float multiplier, float bias) {
      x = fmaf(x, multiplier, bias);
      ptx::hide_where_infinite(x, bias);  // it may be NaN
    };
    if (scores.mask_is_boolean) {
      add(uchar2{}, [](float& x, float multiplier, unsigned char seen) {
        x *= multiplier;
        ptx::hide_unless(x, seen);
      });
    } else if (scores.mask_dtype == DType::kFloat32) {
      add(float2{}, [&](float& x, float multiplier, float bias) { with_bias(x, multiplier, log2_bias(bias)); });
    } else if (scores.mask_dtype == DType::kFloat16) {
      add(ushort2{}, [&](float& x, float multiplier, unsigned short bits) {
        with_bias(x, multiplier, to_float<DType::kFloat16>(bits) * softmax::kLog2E);  // none is large
      });
    } else {
      add(ushort2{}, [&](float& x, float multiplier, unsigned short bits) {
        with_bias(x, multiplier, log2_bias(to_float<DType::kBFloat16>(bits)));
      });
    }
  }

  /// Of keys that are seen so far: their bits, without those that the mask hides.
  template <int kScores, typename TScore, typename TRowOf, typename TKeyOf>
  [[nodiscard]] __device__ __forceinline__ std::uint32_t apply_mask(const Scores& scores, const float (&scale)[2],
                                                                    std::uint32_t sees, const TScore& score, const TRowOf& row_of,
                                                                    const TKeyOf& key_of) const {
    const auto add = [&](std::int64_t bytes, const auto& bias_at) {
#pragma unroll
      for (int j = 0; j < kScores; ++j) {
        if ((sees >> j & 1U) == 0) continue;
        const float bias = bias_at(mask[row_of(j)] + key_of(j) * (scores.mask_strides.dim * bytes));
        if (bias == softmax::kNegInf) sees &= ~(1U << j);
        score(j) = fmaf(score(j), scale[row_of(j)], bias);
      }
    };
    if (scores.mask_is_boolean) {
      add(1, [](const std::byte* x) { return *x != std::byte{0} ? 0.0F : softmax::kNegInf; });
    } else if (scores.mask_dtype == DType::kFloat32) {
      add(4, [](const std::byte* x) { return softmax::to_log2(*reinterpret_cast<const float*>(x)); });
    } else {
      const bool half = scores.mask_dtype == DType::kFloat16;
      add(2, [half](const std::byte* x) {
        const std::uint16_t bits = *reinterpret_cast<const std::uint16_t*>(x);
        return softmax::to_log2(half ? to_float<DType::kFloat16>(bits) : to_float<DType::kBFloat16>(bits));
      });
    }
    return sees;
  }

  std::int32_t element_bytes_;  // of the mask
  bool end_to_end_;             // its keys lie so
};

}  // namespace lean::cuda
