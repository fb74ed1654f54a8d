// LeanTile() of many rows: 64 query rows a warpgroup against a whole tile, by products of warpgroups (ptx/warpgroup.cuh). Queries
// and keys come from shared memory, weights from registers, values from shared memory again; products run while the warpgroup goes
// on, so that the softmax of one tile hides under them. Warp w holds rows 16 w to 16 w + 15 of the block as a WarpTile does, and of
// every token: one part a row. Where values are the first dims of keys (a latent tile), both warpgroups have the same 64 rows: each
// makes the scores and weights of half a tile's tokens, or of every other tile, takes the other's weights, and sums half the values'
// dims, which one could not hold: O is 128 of its registers.
#pragma once

#include <cstdint>

#include "backends/cuda/kernel/cta_memory.cuh"
#include "backends/cuda/kernel/load/lacking_pages.cuh"
#include "backends/cuda/kernel/load/stage_columns.cuh"
#include "backends/cuda/kernel/row_block.cuh"
#include "backends/cuda/kernel/staged_queries.cuh"
#include "backends/cuda/kernel/tile/fragment.cuh"
#include "backends/cuda/kernel/tile/fused_weights.cuh"
#include "backends/cuda/kernel/tile/half_queries.cuh"
#include "backends/cuda/kernel/tile/lane_rows.cuh"
#include "backends/cuda/kernel/tile/lane_rules.cuh"
#include "backends/cuda/kernel/tile/product_lane.cuh"
#include "backends/cuda/kernel/tile/score_rules.cuh"
#include "backends/cuda/kernel/tile/staged_tile.cuh"
#include "backends/cuda/ptx/mma.cuh"
#include "backends/cuda/ptx/shared.cuh"
#include "backends/cuda/ptx/special_registers.cuh"
#include "backends/cuda/ptx/warp.cuh"
#include "backends/cuda/ptx/warpgroup.cuh"
#include "backends/cuda/wide_layout.hpp"
#include "problem/kv_scales.hpp"
#include "problem/pages.hpp"
#include "softmax/state.hpp"
#include "tile/score_rules.hpp"

namespace lean::cuda {

template <KernelConfig kConfig>
class WideTile : ProductLane {
 public:
  static constexpr std::int32_t kDims = kConfig.head_dim;
  /// Both warpgroups make scores of a tile, each of half its tokens.
  static constexpr bool kHalves = kConfig.latent() && !kConfig.in_turns();
  /// Of a tile, those whose scores a warpgroup makes.
  static constexpr std::int32_t kOwnTokens = kConfig.tile_tokens / (kHalves ? 2 : 1);
  static constexpr int kScoreColumns = kOwnTokens / kAccumulatorDims;
  static constexpr int kHalfScores = 2 * kScoreColumns;  // of a lane's: rules are applied to as many at a time
  static constexpr int kOwnRuns = kOwnTokens / kMmaTokens;
  static constexpr std::int32_t kOwnDims = kConfig.summed_dims() / kConfig.value_warps();  // of the values, a warpgroup's
  static constexpr int kColumns = kOwnDims / kAccumulatorDims;
  static constexpr std::int32_t kGroupRows = kMmaRows * 4;  // of a warpgroup
  static_assert(kConfig.column_bytes() == wide::kColumnBytes && kMmaDims * kQueryBytes == wide::kStepBytes);

  __device__ __forceinline__ explicit WideTile(const DeviceCall& call) : call_(call) {}

  /// Empties (O, m, l) for a row block whose queries are staged at `queries`.
  __device__ __forceinline__ void begin(const SegmentRecord& record, std::uint32_t queries) {
    queries_ = queries + static_cast<std::uint32_t>(kConfig.latent() ? 0 : warp() / 4 * kGroupRows * kConfig.column_bytes());
    lane_rows_.begin(call_, record, [this](int half) { return row_of(half); });
    rules_.begin(call_, record, [this](int half) { return row_of(half); });
    if constexpr (kConfig.scaled()) {
      lane_rows_.scale[0] = lane_rows_.scale[1] = call_.tile.log2_scale * k_scale_of(call_.problem, record.kv_head);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      first_[half] = record.first_seen;
      if (call_.shape.reach.left >= 0 && record.lengths.q_tokens > 1) {
        const std::int32_t token = query_of<kConfig>(call_, record, row_of(half)).token;
        first_[half] = visible_span(record.lengths, token, token, call_.shape.reach).begin;
      }
      sum_[half] = 0.0F;
    }
    last_first_ = __reduce_max_sync(ptx::kAllLanes, max(first_[0], first_[1]));
#pragma unroll
    for (auto& run : p_) run[0] = run[1] = run[2] = run[3] = 0;
    clear();
  }

