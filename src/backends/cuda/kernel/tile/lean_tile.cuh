// LeanTile() of the paper (Alg. 1) on one warp: 16 query rows against the warp's tokens of a tile, by 16x8x16 matrix products;
// scores, online softmax and accumulate in registers. Each warp keeps its own (O, m, l), which fixup/segment_end.cuh merges.
#pragma once

#include <cstdint>

#include "backends/cuda/kernel/cta_memory.cuh"
#include "backends/cuda/kernel/load/lacking_pages.cuh"
#include "backends/cuda/kernel/load/queries.cuh"
#include "backends/cuda/kernel/load/ring.cuh"
#include "backends/cuda/kernel/row_block.cuh"
#include "backends/cuda/kernel/tile/fragment.cuh"
#include "backends/cuda/kernel/tile/half_queries.cuh"
#include "backends/cuda/kernel/tile/lane_rows.cuh"
#include "backends/cuda/kernel/tile/lane_rules.cuh"
#include "backends/cuda/kernel/tile/score_rules.cuh"
#include "backends/cuda/kernel/tile/stage_rows.cuh"
#include "backends/cuda/kernel/tile/staged_parts.cuh"
#include "backends/cuda/ptx/barrier.cuh"
#include "backends/cuda/ptx/copy.cuh"
#include "backends/cuda/ptx/mma.cuh"
#include "backends/cuda/ptx/shared.cuh"
#include "backends/cuda/ptx/special_registers.cuh"
#include "backends/cuda/ptx/warp.cuh"
#include "problem/address.hpp"
#include "problem/kv_scales.hpp"
#include "softmax/state.hpp"

namespace lean::cuda {

/// kWhole: d is the variant's own; else a smaller multiple of 8.
template <KernelConfig kConfig, bool kWhole>
class WarpTile {
 public:
  static constexpr std::int32_t kDims = kConfig.head_dim;
  static constexpr std::int32_t kRuns = kConfig.warp_runs();
  static constexpr int kSteps = kDims / kMmaDims;  // products of Q K^T in a row
  static constexpr int kScores = kRuns * 8;        // of a lane

  __device__ explicit WarpTile(const DeviceCall& call)
      : call_(call),
        lane_(static_cast<std::int32_t>(ptx::thread_index()) % kWarpThreads),
        row_warp_(static_cast<std::int32_t>(ptx::thread_index()) / kWarpThreads % kConfig.row_warps()),
        token_warp_(static_cast<std::int32_t>(ptx::thread_index()) / kWarpThreads / kConfig.row_warps()),
        rows_(call.problem.head_dim, lane_) {}

  /// Takes the queries of a row block, with all consumer threads together, and empties (O, m, l).
  __device__ __forceinline__ void begin(CtaMemory<kConfig>& memory, const PipelineState& records) {
    const SegmentRecord& record = memory.shared.records[records.index];
    if constexpr (kConfig.bulk_queries()) {
      queries_ = ptx::shared_address(memory.queries[records.index]);
      ptx::barrier_wait(&memory.shared.queries_full[records.index], records.phase);
      if constexpr (kConfig.holds_queries()) hold_queries();
    } else {
      queries_ = ptx::shared_address(memory.exchange);
      consumer_sync<kConfig>();  // stage_queries() is done
      hold_queries();
      if (asked().may_rule()) consumer_sync<kConfig>();  // apply_rules() uses the area too
    }
    if constexpr (kConfig.kv_type().scaled) scale_queries(record.kv_head);
    const auto row_of_half = [this](int half) { return row_of(half); };
    lane_rows_.begin(call_, record, row_of_half);
    rules_.begin(call_, record, row_of_half);
    sum_[0] = sum_[1] = 0.0F;
#pragma unroll
    for (auto& accumulator : o_) {
#pragma unroll
      for (float& x : accumulator) x = 0.0F;
    }
  }

  /// S = Q K^T of this warp's tokens, from a stage that holds K.
  __device__ void scores(std::uint32_t stage) {
    if constexpr (kConfig.kv_type().converted()) {
      if (is_e5m2()) return scores_of<DType::kFloat8E5M2>(stage);
    }
    scores_of<kConfig.dtype>(stage);
  }

