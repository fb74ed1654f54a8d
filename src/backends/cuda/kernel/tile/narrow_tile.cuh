// LeanTile() on one warp for up to 8 query rows: S^T = K Q^T and O^T = V^T P^T, with tokens, then dims, as the 16 rows (M) of
// matrix products and queries as their 8 columns (N). Of 16 rows at least 8 would be empty, so this has half the products, scores
// and accumulators, and its queries fit registers; what K and V look like in a stage, and how they are read, is the same. Every sum
// is in WarpTile's order, so that the bits do not tell which of the two computed them. For decode steps.
#pragma once

#include <cstdint>

#include "backends/cuda/kernel/cta_memory.cuh"
#include "backends/cuda/kernel/kv_rows.cuh"
#include "backends/cuda/kernel/load/lacking_pages.cuh"
#include "backends/cuda/kernel/load/ring.cuh"
#include "backends/cuda/kernel/row_block.cuh"
#include "backends/cuda/kernel/tile/fragment.cuh"
#include "backends/cuda/kernel/tile/half_queries.cuh"
#include "backends/cuda/kernel/tile/lane_rows.cuh"
#include "backends/cuda/kernel/tile/lane_rules.cuh"
#include "backends/cuda/kernel/tile/stage_rows.cuh"
#include "backends/cuda/kernel/tile/staged_parts.cuh"
#include "backends/cuda/ptx/barrier.cuh"
#include "backends/cuda/ptx/mma.cuh"
#include "backends/cuda/ptx/shared.cuh"
#include "backends/cuda/ptx/special_registers.cuh"
#include "backends/cuda/ptx/warp.cuh"
#include "problem/kv_scales.hpp"
#include "problem/pages.hpp"

namespace lean::cuda {

/// Lane = 4 quad + in_quad: it holds scores of tokens `quad` and + 8 of each run and two dims of each 16 (output_dim()), of queries
/// 2 in_quad and + 1; and of query 2 in_quad + quad % 2 the weights' sum over tokens 2 (quad / 2) and + 1, + 8 and + 9, which is
/// what a lane of WarpTile sums. kWhole: d is the variant's own, as in every decode step.
template <KernelConfig kConfig, bool kWhole>
class NarrowTile {
 public:
  static_assert(kConfig.narrow() && kConfig.step() && kWhole);
  static constexpr std::int32_t kDims = kConfig.head_dim;
  static constexpr std::int32_t kRuns = kConfig.warp_runs();
  static constexpr int kSteps = kDims / kMmaDims;  // products of K Q^T in a row
  static constexpr int kRunScores = 4;             // of a lane and a run
  static constexpr int kScores = kRuns * kRunScores;

  __device__ explicit NarrowTile(const DeviceCall& call)
      : call_(call),
        lane_(static_cast<std::int32_t>(ptx::thread_index()) % kWarpThreads),
        warp_(static_cast<std::int32_t>(ptx::thread_index()) / kWarpThreads),
        rows_(call.problem.head_dim, lane_) {}

  /// Takes the queries of a row block, with all consumer threads together, and empties (O, m, l).
  __device__ __forceinline__ void begin(CtaMemory<kConfig>& memory, const PipelineState& records) {
    const SegmentRecord& record = memory.shared.records[records.index];
    const std::uint32_t queries = ptx::shared_address(memory.queries[records.index]);
    ptx::barrier_wait(&memory.shared.queries_full[records.index], records.phase);
    Held::template load_queries_as_b<kConfig>(query_, queries, lane_);
    if constexpr (kConfig.kv_type().scaled) scale_queries(record.kv_head);
    const auto row_of_query = [this](int query) { return row_of(query); };
    lane_rows_.begin(call_, record, row_of_query);
    rules_.begin(call_, record, row_of_query);
    sum_ = 0.0F;
#pragma unroll
    for (auto& sixteen : o_) {
#pragma unroll
      for (float& x : sixteen) x = 0.0F;
    }
  }