  /// Makes fp16 of bf16 queries where they lie, a row by four lanes, of the warpgroup's rows, or of a latent tile's, which both have, of
  /// half of them; publish_to_products() has to follow, and take_query_scales().
  __device__ __forceinline__ void convert_queries(CtaShared<kConfig>& shared) const {
    const std::int32_t first = kConfig.latent() ? warp() / 4 : 0;
    const std::int32_t end = kConfig.latent() ? first + 1 : 2;
#pragma unroll 1
    for (std::int32_t half = first; half < end; ++half) {
      const std::int32_t row = row_of(half);
      const float down = queries_to_half<kConfig>(queries_, row % kGroupRows);
      if (in_quad() == 0) ptx::store_shared_word(ptx::shared_address(&shared.wide.query_scale[row]), __float_as_uint(down));
    }
  }
  __device__ __forceinline__ void take_query_scales(const CtaShared<kConfig>& shared) {
#pragma unroll
    for (int half = 0; half < 2; ++half) lane_rows_.scale[half] *= ptx::load_shared_float(shared.wide.query_scale[row_of(half)]);
  }

  /// Empties O. No products run.
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (auto& column : o_) column[0] = column[1] = column[2] = column[3] = 0.0F;
  }

  /// What products are told of the queries, of a stage that holds K, and of one that holds V, or K of which the first columns are V.
  [[nodiscard]] __device__ __forceinline__ std::uint64_t queries_at() const { return ptx::factor_at(queries_, 16); }
  [[nodiscard]] __device__ __forceinline__ static std::uint64_t keys_at(std::uint32_t stage) {
    return ptx::factor_at(stage + static_cast<std::uint32_t>(first_token() * kConfig.column_bytes()), 16);
  }
  [[nodiscard]] __device__ __forceinline__ static std::uint64_t values_at(std::uint32_t stage, std::int32_t token = 0) {
    return ptx::factor_at(stage + wide::value_place(first_dim(), column_stage_bytes<kConfig>) +
                              static_cast<std::uint32_t>(token * kConfig.column_bytes()),
                          column_stage_bytes<kConfig>);
  }

  /// Asks for S = Q K^T, or for what some columns of Q and K add to it, from the first on.
  template <int kFirstColumn = 0, int kEndColumn = kConfig.columns()>
  __device__ __forceinline__ void ask_for_scores(std::uint64_t queries, std::uint64_t keys) {
    ptx::pin_registers(s_);
    ptx::begin_products();
#pragma unroll
    for (int step = kFirstColumn * wide::kSteps; step < min(kEndColumn * wide::kSteps, kDims / kMmaDims); ++step) {
      const std::uint64_t q = wide::further(queries, wide::step_place(kConfig.q_rows, step));
      const std::uint64_t k = wide::further(keys, wide::step_place(kConfig.tile_tokens, step));
      ptx::multiply_rows<kConfig.dtype, kScoreColumns>(s_, q, k, step != 0);
    }
    ptx::end_products();
  }

  /// Asks for O += P V.
  __device__ __forceinline__ void ask_for_output(std::uint64_t values) {
    ptx::pin_registers(o_);
    ptx::begin_products();
#pragma unroll
    for (int run = 0; run < kConfig.tile_tokens / kMmaTokens; ++run) {
      ptx::multiply_columns<kConfig.dtype, kColumns>(o_, p_[run], wide::further(values, wide::run_place(run)), true);
    }
    ptx::end_products();
  }