  /// The online softmax over this warp's tokens; the stage held the sequence's tokens [tile_token, tile_token + tile_tokens), and
  /// leftovers behind.
  __device__ void update_softmax(CtaMemory<kConfig>& memory, const SegmentRecord& record, std::int32_t tile_token,
                                 std::int32_t tile_tokens) {
    float scale[2] = {score_scale(0), score_scale(1)};
    if (asked().may_rule()) {
      if (tile_has_rules(call_, record, tile_token, kConfig.tile_tokens) || lacks_pages(memory.shared)) {
        apply_rules(memory, record, tile_token);
        scale[0] = scale[1] = 1.0F;
      } else if (asked().hides_values()) {
        ptx::keep_shared(own_words(memory), ~0U);
      }
    }
    const std::int32_t stage_end = tile_token + tile_tokens;
    // In 32 bits: 31 need not count the tile's last places, behind the last token.
    const std::uint32_t own = own_token(tile_token);
    const auto first_limit = static_cast<std::uint32_t>(min(lane_rows_.first_limit, stage_end));
    const bool masked = static_cast<std::uint32_t>(tile_token) + kConfig.tile_tokens > first_limit;  // of the whole warp
    const std::uint32_t limit[2] = {static_cast<std::uint32_t>(min(lane_rows_.limit[0], stage_end)),
                                    static_cast<std::uint32_t>(min(lane_rows_.limit[1], stage_end))};
#pragma unroll
    for (int j = 0; j < kScores; ++j) score(j) *= scale[j % 4 / 2];
    if constexpr (kConfig.ruled()) {
      hides_ = false;
      if (tile_has_rules(call_, record, tile_token, kConfig.tile_tokens)) {
        const std::uint32_t sees = rules_.template apply<kScores>(
            call_, record, static_cast<std::uint32_t>(tile_token) + kConfig.tile_tokens, lane_rows_.limit, false, {1.0F, 1.0F},
            [this](int j) -> float& { return score(j); }, [](int j) { return j % 4 / 2; }, own, [](int j) { return token_of(j); });
        hides_ = call_.tile.hides_values;
        if (hides_) seen_ = seen_by_warp(sees);
      }
    }
    if constexpr (kConfig.step()) {  // else a rule
      if (asked().pages() && lacks_pages(memory.shared)) hide_lacking_pages(record, tile_token, stage_end);
    }
    if (masked) {
#pragma unroll
      for (int j = 0; j < kScores; ++j) {
        if (own + token_of(j) >= limit[j % 4 / 2]) score(j) = softmax::kNegInf;
      }
    }
    float largest[2] = {softmax::kNegInf, softmax::kNegInf};  // of this lane's
#pragma unroll
    for (int j = 0; j < kScores; ++j) largest[j % 4 / 2] = fmaxf(largest[j % 4 / 2], score(j));
    if (lane_rows_.any_outgrows(largest)) rescale(largest);
    const float shift[2] = {lane_rows_.shift(0), lane_rows_.shift(1)};
#pragma unroll
    for (int j = 0; j < kScores; ++j) {
      score(j) = ptx::exp2_approx(score(j) - shift[j % 4 / 2]);
      sum_[j % 4 / 2] += score(j);
    }
  }

  /// O += P V of this warp's tokens, from a stage that holds V. Rows past `tile_tokens` hold leftovers and are cleared, and what a
  /// mask hides from all rows of the warp is selected away.
  __device__ void accumulate(CtaMemory<kConfig>& memory, std::uint32_t stage, std::int32_t tile_tokens) {
    if constexpr (kConfig.kv_type().converted()) {
      if (is_e5m2()) return accumulate_of<DType::kFloat8E5M2>(memory, stage, tile_tokens);
    }
    accumulate_of<kConfig.dtype>(memory, stage, tile_tokens);
  }

  /// Adds up l over the lanes of a row: after the segment's last tile.
  __device__ void finish() {
#pragma unroll
    for (float& l : sum_) {
      l += __shfl_xor_sync(ptx::kAllLanes, l, 1);
      l += __shfl_xor_sync(ptx::kAllLanes, l, 2);
    }
  }

  /// Stages this warp's part, of rows below `count`.
  __device__ __forceinline__ void stage(CtaMemory<kConfig>& memory, const StagedRows<kConfig>& rows, std::int32_t count) const {
    constexpr int kHalves = rows.kOfWarp / (kMmaRows / 2);
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      if (row_of(rows.round + half) - lane_ / 4 >= count) return;
      stage_half(memory, row_warp_ * rows.kOfWarp + half * (kMmaRows / 2) + lane_ / 4, rows.kCount, rows.round + half);
    }
  }