  /// S^T = K Q^T of this warp's tokens, from a stage that holds K.
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
    const std::int32_t stage_end = tile_token + tile_tokens;
    // In 32 bits: 31 need not count the tile's last places, behind the last token.
    const std::uint32_t own = own_token(tile_token);
    const auto first_limit = static_cast<std::uint32_t>(min(lane_rows_.first_limit, stage_end));
    const bool masked = static_cast<std::uint32_t>(tile_token) + kConfig.tile_tokens > first_limit;  // of the whole warp
    const std::uint32_t limit[2] = {static_cast<std::uint32_t>(min(lane_rows_.limit[0], stage_end)),
                                    static_cast<std::uint32_t>(min(lane_rows_.limit[1], stage_end))};
#pragma unroll
    for (int j = 0; j < kScores; ++j) score(j) *= score_scale(j % 2);
    if constexpr (kConfig.ruled()) apply_rules(record, tile_token, own);
    if (is_paged(call_.problem.pages) && lacks_pages(memory.shared)) hide_lacking_pages(record, tile_token, stage_end);
    if (masked) {
#pragma unroll
      for (int j = 0; j < kScores; ++j) {
        if (own + token_of(j) >= limit[j % 2]) score(j) = softmax::kNegInf;
      }
    }
    float largest[2] = {softmax::kNegInf, softmax::kNegInf};  // of this lane's
#pragma unroll
    for (int j = 0; j < kScores; ++j) largest[j % 2] = fmaxf(largest[j % 2], score(j));
    if (lane_rows_.any_outgrows(largest)) rescale(largest);
    const float shift[2] = {lane_rows_.shift(0), lane_rows_.shift(1)};
#pragma unroll
    for (int j = 0; j < kScores; ++j) score(j) = ptx::exp2_approx(score(j) - shift[j % 2]);
    // Neighbouring quads hold neighbouring tokens: one gives the other its weight of the query that is not its own to sum.
    const bool second = sums_second();
#pragma unroll
    for (int j = 0; j < kScores; j += 2) {
      const float others = __shfl_xor_sync(ptx::kAllLanes, second ? score(j) : score(j + 1), 4);
      sum_ += second ? others : score(j);
      sum_ += second ? score(j + 1) : others;
    }
  }

  /// O^T += V^T P^T of this warp's tokens, from a stage that holds V. Rows past `tile_tokens` hold leftovers and are cleared.
  __device__ void accumulate(CtaMemory<kConfig>&, std::uint32_t stage, std::int32_t tile_tokens) {
    if constexpr (kConfig.kv_type().converted()) {
      if (is_e5m2()) return accumulate_of<DType::kFloat8E5M2>(stage, tile_tokens);
    }
    accumulate_of<kConfig.dtype>(stage, tile_tokens);
  }

  /// Adds up l over the lanes of a query: after the segment's last tile.
  __device__ void finish() {
    sum_ += __shfl_xor_sync(ptx::kAllLanes, sum_, 8);
    sum_ += __shfl_xor_sync(ptx::kAllLanes, sum_, 16);
  }