  /// Of a latent tile: asks for O += P V of the tokens whose weights the warpgroup made, then of those whose weights the other has
  /// given (take_others()).
  __device__ __forceinline__ void ask_for_own_output(std::uint32_t stage) {
    const std::uint64_t values = values_at(stage, first_token());
    ptx::pin_registers(o_);
    ptx::begin_products();
    multiply_runs<0>(values);
  }
  __device__ __forceinline__ void ask_for_others_output(std::uint32_t stage) {
    const std::uint64_t values = values_at(stage, kOwnTokens - first_token());
    ptx::begin_products();
    multiply_runs<kOwnRuns>(values);
  }

  /// Gives the other warpgroup the weights of this one's tokens and takes the other's (passed_at()). `stores`: not in a rehearsal, in
  /// which the place is the producers'.
  __device__ __forceinline__ void take_others(std::uint32_t stage, bool stores) {
    const std::uint32_t place = passed_at(stage);
    const std::uint32_t own = static_cast<std::uint32_t>(warp() / 4) * kOwnRuns * kPassedRunBytes;
    const std::uint32_t others = kOwnRuns * kPassedRunBytes - own;
    store_weights(place + own, stores);
    ptx::named_barrier(kWeightsBarrier + 1, kConfig.consumer_threads());
    load_weights<kOwnRuns>(place + others);
    if constexpr (!kConfig.converts()) ptx::fence_before_copies();  // of the next keys to that place
  }