  /// True when none of this warp's tokens is among the first `tile_tokens` of a tile.
  [[nodiscard]] __device__ bool idle(std::int32_t tile_tokens) const { return token_warp_ * kMmaTokens >= tile_tokens; }

 private:
  __device__ __forceinline__ void stage_half(CtaMemory<kConfig>& memory, std::int32_t staged, std::int32_t part_rows,
                                             int half) const {
    const std::int32_t place = token_warp_ * part_rows + staged;
    float* row = memory.exchange + place * kDims;
    // The swizzle moves quads among eight neighbours: where the pieces of those lie is worked out once.
    constexpr int kNear = 8 * kVectorDims / Held::kPieceDims;
    std::int32_t near[kNear];
#pragma unroll
    for (int c = 0; c < kNear; ++c) {
      const std::int32_t dim = c * Held::kPieceDims + in_quad() * Held::kLaneDims;
      near[c] = swizzled_vector<kConfig>(lane_ / 4, dim / kVectorDims) * kVectorDims + dim % kVectorDims;
    }
#pragma unroll
    for (int c = 0; c < kDims / Held::kPieceDims; ++c) {
      const int accumulator = c * Held::kPieceDims / kAccumulatorDims;
      Held::store(row + near[c % kNear] + c / kNear * 8 * kVectorDims, o_ + accumulator, half);
    }
    if (in_quad() != 0) return;
    memory.shared.parts.m[place] = lane_rows_.max[half];
    memory.shared.parts.l[place] = sum_[half];
  }

  [[nodiscard]] __device__ __forceinline__ Asked<kConfig> asked() const { return Asked<kConfig>(call_); }

  using Rows = StageRows<kConfig, kWhole>;
  using Held = Fragment<kConfig.dtype>;

  /// Rows of the block that this lane holds: half 0 and 1.
  [[nodiscard]] __device__ std::int32_t row_of(int half) const { return row_warp_ * kMmaRows + lane_ / 4 + 8 * half; }
  [[nodiscard]] __device__ std::int32_t in_quad() const { return lane_ % 4; }

  /// Where a lane keeps words for itself, one in consumer_threads(): in the exchange area, which is the consumers' until the
  /// segment ends. There lie the scores while rules are applied to them and, from a tile's scores to its values, seen_by_warp().
  [[nodiscard]] __device__ __forceinline__ static std::uint32_t own_words(const CtaMemory<kConfig>& memory) {
    return ptx::shared_address(memory.exchange + ptx::thread_index());
  }
  [[nodiscard]] __device__ __forceinline__ bool is_e5m2() const { return call_.problem.k.dtype == DType::kFloat8E5M2; }

  [[nodiscard]] __device__ __forceinline__ float score_scale(int half) const { return lane_rows_.score_scale(call_, half); }

  /// Factors of one product of Q K^T.
  struct QueryStep {
    std::uint32_t x[4];
  };

  [[nodiscard]] __device__ __forceinline__ QueryStep load_query_step(int step) const {
    QueryStep query;
    Held::template load_queries_as_a<kConfig>(query.x, queries_, row_warp_ * kMmaRows, lane_, step);
    return query;
  }