  /// Stages this warp's part, of rows below `count`.
  __device__ __forceinline__ void stage(CtaMemory<kConfig>& memory, const StagedRows<kConfig>& rows, std::int32_t count) const {
    static_assert(rows.kCount == kNarrowRows && rows.kRounds == 1);
    const std::int32_t quad = lane_ / 4;
#pragma unroll
    for (int query = 0; query < 2; ++query) {
      const std::int32_t row = row_of(query);
      if (row >= count) return;
      const std::int32_t place = warp_ * kNarrowRows + row;
      float* to = memory.exchange + place * kDims;
      std::int32_t near[2][2];  // the swizzle moves quads among eight neighbours: where those lie is worked out once
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const std::int32_t dim = i / 2 * kMmaDims + Held::output_dim(quad, i % 2);
        near[i / 2][i % 2] = swizzled_vector<kConfig>(row, dim / kVectorDims) * kVectorDims + dim % kVectorDims;
      }
#pragma unroll
      for (int i = 0; i < kDims / kMmaDims; ++i) {
        float* const sixteen = to + i / 2 * 2 * kMmaDims;
        if constexpr (kConfig.kv_type().converted()) {  // neighbours
          *reinterpret_cast<float2*>(sixteen + near[i % 2][0]) = {o_[i][query], o_[i][2 + query]};
        } else {
          sixteen[near[i % 2][0]] = o_[i][query];
          sixteen[near[i % 2][1]] = o_[i][2 + query];
        }
      }
      if (quad != query) continue;
      memory.shared.parts.m[place] = lane_rows_.max[query];
      memory.shared.parts.l[place] = sum_;
    }
  }

  /// True when none of this warp's tokens is among the first `tile_tokens` of a tile.
  [[nodiscard]] __device__ bool idle(std::int32_t tile_tokens) const { return warp_ * kMmaTokens >= tile_tokens; }

 private:
  using Rows = StageRows<kConfig, kWhole>;
  using Held = Fragment<kConfig.dtype>;
  static constexpr int kSetSteps = Rows::kSetPieces * Held::kPieceDims / kMmaDims;

  /// kType: of what is stored, which the variant's own type may stand for.
  template <DType kType>
  __device__ __forceinline__ void scores_of(std::uint32_t stage) {
#pragma unroll
    for (int run = 0; run < kRuns; ++run) {
      float(&s)[kRunScores] = scores_[run];
      s[0] = s[1] = s[2] = s[3] = 0.0F;
#pragma unroll
      for (int g = 0; g < Rows::kSets; ++g) {
        std::uint32_t k[2][Rows::kSetPieces];
#pragma unroll
        for (int half = 0; half < 2; ++half) rows_.read_keys(stage, run_row(run) + half * 8, g, k[half]);
#pragma unroll
        for (int step = 0; step < kSetSteps; ++step) {
          const uint2 low = Fragment<kType>::key_factors(k[0], step);
          const uint2 high = Fragment<kType>::key_factors(k[1], step);
          const std::uint32_t keys[4] = {low.x, high.x, low.y, high.y};
          const std::uint32_t* query = query_ + 2 * (g * kSetSteps + step);
          ptx::multiply_add<kConfig.kv_type().product>(s, keys, query[0], query[1]);
        }
      }
    }
  }

  template <DType kType>
  __device__ __forceinline__ void accumulate_of(std::uint32_t stage, std::int32_t tile_tokens) {
    if (kConfig.ruled() && hides_) return accumulate_rows<kType, kConfig.ruled()>(stage, tile_tokens);
    accumulate_rows<kType, false>(stage, tile_tokens);
  }

  /// kHides: rules hide tokens of the tile, whose values are selected away.
  template <DType kType, bool kHides>
  __device__ __forceinline__ void accumulate_rows(std::uint32_t stage, std::int32_t tile_tokens) {
    constexpr DType kProduct = kConfig.kv_type().product;
#pragma unroll
    for (int run = 0; run < kRuns; ++run) {
      const float(&p)[kRunScores] = scores_[run];
      const std::uint32_t weights[2] = {ptx::transposed(ptx::pack<kProduct>(p[0], p[1])),
                                        ptx::transposed(ptx::pack<kProduct>(p[2], p[3]))};
      const std::int32_t row = run_row(run);
      if (row + kMmaTokens > tile_tokens) rows_.clear(stage, max(row, tile_tokens), row + kMmaTokens, lane_);
#pragma unroll
      for (int g = 0; g < Rows::kSets; ++g) {
        std::uint32_t v[2][Rows::kSetPieces];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          rows_.read_values(stage, row + half * 8, g, v[half]);
          if constexpr (kHides) {
#pragma unroll
            for (std::uint32_t& x : v[half]) x &= kept_[run][half];
          }
        }
#pragma unroll
        for (int step = 0; step < kSetSteps; ++step) {
          std::uint32_t values[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) values[i] = Fragment<kType>::value_factor(v[i / 2], 2 * step + i % 2);
          ptx::multiply_add<kProduct>(o_[g * kSetSteps + step], values, weights[0], weights[1]);
        }
      }
    }
  }

  [[nodiscard]] __device__ __forceinline__ bool is_e5m2() const { return call_.problem.k.dtype == DType::kFloat8E5M2; }

  [[nodiscard]] __device__ __forceinline__ float score_scale(int query) const { return lane_rows_.score_scale(call_, query); }

  /// Queries beside fp8 keys become fp16, the keys' scale a part of the scores'. Queries are held by other lanes than their scores.
  __device__ __forceinline__ void scale_queries(std::int32_t kv_head) {
    float held = 1.0F;
    if (call_.problem.q.dtype == DType::kBFloat16) {
      held = to_half([&](const auto& each) {
#pragma unroll
        for (std::uint32_t& x : query_) each(x);
      });
    }
    const float scale = call_.tile.log2_scale * k_scale_of(call_.problem, kv_head);
#pragma unroll
    for (int query = 0; query < 2; ++query) {
      lane_rows_.scale[query] = scale * __shfl_sync(ptx::kAllLanes, held, 4 * row_of(query));
    }
  }

  /// Rows of the block that this lane holds: query 0 and 1.
  [[nodiscard]] __device__ __forceinline__ std::int32_t row_of(int query) const { return 2 * (lane_ % 4) + query; }

  /// Which of its two queries this lane sums.
  [[nodiscard]] __device__ __forceinline__ bool sums_second() const { return (lane_ & 4) != 0; }

  [[nodiscard]] static constexpr std::int32_t run_tokens() { return kConfig.token_warps() * kMmaTokens; }
  /// The first row of a stage that this warp takes in a run.
  [[nodiscard]] __device__ __forceinline__ std::int32_t run_row(int run) const { return warp_ * kMmaTokens + run * run_tokens(); }

  /// The lane's scores of a tile: of each run, a token's of its two queries, then the token's 8 further.
  [[nodiscard]] __device__ __forceinline__ float& score(int j) { return scores_[j / kRunScores][j % kRunScores]; }
  /// The lane's first token of a tile.
  [[nodiscard]] __device__ __forceinline__ std::uint32_t own_token(std::int32_t tile_token) const {
    return static_cast<std::uint32_t>(tile_token) + static_cast<std::uint32_t>(warp_ * kMmaTokens + lane_ / 4);
  }
  /// Tokens from the lane's first to that of a score.
  [[nodiscard]] static constexpr std::int32_t token_of(int j) { return j / kRunScores * run_tokens() + j % kRunScores / 2 * 8; }

  /// Every score after the rules, and what counts of V: tokens that any of the queries sees.
  __device__ __forceinline__ void apply_rules(const SegmentRecord& record, std::int32_t tile_token, std::uint32_t own) {
    hides_ = false;
    if (!tile_has_rules(call_, record, tile_token, kConfig.tile_tokens)) return;
    const std::uint32_t sees = rules_.template apply<kScores>(
        call_, record, static_cast<std::uint32_t>(tile_token) + kConfig.tile_tokens, lane_rows_.limit, false, {1.0F, 1.0F},
        [this](int j) -> float& { return score(j); }, [](int j) { return j % 2; }, own, [](int j) { return token_of(j); });
    hides_ = call_.tile.hides_values;
    if (!hides_) return;
#pragma unroll
    for (int pair = 0; pair < 2 * kRuns; ++pair) {
      std::uint32_t seen = __ballot_sync(ptx::kAllLanes, (sees >> 2 * pair & 3U) != 0);  // four lanes have a token
      seen |= seen >> 1;
      seen |= seen >> 2;
      seen >>= lane_ % 4 * 8;
      kept_[pair / 2][pair % 2] = ((seen & 1U) != 0 ? Held::kFirstToken : 0U) | ((seen & 16U) != 0 ? ~Held::kFirstToken : 0U);
    }
  }

  /// Has queries that scores outgrew refer to their largest, of which each of a query's lanes brings its own.
  __device__ void rescale(float (&largest)[2]) {
    float factor[2];
#pragma unroll
    for (int query = 0; query < 2; ++query) factor[query] = lane_rows_.template grow<4, kWarpThreads>(largest, query);
    sum_ *= sums_second() ? factor[1] : factor[0];
#pragma unroll
    for (auto& sixteen : o_) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sixteen[i] *= factor[i % 2];
    }
  }

  /// Scaled scores of tokens before `end` whose page lies outside the pool: these count as not there. Scaled, since -inf is no number
  /// under a scale of 0, which fp8 keys may have.
  __device__ __forceinline__ void hide_lacking_pages(const SegmentRecord& record, std::int32_t tile_token, std::int32_t end) {
    const PagedKv& pages = call_.problem.pages;
    const std::int32_t* ids = page_ids(pages, record.lengths, record.sequence);
#pragma unroll
    for (int j = 0; j < kScores; j += 2) {
      const std::uint32_t key = own_token(tile_token) + token_of(j);
      if (key >= static_cast<std::uint32_t>(end)) continue;
      if (in_pool(pages, ids[page_of(call_, static_cast<std::int32_t>(key))])) continue;
      score(j) = score(j + 1) = softmax::kNegInf;
    }
  }

  const DeviceCall& call_;
  std::int32_t lane_, warp_;
  Rows rows_;
  LaneRows<kConfig> lane_rows_;
  [[no_unique_address]] LaneRules<kConfig> rules_;
  bool hides_ = false;            // rules hide tokens of the tile,
  std::uint32_t kept_[kRuns][2];  // and what of registers of V is kept
  std::uint32_t query_[2 * kSteps];
  float scores_[kRuns][kRunScores];
  float sum_;
  float o_[kSteps][4];
};

}  // namespace lean::cuda