  /// Of a latent tile whose weights this warpgroup made: gives them to the other (passed_at()), with what they refer to. The thread has
  /// to fence before the stage is freed. `gives`: not in a rehearsal, in which the place is the producers' and nobody takes.
  __device__ __forceinline__ void give_weights(CtaShared<kConfig>& shared, std::uint32_t stage, bool gives) {
    const std::int32_t group = warp() / 4;
    store_weights(passed_at(stage), gives);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (in_quad() == 0) {
        ptx::store_shared_word(ptx::shared_address(&shared.wide.kept[group][row_of(half)]), __float_as_uint(lane_rows_.max[half]));
      }
    }
    if (gives) ptx::named_barrier_arrive(kWeightsBarrier + static_cast<std::uint32_t>(group), kConfig.consumer_threads());
  }

  /// Of a latent tile whose weights the other warpgroup makes: waits for them, takes them, and has sums and O refer to what they do. No
  /// products run.
  __device__ __forceinline__ void take_given_weights(CtaShared<kConfig>& shared, std::uint32_t stage) {
    const std::int32_t giver = 1 - warp() / 4;
    ptx::named_barrier(kWeightsBarrier + static_cast<std::uint32_t>(giver), kConfig.consumer_threads());
    float max[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) max[half] = ptx::load_shared_float(shared.wide.kept[giver][row_of(half)]);
    load_weights<0>(passed_at(stage));
    rescales_ = __any_sync(ptx::kAllLanes, max[0] != lane_rows_.max[0] || max[1] != lane_rows_.max[1]) != 0;
    if (rescales_) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        factor_[half] = lane_rows_.refer_to(max[half], half);
        sum_[half] *= factor_[half];
      }
    }
    rescale();
  }

  /// Until the scores are there; `asked_after`: groups of products asked for after them.
  template <int kAskedAfter>
  __device__ __forceinline__ void await_scores() {
    ptx::await_products<kAskedAfter>();
    ptx::pin_registers(s_);
  }
  __device__ __forceinline__ void await_output() {
    ptx::await_products<0>();
    ptx::pin_registers(o_);
  }

  /// Whether scores of a tile are anything else than its products: all of it is looked at, so that there are no branches between products.
  [[nodiscard]] __device__ __forceinline__ bool has_rules(const CtaShared<kConfig>& shared, const SegmentRecord& record,
                                                          StagedTile tile) const {
    return is_capped() | !scales_up() | has_unseen(tile) | has_lacking_pages(shared, record) | has_lane_rules(record, tile);
  }

  /// Of a ruled variant: whether a mask or a tree mask may hide tokens of a tile from all of the block's rows, whose values have to be
  /// cleared (clear_unseen()). The same for all threads.
  [[nodiscard]] __device__ __forceinline__ bool hides_values(const SegmentRecord& record, StagedTile tile) const {
    return kConfig.ruled() && call_.tile.hides_values && has_lane_rules(record, tile);
  }

  /// Whether any of the block's rows sees a token of the tile that all of them have applied rules to.
  [[nodiscard]] __device__ __forceinline__ static bool is_seen(const CtaShared<kConfig>& shared, std::int32_t token) {
    const std::int32_t bit = token / kAccumulatorDims * 2 + token % 2;
    std::uint32_t sees = 0;
#pragma unroll
    for (int w = 0; w < kConfig.consumer_warps; ++w) {
      sees |= ptx::load_shared_word(ptx::shared_address(&shared.wide.seen[w][token % kAccumulatorDims / 2]));
    }
    return (sees >> bit & 1U) != 0;
  }

  /// What scores become weights by: a row's scale, which all rows have but those of queries that were converted (of_row()), and shift.
  struct Weighing {
    float scale[2];
    float shift[2];
  };

  /// Finds out what a tile's weights refer to, for all of whose scores make_weights() follows, and rescale() once no products run: O is
  /// left as it is, which they may be adding to.
  [[nodiscard]] __device__ __forceinline__ Weighing update_softmax(CtaShared<kConfig>& shared, const SegmentRecord& record,
                                                                   StagedTile tile, bool has_rules) {
    float scale[2] = {lane_rows_.score_scale(call_, 0), lane_rows_.score_scale(call_, 1)};
    if (has_rules) {
      if constexpr (kConfig.ruled()) {  // others' bits must not depend on a page that happens to be known to be lacking
        if (has_lane_rules(record, tile)) {
          apply_rules(record, tile, scale);
          scale[0] = scale[1] = 1.0F;
        }
      } else if (is_capped()) {
        cap_scores(scale);
        scale[0] = scale[1] = 1.0F;
      } else if (!scales_up()) {
        scale_scores(scale);
        scale[0] = scale[1] = 1.0F;
      }
      if (has_lacking_pages(shared, record)) hide_lacking_pages(record, tile);
      if (has_unseen(tile)) hide_unseen(tile);
      if (hides_values(record, tile)) say_seen(shared);
    }
    if constexpr (kHalves) {  // both warpgroups' rows are the same: all of them go on once all have their scores
      rescales_ = ptx::named_barrier_any(kWeightsBarrier, kConfig.consumer_threads(), may_outgrow(scale));
    } else {
      rescales_ = __any_sync(ptx::kAllLanes, may_outgrow(scale)) != 0;
    }
    if (rescales_) {
      float largest[2] = {softmax::kNegInf, softmax::kNegInf};  // of this lane's
#pragma unroll
      for (int j = 0; j < 4 * kScoreColumns; ++j) largest[j % 4 / 2] = fmaxf(largest[j % 4 / 2], score(j));
      largest[0] *= scale[0];
      largest[1] *= scale[of_row(1)];
      if constexpr (kHalves) {
        exchange_rows(shared, largest, [](float own, float others) { return fmaxf(own, others); });
      } else {
        rescales_ = lane_rows_.any_outgrows(largest);
      }
      if (rescales_) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          factor_[half] = lane_rows_.template grow<1, kHalves ? 1 : 4>(largest, half);
          sum_[half] *= factor_[half];
        }
      }
      settle_far_rows(scale);
    }
    return {{scale[0], scale[1]}, {-fused_shift(lane_rows_.max[0]), -fused_shift(lane_rows_.max[1])}};
  }

  /// Scores of so many columns of tokens, from one on, become weights, which are summed up unless sum_weights() is to follow.
  template <int kFirst, int kCount, bool kSums = true>
  __device__ __forceinline__ void make_weights(const Weighing& weighing) {
    float scale[2] = {weighing.scale[0], weighing.scale[1]};
#pragma unroll
    for (int j = 4 * kFirst; j < 4 * (kFirst + kCount); ++j) {
      // A weight is not negative, so that this changes nothing; but what comes after it waits, and exponentials begin before all
      // that they are taken of is there.
      if (j % 16 == 0 && j > 4 * kFirst) scale[0] = fmaxf(scale[0], -score(j - 16));
      score(j) = ptx::exp2_approx(fmaf(score(j), scale[of_row(j % 4 / 2)], weighing.shift[j % 4 / 2]));
      if (kSums) sum_[j % 4 / 2] += score(j);
    }
  }
  /// Adds a tile's weights up.
  __device__ __forceinline__ void sum_weights() {
#pragma unroll
    for (int j = 0; j < 4 * kScoreColumns; ++j) sum_[j % 4 / 2] += score(j);
  }

  /// Has weights made before what is awaited next, since their sums might be stored; to no other end.
  __device__ __forceinline__ void keep_ahead(CtaShared<kConfig>& shared) {
    const std::uint32_t place = ptx::shared_address(&shared.wide.kept[0][0]);
    ptx::store_shared_below_zero(place, sum_[0]);
    ptx::store_shared_below_zero(place, sum_[1]);
  }

  /// Has O refer to what weights do. No products run.
  __device__ __forceinline__ void rescale() {
    if (!rescales_) return;
#pragma unroll
    for (auto& column : o_) {
#pragma unroll
      for (int i = 0; i < 4; ++i) column[i] *= factor_[i / 2];
    }
  }

  /// Takes the weights for the next product P V. No products run.
  __device__ __forceinline__ void take_weights() {
#pragma unroll
    for (int run = 0; run < kOwnRuns; ++run) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        constexpr auto kPair = wide::operand_pair;
        const float* const pair = &s_[kPair(run, i) / 4][kPair(run, i) % 4];
        p_[run][i] = ptx::pack<kConfig.dtype>(pair[0], pair[1]);
      }
    }
  }

  /// Adds up l over the lanes of a row, and empties what empty rows hold: after the segment's last tile. No products run.
  __device__ __forceinline__ void finish(CtaShared<kConfig>& shared) {
    if constexpr (kConfig.latent()) {
      consumer_sync<kConfig>();  // all have read what is there
      exchange_rows(shared, sum_, [](float own, float others) { return own + others; });
    } else {
#pragma unroll
      for (float& l : sum_) {
        l += __shfl_xor_sync(ptx::kAllLanes, l, 1);
        l += __shfl_xor_sync(ptx::kAllLanes, l, 2);
      }
    }
    clear_empty_rows();
  }

  /// Rows of the block that this lane holds: half 0 and 1.
  [[nodiscard]] __device__ __forceinline__ static std::int32_t row_of(int half) {
    const auto thread = static_cast<std::int32_t>(ptx::thread_index());
    return wide::accumulator_place(kConfig.latent() ? thread % ptx::kWarpgroupThreads : thread, 2 * half).row;
  }
  /// What became of such a row: its state, and what this lane has of every 8 dims of O, two from dim_of(column) on.
  [[nodiscard]] __device__ __forceinline__ softmax::State state(int half) const { return {lane_rows_.max[half], sum_[half]}; }
  [[nodiscard]] __device__ __forceinline__ float2 pair(int column, int half) const {
    return {o_[column][2 * half], o_[column][2 * half + 1]};
  }
  [[nodiscard]] __device__ __forceinline__ static std::int32_t dim_of(int column) {
    return first_dim() + wide::accumulator_place(lane(), 4 * column).column;
  }
  /// Of the lanes of a row one leads.
  [[nodiscard]] __device__ __forceinline__ static bool leads_row() { return in_quad() == 0 && first_dim() == 0; }

 private:
  /// Empties the O of rows that see no token of the segment: it is 0 x V of tokens that other rows of the block see, which may hold
  /// NaN. Where all rows see something, as nearly always, this is a vote. (Tiles of fewer rows leave such parts out of their warps'
  /// merge: kernel/fixup/parts.cuh.)
  __device__ __forceinline__ void clear_empty_rows() {
    if (__any_sync(ptx::kAllLanes, sum_[0] == 0.0F || sum_[1] == 0.0F) == 0) return;
#pragma unroll
    for (auto& column : o_) {
#pragma unroll
      for (int i = 0; i < 4; ++i) column[i] = sum_[i / 2] == 0.0F ? 0.0F : column[i];
    }
  }

  /// Asks for O += P V of so many runs of 16 tokens, from one of the weights' on; `values`: where these begin.
  template <int kFirst>
  __device__ __forceinline__ void multiply_runs(std::uint64_t values) {
#pragma unroll
    for (int run = 0; run < kOwnRuns; ++run) {
      ptx::multiply_columns<kConfig.dtype, kColumns>(o_, p_[kFirst + run], wide::further(values, wide::run_place(run)), true);
    }
    ptx::end_products();
  }

  /// What a lane's rows have of a number, over all their lanes of both warpgroups of a latent tile, who have the same result. Nobody
  /// comes by again before all have read: there is another barrier in between, in turns the first of the next finish().
  template <typename TCombine>
  __device__ __forceinline__ void exchange_rows(CtaShared<kConfig>& shared, float (&x)[2], const TCombine& combine) {
    constexpr std::int32_t kFirst = kConfig.in_turns() ? 2 : 0;
    const std::int32_t place = kFirst + warp() / 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      x[half] = combine(x[half], __shfl_xor_sync(ptx::kAllLanes, x[half], 1));
      x[half] = combine(x[half], __shfl_xor_sync(ptx::kAllLanes, x[half], 2));
      if (in_quad() == 0)
        ptx::store_shared_word(ptx::shared_address(&shared.wide.kept[place][row_of(half)]), __float_as_uint(x[half]));
    }
    consumer_sync<kConfig>();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      x[half] = combine(ptx::load_shared_float(shared.wide.kept[kFirst][row_of(half)]),
                        ptx::load_shared_float(shared.wide.kept[kFirst + 1][row_of(half)]));
    }
  }
  static constexpr std::uint32_t kPassedRunBytes = ptx::kWarpgroupThreads * kPieceBytes;
  /// Where in a latent stage weights pass between the threads of the same number of both warpgroups, which hold the same rows,
  /// kPassedRunBytes from run to run: in its last column of keys, which no value lies in, and no product reads once scores are there.
  [[nodiscard]] __device__ __forceinline__ static std::uint32_t passed_at(std::uint32_t stage) {
    static_assert(kConfig.tile_tokens / kMmaTokens * kPassedRunBytes == column_stage_bytes<kConfig>);
    return stage + wide::value_place(kConfig.summed_dims(), column_stage_bytes<kConfig>) +
           ptx::thread_index() % ptx::kWarpgroupThreads * kPieceBytes;
  }
  /// The weights that this warpgroup made.
  __device__ __forceinline__ void store_weights(std::uint32_t place, bool stores) const {
#pragma unroll
    for (int run = 0; run < kOwnRuns; ++run) {
      if (stores) ptx::store_shared(place + run * kPassedRunBytes, {p_[run][0], p_[run][1], p_[run][2], p_[run][3]});
    }
  }
  /// As many of the other's, from one run of the weights' on.
  template <int kFirst>
  __device__ __forceinline__ void load_weights(std::uint32_t place) {
#pragma unroll
    for (int run = 0; run < kOwnRuns; ++run) {
      const uint4 weights = ptx::load_shared_16(place + run * kPassedRunBytes);
      p_[kFirst + run][0] = weights.x;
      p_[kFirst + run][1] = weights.y;
      p_[kFirst + run][2] = weights.z;
      p_[kFirst + run][3] = weights.w;
    }
  }

  /// Of the values, the first of this warpgroup's.
  [[nodiscard]] __device__ __forceinline__ static std::int32_t first_dim() { return kConfig.latent() ? warp() / 4 * kOwnDims : 0; }
  /// Of a tile, the first whose scores this warpgroup makes.
  [[nodiscard]] __device__ __forceinline__ static std::int32_t first_token() { return kHalves ? warp() / 4 * kOwnTokens : 0; }
  /// The lane's scores of a tile: of every 8 tokens two of row_of(0), then the same two of row_of(1).
  [[nodiscard]] __device__ __forceinline__ float& score(int j) { return s_[j / 4][j % 4]; }
  /// Tokens from the lane's first to that of a score.
  [[nodiscard]] static constexpr std::int32_t token_of(int j) { return j / 4 * kAccumulatorDims + j % 2; }

  [[nodiscard]] __device__ __forceinline__ bool is_capped() const { return call_.problem.scores.softcap > 0.0F; }
  /// Products are ordered as scores are. The host sees to that, but for the keys' scale, which is in the device's memory.
  [[nodiscard]] __device__ __forceinline__ bool scales_up() const {
    return !kConfig.scaled() || (lane_rows_.score_scale(call_, 0) > 0.0F && lane_rows_.score_scale(call_, 1) > 0.0F);
  }
  /// Which of two scales a lane's row has: one register serves where both have the same.
  [[nodiscard]] static constexpr int of_row(int half) { return kConfig.scaled() ? half : 0; }
  [[nodiscard]] __device__ __forceinline__ bool has_unseen(StagedTile tile) const {
    // In 32 bits: 31 need not count the tile's last places, behind the last token.
    const std::uint32_t end = static_cast<std::uint32_t>(tile.token) + kConfig.tile_tokens;
    return (end > static_cast<std::uint32_t>(min(lane_rows_.first_limit, tile.end()))) | (tile.token < last_first_);
  }
  /// A rehearsed segment has no rows, and no page ids.
  [[nodiscard]] __device__ __forceinline__ bool has_lacking_pages(const CtaShared<kConfig>& shared,
                                                                  const SegmentRecord& record) const {
    return is_paged(call_.problem.pages) & lacks_pages(shared) & (record.rows > 0);
  }

  /// Whether a score of this lane's may be too far above what its row's weights refer to. Numbers that are not negative are ordered as
  /// their bits are, of which one instruction takes the largest of three; 0 stands for all that are, and NaN is larger than any.
  [[nodiscard]] __device__ __forceinline__ bool may_outgrow(const float (&scale)[2]) {
    float largest[4] = {0.0F, 0.0F, 0.0F, 0.0F};
#pragma unroll
    for (int j = 0; j < 4 * kScoreColumns; j += 8) {
#pragma unroll
      for (int i = 0; i < 4; ++i) largest[i] = ptx::largest_by_bits(largest[i], score(j + i), score(j + 4 + i));
    }
    const float rows[2] = {ptx::largest_by_bits(largest[0], largest[1], 0.0F) * scale[0],
                           ptx::largest_by_bits(largest[2], largest[3], 0.0F) * scale[of_row(1)]};
    return !(rows[0] <= fused_limit(lane_rows_.max[0])) || !(rows[1] <= fused_limit(lane_rows_.max[1]));
  }

  /// Settles the scores of rows that are far (fused_weights.cuh).
  __device__ __forceinline__ void settle_far_rows(const float (&scale)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float max = lane_rows_.max[half];
      if (!settles(max)) continue;
#pragma unroll
      for (int j = 0; j < 4 * kScoreColumns; ++j) {
        if (j % 4 / 2 == half) score(j) = settled(score(j), scale[of_row(half)], max);
      }
    }
  }

  /// Scores scaled and capped, in the log2 domain.
  __device__ __forceinline__ void cap_scores(const float (&scale)[2]) {
    const float cap = tile::log2_cap(call_.problem.scores);
#pragma unroll
    for (int j = 0; j < 4 * kScoreColumns; ++j) score(j) = softmax::soft_cap(score(j) * scale[of_row(j % 4 / 2)], cap);
  }

  /// Scores scaled, in the log2 domain.
  __device__ __forceinline__ void scale_scores(const float (&scale)[2]) {
#pragma unroll
    for (int j = 0; j < 4 * kScoreColumns; ++j) score(j) *= scale[of_row(j % 4 / 2)];
  }

  /// What a row does not see, and what lies behind the tile.
  __device__ __forceinline__ void hide_unseen(StagedTile tile) {
    const std::int32_t own = tile.token + first_token() + 2 * in_quad();
    const std::int32_t limit[2] = {min(lane_rows_.limit[0], tile.end()) - own, min(lane_rows_.limit[1], tile.end()) - own};
    const std::int32_t first[2] = {first_[0] - own, first_[1] - own};
#pragma unroll
    for (int j = 0; j < 4 * kScoreColumns; ++j) {
      if (token_of(j) >= limit[j % 4 / 2] || token_of(j) < first[j % 4 / 2]) score(j) = softmax::kNegInf;
    }
  }

  /// Whether a tile has rules that a ruled variant alone has: of a tree mask the last tiles, which hold drafts. Not a rehearsed one.
  [[nodiscard]] __device__ __forceinline__ bool has_lane_rules(const SegmentRecord& record, StagedTile tile) const {
    if constexpr (!kConfig.ruled()) return false;
    return tile_has_rules(call_, record, tile.token, kConfig.tile_tokens) && record.rows > 0;
  }

  /// Applies them, half of the lane's scores at a time.
  __device__ __forceinline__ void apply_rules(const SegmentRecord& record, StagedTile tile, const float (&scale)[2]) {
    const auto own = static_cast<std::uint32_t>(tile.token + 2 * in_quad());
    const bool within_reach = !has_unseen(tile);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      rules_.template apply<kHalfScores>(
          call_, record, static_cast<std::uint32_t>(tile.end()), lane_rows_.limit, within_reach, scale,
          [&](int j) -> float& { return score(half * kHalfScores + j); }, [](int j) { return j % 4 / 2; },
          own + static_cast<std::uint32_t>(token_of(half * kHalfScores)), [](int j) { return token_of(j); });
    }
  }

  /// Says which tokens any of the warp's rows sees: once all that is hidden is -inf. Bits of a lane's tokens, of every 8 two.
  __device__ __forceinline__ void say_seen(CtaShared<kConfig>& shared) const {
    static_assert(!kConfig.ruled() || 2 * kScoreColumns <= 32);
    std::uint32_t sees = 0;
#pragma unroll
    for (int bit = 0; bit < 2 * kScoreColumns; ++bit) {
      const auto& of_rows = s_[bit / 2];
      sees |= static_cast<std::uint32_t>(fmaxf(of_rows[bit % 2], of_rows[bit % 2 + 2]) != softmax::kNegInf) << bit;
    }
#pragma unroll
    for (int lanes = 4; lanes < kWarpThreads; lanes *= 2) sees |= __shfl_xor_sync(ptx::kAllLanes, sees, lanes);
    if (lane() < 4) ptx::store_shared_word(ptx::shared_address(&shared.wide.seen[warp()][lane()]), sees);
  }

  /// Tokens whose page lies outside the pool count as not there.
  __device__ __forceinline__ void hide_lacking_pages(const SegmentRecord& record, StagedTile tile) {
    const PagedKv& pages = call_.problem.pages;
    const std::int32_t* ids = page_ids(pages, record.lengths, record.sequence);
#pragma unroll
    for (int j = 0; j < 4 * kScoreColumns; ++j) {
      if (j % 4 >= 2) continue;  // a token is that of two scores
      const std::uint32_t key =
          static_cast<std::uint32_t>(tile.token) + static_cast<std::uint32_t>(first_token() + 2 * in_quad() + token_of(j));
      if (key >= static_cast<std::uint32_t>(tile.end())) continue;
      if (in_pool(pages, ids[page_of(call_, static_cast<std::int32_t>(key))])) continue;
      score(j) = score(j + 2) = softmax::kNegInf;
    }
  }

  const DeviceCall& call_;
  std::uint32_t queries_ = 0;  // of this warpgroup
  LaneRows<kConfig> lane_rows_;
  [[no_unique_address]] LaneRules<kConfig> rules_;
  std::int32_t first_[2];    // tokens before it are not seen
  std::int32_t last_first_;  // the largest of all the warp's rows
  bool rescales_ = false;    // by these, O:
  float factor_[2];
  float sum_[2];
  float s_[kScoreColumns][4];
  float o_[kColumns][4];
  std::uint32_t p_[kConfig.tile_tokens / kMmaTokens][4];
};

}  // namespace lean::cuda