  __device__ __forceinline__ void hold_queries() {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) query_[step] = load_query_step(step);
  }

  [[nodiscard]] __device__ __forceinline__ QueryStep query_step(int step) const {
    if constexpr (kConfig.holds_queries()) return query_[step];
    return load_query_step(step);
  }

  /// kType: of what is stored, which the variant's own type may stand for.
  template <DType kType>
  __device__ __forceinline__ void scores_of(std::uint32_t stage) {
#pragma unroll
    for (int run = 0; run < kRuns; ++run) {
#pragma unroll
      for (auto& s : scores_[run]) s[0] = s[1] = s[2] = s[3] = 0.0F;
#pragma unroll
      for (int g = 0; g < Rows::kSets; ++g) {
        constexpr int kSetSteps = Rows::kSetPieces * Held::kPieceDims / kMmaDims;
        std::uint32_t k[2][Rows::kSetPieces];
#pragma unroll
        for (int half = 0; half < 2; ++half) rows_.read_keys(stage, run_row(run) + half * 8, g, k[half]);
#pragma unroll
        for (int step = 0; step < kSetSteps; ++step) {
          const QueryStep query = query_step(g * kSetSteps + step);
#pragma unroll
          for (int half = 0; half < 2; ++half) {  // one after the other: a product waits for the one before it in its sum
            const uint2 factors = Fragment<kType>::key_factors(k[half], step);
            ptx::multiply_add<kConfig.kv_type().product>(scores_[run][half], query.x, factors.x, factors.y);
          }
        }
      }
    }
  }

  template <DType kType>
  __device__ __forceinline__ void accumulate_of(CtaMemory<kConfig>& memory, std::uint32_t stage, std::int32_t tile_tokens) {
    if (kConfig.ruled() && hides_) return accumulate_rows<kType, kConfig.ruled()>(memory, stage, tile_tokens);
    accumulate_rows<kType, false>(memory, stage, tile_tokens);
  }

  /// kHides: rules in registers hide tokens of the tile, whose values are selected away; any call's ask for that in each.
  template <DType kType, bool kHides>
  __device__ __forceinline__ void accumulate_rows(CtaMemory<kConfig>& memory, std::uint32_t stage, std::int32_t tile_tokens) {
    constexpr DType kProduct = kConfig.kv_type().product;
#pragma unroll
    for (int run = 0; run < kRuns; ++run) {
      const std::uint32_t p[4] = {
          ptx::pack<kProduct>(scores_[run][0][0], scores_[run][0][1]), ptx::pack<kProduct>(scores_[run][0][2], scores_[run][0][3]),
          ptx::pack<kProduct>(scores_[run][1][0], scores_[run][1][1]), ptx::pack<kProduct>(scores_[run][1][2], scores_[run][1][3])};
      const std::int32_t row = run_row(run);
      if (row + kMmaTokens > tile_tokens) rows_.clear(stage, max(row, tile_tokens), row + kMmaTokens, lane_);
#pragma unroll
      for (int g = 0; g < Rows::kSets; ++g) {
        constexpr int kAccumulators = Rows::kSetPieces * Held::kPieceDims / kAccumulatorDims;
        std::uint32_t v[2][Rows::kSetPieces];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          rows_.read_values(stage, row + half * 8, g, v[half]);
          if (!kHides && !asked().hides_values()) continue;
          const std::uint32_t kept = kept_tokens(memory, run * 8 + half * 4);
#pragma unroll
          for (std::uint32_t& x : v[half]) x &= kept;
        }
#pragma unroll
        for (int accumulator = 0; accumulator < kAccumulators; ++accumulator) {
          ptx::multiply_add<kProduct>(o_[g * kAccumulators + accumulator], p, Fragment<kType>::value_factor(v[0], accumulator),
                                      Fragment<kType>::value_factor(v[1], accumulator));
        }
      }
    }
  }

  /// What counts of a register of V: its tokens, if they are seen. `score` is the lane's first score of them.
  [[nodiscard]] __device__ __forceinline__ std::uint32_t kept_tokens(CtaMemory<kConfig>& memory, int score) const {
    const std::uint32_t seen = (kConfig.ruled() ? seen_ : ptx::kept_shared(own_words(memory))) >> score;
    return ((seen & 1U) != 0 ? Held::kFirstToken : 0U) | ((seen & 2U) != 0 ? ~Held::kFirstToken : 0U);
  }

  /// Queries beside fp8 keys become fp16, the keys' scale a part of the scores'.
  __device__ __forceinline__ void scale_queries(std::int32_t kv_head) {
    const float scale = call_.tile.log2_scale * k_scale_of(call_.problem, kv_head);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      lane_rows_.scale[half] = scale;
      if (call_.problem.q.dtype != DType::kBFloat16) continue;
      lane_rows_.scale[half] *= to_half([&](const auto& each) {
#pragma unroll
        for (auto& step : query_) {
          each(step.x[half]);
          each(step.x[half + 2]);
        }
      });
    }
  }

  /// Scaled scores of tokens before `end` whose page lies outside the pool: these count as not there. Scaled, since -inf is no number
  /// under a scale of 0, which fp8 keys may have.
  __device__ __forceinline__ void hide_lacking_pages(const SegmentRecord& record, std::int32_t tile_token, std::int32_t end) {
    const PagedKv& pages = call_.problem.pages;
    const std::int32_t* ids = page_ids(pages, record.lengths, record.sequence);
#pragma unroll
    for (int j = 0; j < kScores; ++j) {
      if (j % 4 >= 2) continue;  // a token is that of two scores
      const std::uint32_t key = own_token(tile_token) + token_of(j);
      if (key >= static_cast<std::uint32_t>(end)) continue;
      if (in_pool(pages, ids[page_of(call_, static_cast<std::int32_t>(key))])) continue;
      score(j) = score(j + 2) = softmax::kNegInf;
    }
  }

  /// Every score in the log2 domain, after the rules.
  __device__ __forceinline__ void apply_rules(CtaMemory<kConfig>& memory, const SegmentRecord& record, std::int32_t tile_token) {
    static_assert(kScores * kConfig.consumer_threads() <= kConfig.exchange_floats());
    constexpr std::uint32_t kWordBytes = kConfig.consumer_threads() * sizeof(float);  // from a lane's word to its next
    const std::uint32_t own = own_words(memory);
#pragma unroll
    for (int j = 0; j < kScores; ++j) ptx::keep_shared(own + j * kWordBytes, __float_as_uint(score(j) * score_scale(j % 4 / 2)));
    const bool lacking = lacks_pages(memory.shared);
    std::uint32_t seen = 0;
#pragma unroll 1
    for (int j = 0; j < kScores; ++j) {
      const std::uint32_t at_score = own + j * kWordBytes;
      const std::int32_t key = tile_token + token_warp_ * kMmaTokens + 2 * in_quad() + token_of(j);
      const PackedRow at = query_of(record, row_of(j % 4 / 2));
      const float bias = key_bias(call_, record, at, key, lacking);
      const bool sees = bias != softmax::kNegInf;
      const float scaled = __uint_as_float(ptx::kept_shared(at_score));
      ptx::keep_shared(at_score, __float_as_uint(sees ? ruled_score(call_, record, scaled, at, key) + bias : softmax::kNegInf));
      seen |= static_cast<std::uint32_t>(sees) << j;
    }
#pragma unroll
    for (int j = 0; j < kScores; ++j) score(j) = __uint_as_float(ptx::kept_shared(own + j * kWordBytes));
    ptx::keep_shared(own, seen_by_warp(seen));
  }

  [[nodiscard]] __device__ __forceinline__ PackedRow query_of(const SegmentRecord& record, std::int32_t row) const {
    return cuda::query_of<kConfig>(call_, record, row);
  }

  /// Tokens from one run of this warp to its next.
  [[nodiscard]] static constexpr std::int32_t run_tokens() { return kConfig.token_warps() * kMmaTokens; }

  /// The first row of a stage that this warp takes in a run.
  [[nodiscard]] __device__ __forceinline__ std::int32_t run_row(int run) const {
    return token_warp_ * kMmaTokens + run * run_tokens();
  }

  /// The lane's scores of a tile: of each half of a run, two tokens of row_of(0), then the same two of row_of(1).
  [[nodiscard]] __device__ __forceinline__ float& score(int j) { return scores_[j / 8][j / 4 % 2][j % 4]; }
  /// The lane's first token of a tile.
  [[nodiscard]] __device__ __forceinline__ std::uint32_t own_token(std::int32_t tile_token) const {
    return static_cast<std::uint32_t>(tile_token) + static_cast<std::uint32_t>(token_warp_ * kMmaTokens + 2 * in_quad());
  }
  /// Tokens from the lane's first to that of a score.
  [[nodiscard]] static constexpr std::int32_t token_of(int j) { return j / 8 * run_tokens() + j / 4 % 2 * 8 + j % 2; }

  /// Has rows that scores outgrew refer to their largest, of which each of a row's lanes brings its own.
  __device__ void rescale(float (&largest)[2]) {
    float factor[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      factor[half] = lane_rows_.template grow<1, 4>(largest, half);
      sum_[half] *= factor[half];
    }
#pragma unroll
    for (auto& accumulator : o_) {
#pragma unroll
      for (int i = 0; i < 4; ++i) accumulator[i] *= factor[i / 2];
    }
  }

  const DeviceCall& call_;
  std::int32_t lane_, row_warp_, token_warp_;
  Rows rows_;
  LaneRows<kConfig> lane_rows_;
  [[no_unique_address]] LaneRules<kConfig> rules_;
  bool hides_ = false;         // rules in registers hide tokens of the tile, whatever they are: all lanes know the same,
  std::uint32_t seen_ = 0;     // and what each has of seen_by_warp()
  std::uint32_t queries_ = 0;  // where they are staged
  QueryStep query_[kSteps];    // where they are held
  float scores_[kRuns][2][4];
  float sum_[2];
  float o_[kDims / kAccumulatorDims][4];
};

}  // namespace lean::cuda
