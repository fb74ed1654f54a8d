// LeanTile() of few rows of a latent call, with the factors of its products swapped ("swap AB"): a product of a warpgroup has 64 rows,
// so these are tokens of S^T = K Q^T and dims of O^T = V^T P^T, and the 16 or 32 query rows of a block are columns, of which none is
// multiplied for nothing. A warpgroup holds all of O^T so, in 64 or 128 registers, and nothing passes between warpgroups. Weights go to
// the second product by way of shared memory, where they lie as queries do. Of a tile warp w has tokens 16 w to 16 w + 15, of every 64
// dims of O as many, and all rows: a lane two neighbours of every 8.
#pragma once

#include <cstdint>

#include "backends/cuda/kernel/cta_memory.cuh"
#include "backends/cuda/kernel/load/lacking_pages.cuh"
#include "backends/cuda/kernel/load/stage_columns.cuh"
#include "backends/cuda/kernel/row_block.cuh"
#include "backends/cuda/kernel/staged_queries.cuh"
#include "backends/cuda/kernel/tile/fused_weights.cuh"
#include "backends/cuda/kernel/tile/half_queries.cuh"
#include "backends/cuda/kernel/tile/lane_rows.cuh"
#include "backends/cuda/kernel/tile/product_lane.cuh"
#include "backends/cuda/kernel/tile/staged_tile.cuh"
#include "backends/cuda/ptx/barrier.cuh"
#include "backends/cuda/ptx/copy.cuh"
#include "backends/cuda/ptx/mma.cuh"
#include "backends/cuda/ptx/shared.cuh"
#include "backends/cuda/ptx/special_registers.cuh"
#include "backends/cuda/ptx/warp.cuh"
#include "backends/cuda/ptx/warpgroup.cuh"
#include "backends/cuda/wide_layout.hpp"
#include "problem/kv_scales.hpp"
#include "problem/pages.hpp"
#include "softmax/state.hpp"

namespace lean::cuda {

template <KernelConfig kConfig>
class SwappedTile : ProductLane {
 public:
  static constexpr std::int32_t kProductRows = kMmaRows * 4;            // of a warpgroup: tokens, or dims
  static constexpr int kColumns = kConfig.q_rows / kAccumulatorDims;    // of a product, 8 query rows each
  static constexpr int kOwnRows = 2 * kColumns;                         // query rows that a lane has
  static constexpr int kBlocks = kConfig.summed_dims() / kProductRows;  // of O's dims
  static constexpr std::int32_t kBlockDims = kProductRows;
  static_assert(kConfig.tile_tokens == kProductRows && kConfig.consumer_threads() == ptx::kWarpgroupThreads);
  static_assert(kBlocks * kProductRows == kConfig.summed_dims() && kColumns % 2 == 0);
  static_assert(kConfig.column_bytes() == wide::kColumnBytes && kProductRows * kQueryBytes == wide::kColumnBytes);

  __device__ __forceinline__ explicit SwappedTile(const DeviceCall& call)
      : call_(call), memory_(cta_memory<kConfig>()), weights_(ptx::shared_address(memory_.exchange)) {}

  /// Empties (O, m, l) for a row block whose queries are staged at `queries`.
  __device__ __forceinline__ void begin(const SegmentRecord& record, std::uint32_t queries) {
    queries_ = queries;
    std::int32_t nearest = record.lengths.kv_end;
    std::int32_t farthest = record.first_seen;
#pragma unroll
    for (int i = 0; i < kOwnRows; ++i) {
      limit_[i] = record.lengths.kv_end;
      first_[i] = record.first_seen;
      if (record.lengths.q_tokens > 1) {
        const std::int32_t token = query_of<kConfig>(call_, record, row_of(i)).token;
        const KeySpan span = visible_span(record.lengths, token, token, call_.shape.reach);
        limit_[i] = span.end;
        if (call_.shape.reach.left >= 0) first_[i] = span.begin;
      }
      nearest = min(nearest, limit_[i]);
      farthest = max(farthest, first_[i]);
      max_[i] = softmax::kNegInf;
      weigh_by(i);
      sum_[i] = 0.0F;
      if constexpr (kConfig.scaled()) scale_[i] = call_.tile.log2_scale * k_scale_of(call_.problem, record.kv_head);
    }
    first_limit_ = __reduce_min_sync(ptx::kAllLanes, nearest);
    last_first_ = __reduce_max_sync(ptx::kAllLanes, farthest);
#pragma unroll
    for (auto& block : o_) {
#pragma unroll
      for (auto& column : block) column[0] = column[1] = column[2] = column[3] = 0.0F;
    }
  }

  /// Makes fp16 of bf16 queries where they lie, a row by four lanes; publish_to_products() has to follow, and take_query_scales().
  __device__ __forceinline__ void convert_queries(CtaShared<kConfig>& shared) const {
    const std::int32_t row = static_cast<std::int32_t>(ptx::thread_index()) / 4;
    static_assert(kConfig.q_rows % (kWarpThreads / 4) == 0);
    if (row >= kConfig.q_rows) return;  // whole warps
    const float down = queries_to_half<kConfig>(queries_, row);
    if (in_quad() == 0) ptx::store_shared_word(ptx::shared_address(&shared.wide.query_scale[row]), __float_as_uint(down));
  }
  __device__ __forceinline__ void take_query_scales(const CtaShared<kConfig>& shared) {
#pragma unroll
    for (int i = 0; i < kOwnRows; ++i) scale_[i] *= ptx::load_shared_float(shared.wide.query_scale[row_of(i)]);
  }

  /// What products are told of the queries, and of what begins a stage.
  [[nodiscard]] __device__ __forceinline__ std::uint64_t queries_at() const { return ptx::factor_at(queries_, 16); }
  [[nodiscard]] __device__ __forceinline__ static std::uint64_t keys_at(std::uint32_t stage) { return ptx::factor_at(stage, 16); }

  /// Asks for what a part of a stage adds to S^T = K Q^T, the first part first.
  template <int kPart>
  __device__ __forceinline__ void ask_for_scores(std::uint64_t queries, std::uint64_t keys) {
    constexpr int kEnd = min_of(kConfig.part_column(kPart + 1) * wide::kSteps, kConfig.head_dim / kMmaDims);
    ptx::pin_registers(s_);
    ptx::begin_products();
#pragma unroll
    for (int step = kConfig.part_column(kPart) * wide::kSteps; step < kEnd; ++step) {
      ptx::multiply_rows<kConfig.dtype, kColumns>(s_, wide::further(keys, wide::step_place(kConfig.tile_tokens, step)),
                                                  wide::further(queries, wide::step_place(kConfig.q_rows, step)), step != 0);
    }
    ptx::end_products();
  }
  __device__ __forceinline__ void await_scores() {
    ptx::await_products<0>();
    ptx::pin_registers(s_);
  }

  /// Makes weights of a tile's scores, and puts them where products find them: of one tile where those of the tile before last were.
  /// They refer to what those before did; all find out together whether some score is too large for that, which is nearly never, and
  /// make them anew then.
  __device__ __forceinline__ void make_weights(const SegmentRecord& record, StagedTile tile) {
    place_ ^= kPlaceBytes;
    bool scales = true;
    if (has_rules(record, tile)) scales = !apply_rules(record, tile);
    float weights[kColumns][4];
    if (ptx::named_barrier_any(kGroupBarrier, ptx::kWarpgroupThreads, put_weights(weights, scales))) {
      refer_anew(scales);
      put_weights(weights, scales);
      ptx::named_barrier(kGroupBarrier, ptx::kWarpgroupThreads);
    }
#pragma unroll
    for (int i = 0; i < kOwnRows; ++i) sum_[i] += weights[i / 2][i % 2] + weights[i / 2][i % 2 + 2];
  }

  /// Asks for what a part of a stage adds to O^T += V^T P^T.
  template <int kPart>
  __device__ __forceinline__ void ask_for_output(std::uint64_t keys) {
    const std::uint64_t weights = ptx::factor_at(weights_ + place_, 16);
    constexpr int kEnd = min_of(kConfig.part_column(kPart + 1), kBlocks);
    ptx::begin_products();
#pragma unroll
    for (int run = 0; run < kConfig.tile_tokens / kMmaTokens; ++run) {
#pragma unroll
      for (int block = kConfig.part_column(kPart); block < kEnd; ++block) {
        const std::uint64_t values = wide::further(keys, wide::value_place(block * kBlockDims, column_stage_bytes<kConfig>));
        ptx::multiply_transposed<kConfig.dtype, kColumns>(o_[block], wide::further(values, wide::run_place(run)),
                                                          wide::further(weights, wide::step_place(kConfig.q_rows, run)), true);
      }
    }
    ptx::end_products();
  }
  /// Nothing of O is moved across this.
  __device__ __forceinline__ void pin_output() {
#pragma unroll
    for (auto& block : o_) ptx::pin_registers(block);
  }

  /// Adds up l over the lanes and warps of a row, tells all of every row's state, and empties what empty rows hold, which is 0 x V of tokens
  /// that other rows of the block see, and may be NaN.
  __device__ __forceinline__ void finish(CtaShared<kConfig>& shared) {
    ptx::named_barrier(kGroupBarrier, ptx::kWarpgroupThreads);  // all have read what is there of the segment before
#pragma unroll
    for (int i = 0; i < kOwnRows; ++i) {
#pragma unroll
      for (int lanes = 4; lanes < kWarpThreads; lanes *= 2) sum_[i] += __shfl_xor_sync(ptx::kAllLanes, sum_[i], lanes);
      if (quad() != 0) continue;
      keep(shared.wide.kept[warp()][row_of(i)], sum_[i]);
      if (warp() == 0) keep(shared.wide.kept[kMaxima][row_of(i)], max_[i]);
    }
    ptx::named_barrier(kGroupBarrier, ptx::kWarpgroupThreads);
#pragma unroll
    for (int i = 0; i < kOwnRows; ++i) {
      if (state(row_of(i)).l != 0.0F) continue;
#pragma unroll
      for (auto& block : o_) block[i / 2][i % 2] = block[i / 2][i % 2 + 2] = 0.0F;
    }
  }

  /// What became of a row of the block, once it is finished.
  [[nodiscard]] __device__ __forceinline__ softmax::State state(std::int32_t row) const {
    const auto& kept = memory_.shared.wide.kept;
    const float l = (ptx::load_shared_float(kept[0][row]) + ptx::load_shared_float(kept[1][row])) +
                    (ptx::load_shared_float(kept[2][row]) + ptx::load_shared_float(kept[3][row]));
    return {ptx::load_shared_float(kept[kMaxima][row]), l};
  }
  /// The block's row that is a lane's own, and its element of a block of dims: of dim_of(block, half).
  [[nodiscard]] __device__ __forceinline__ static std::int32_t row_of(int own) {
    return own / 2 * kAccumulatorDims + 2 * in_quad() + own % 2;
  }
  [[nodiscard]] __device__ __forceinline__ static std::int32_t dim_of(int block, int half) {
    return block * kBlockDims + warp() * kMmaRows + quad() + half * (kMmaRows / 2);
  }
  [[nodiscard]] __device__ __forceinline__ float element(int block, int own, int half) const {
    return o_[block][own / 2][own % 2 + 2 * half];
  }

  /// Where a lane puts its warp's share of 64 elements of each row for store_matrices_transposed(), of two columns of a product from one
  /// on; a lane, and no other warp, finds 8 of them again at idle_piece_at(). Not where products may still read.
  [[nodiscard]] __device__ __forceinline__ std::uint32_t idle_share_at(int column) const {
    return share_at(place_ ^ kPlaceBytes, column);
  }
  [[nodiscard]] __device__ __forceinline__ std::uint32_t idle_piece_at(std::int32_t row, std::int32_t half) const {
    return weights_ + (place_ ^ kPlaceBytes) + wide::piece_place(kConfig.q_rows, row, 2 * warp() + half);
  }

 private:
  static constexpr std::uint32_t kPlaceBytes = kConfig.q_rows * wide::kColumnBytes;  // of weights: a column of as many rows
  static constexpr int kMaxima = 4;                                                  // behind the sums of four warps

  /// The token of a tile whose scores a lane has in elements 2 half and + 1 of its columns.
  [[nodiscard]] __device__ __forceinline__ static std::int32_t token_of(int half) {
    return warp() * kMmaRows + quad() + half * (kMmaRows / 2);
  }
  __device__ __forceinline__ static void keep(float& place, float x) {
    ptx::store_shared_word(ptx::shared_address(&place), __float_as_uint(x));
  }

  [[nodiscard]] __device__ __forceinline__ std::uint32_t share_at(std::uint32_t place, int column) const {
    return weights_ + place +
           wide::transposed_place(kConfig.q_rows, static_cast<std::int32_t>(ptx::thread_index()), column * kAccumulatorDims);
  }

  [[nodiscard]] __device__ __forceinline__ float scale_of(int own) const {
    return kConfig.scaled() ? scale_[own] : call_.tile.log2_scale;
  }
  /// Hidden scores stay the smallest under a scale. The host sees to that, but for the keys' scale, which is in the device's memory.
  [[nodiscard]] __device__ __forceinline__ bool scales_up() const {
    if constexpr (!kConfig.scaled()) return true;
    bool up = true;
#pragma unroll
    for (int i = 0; i < kOwnRows; ++i) up = up && scale_[i] > 0.0F;
    return up;
  }
  [[nodiscard]] __device__ __forceinline__ bool has_unseen(StagedTile tile) const {
    // In 32 bits: 31 need not count the tile's last places, behind the last token.
    const std::uint32_t end = static_cast<std::uint32_t>(tile.token) + kConfig.tile_tokens;
    return end > static_cast<std::uint32_t>(min(first_limit_, tile.end())) || tile.token < last_first_;
  }
  /// A rehearsed segment has no rows, and no page ids.
  [[nodiscard]] __device__ __forceinline__ bool has_lacking_pages(const SegmentRecord& record) const {
    return is_paged(call_.problem.pages) && lacks_pages(memory_.shared) && record.rows > 0;
  }
  [[nodiscard]] __device__ __forceinline__ bool has_rules(const SegmentRecord& record, StagedTile tile) const {
    return !scales_up() || has_unseen(tile) || has_lacking_pages(record);
  }

  /// Applies the rules of scores; whether these are scaled then.
  __device__ __forceinline__ bool apply_rules(const SegmentRecord& record, StagedTile tile) {
    const bool scales = !scales_up();
    if (scales) {
#pragma unroll
      for (int i = 0; i < 4 * kColumns; ++i) score(i) *= scale_of(row_index(i));
    }
    if (has_lacking_pages(record)) hide_lacking_pages(record, tile);
    if (has_unseen(tile)) {
#pragma unroll
      for (int i = 0; i < 4 * kColumns; ++i) {
        const std::int32_t token = tile.token + token_of(i % 4 / 2);
        const int own = row_index(i);
        if (token >= min(limit_[own], tile.end()) || token < first_[own]) score(i) = softmax::kNegInf;
      }
    }
    return scales;
  }

  /// Tokens whose page lies outside the pool count as not there.
  __device__ __forceinline__ void hide_lacking_pages(const SegmentRecord& record, StagedTile tile) {
    const PagedKv& pages = call_.problem.pages;
    const std::int32_t* ids = page_ids(pages, record.lengths, record.sequence);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const std::uint32_t token = static_cast<std::uint32_t>(tile.token) + static_cast<std::uint32_t>(token_of(half));
      if (token >= static_cast<std::uint32_t>(tile.end())) continue;
      if (in_pool(pages, ids[page_of(call_, static_cast<std::int32_t>(token))])) continue;
#pragma unroll
      for (int column = 0; column < kColumns; ++column) s_[column][2 * half] = s_[column][2 * half + 1] = softmax::kNegInf;
    }
  }

  /// A lane's scores, of a product's columns one after the other; and which of its rows each is of.
  [[nodiscard]] __device__ __forceinline__ float& score(int i) { return s_[i / 4][i % 4]; }
  [[nodiscard]] static constexpr int row_index(int i) { return i / 4 * 2 + i % 2; }

  /// Makes the weights of a lane's scores and has products find them; whether a score is too far above what they refer to. NaN is.
  __device__ __forceinline__ bool put_weights(float (&weights)[kColumns][4], bool scales) {
    bool outgrows = false;
#pragma unroll
    for (int i = 0; i < 4 * kColumns; ++i) {
      const int own = row_index(i);
      const float scale = scales ? scale_of(own) : 1.0F;
      outgrows = outgrows || !(score(i) * scale <= most_[own]);
      weights[i / 4][i % 4] = ptx::exp2_approx(fmaf(score(i), scale, -shift_[own]));
    }
#pragma unroll
    for (int column = 0; column < kColumns; column += 2) {
      std::uint32_t matrices[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* const pair = &weights[column + i / 2][i % 2 * 2];
        matrices[i] = ptx::pack<kConfig.dtype>(pair[0], pair[1]);
      }
      ptx::store_matrices_transposed(share_at(place_, column), matrices);
    }
    ptx::fence_before_copies();  // products read by the async proxy
    return outgrows;
  }

  /// What a row's weights are made by, worked out when its maximum changes: it is nearly never.
  __device__ __forceinline__ void weigh_by(int own) {
    shift_[own] = fused_shift(max_[own]);
    most_[own] = fused_limit(max_[own]);
  }

  /// Has rows with a score that is too large refer to their largest, over the lanes and warps of a row, and their sums and O with them: a
  /// row by itself, whatever others do. Settles the scores of far rows (fused_weights.cuh). No products run.
  __device__ __forceinline__ void refer_anew(bool scales) {
    auto& kept = memory_.shared.wide.kept;
#pragma unroll
    for (int own = 0; own < kOwnRows; ++own) {
      float largest = fmaxf(s_[own / 2][own % 2], s_[own / 2][own % 2 + 2]) * (scales ? scale_of(own) : 1.0F);
#pragma unroll
      for (int lanes = 4; lanes < kWarpThreads; lanes *= 2) {
        largest = fmaxf(largest, __shfl_xor_sync(ptx::kAllLanes, largest, lanes));
      }
      if (quad() == 0) keep(kept[warp()][row_of(own)], largest);
    }
    ptx::named_barrier(kGroupBarrier, ptx::kWarpgroupThreads);
#pragma unroll
    for (int own = 0; own < kOwnRows; ++own) {
      float largest = softmax::kNegInf;
#pragma unroll
      for (int i = 0; i < 4; ++i) largest = fmaxf(largest, ptx::load_shared_float(kept[i][row_of(own)]));
      if (largest > slack_limit(max_[own])) {
        const float factor = softmax::rescale_factor(max_[own], largest);
        max_[own] = largest;
        sum_[own] = fmaf(sum_[own], factor, largest - largest);  // NaN from a score of +inf on, whose weight may come out as 0
#pragma unroll
        for (auto& block : o_) {
          block[own / 2][own % 2] *= factor;
          block[own / 2][own % 2 + 2] *= factor;
        }
        weigh_by(own);
      }
      if (!settles(max_[own])) continue;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float& s = s_[own / 2][own % 2 + 2 * half];
        s = settled(s, scales ? scale_of(own) : 1.0F, max_[own]);
      }
    }
  }

  const DeviceCall& call_;
  CtaMemory<kConfig>& memory_;
  std::uint32_t weights_;    // two places of them
  std::uint32_t place_ = 0;  // of the last tile's, beside that
  std::uint32_t queries_ = 0;
  std::int32_t limit_[kOwnRows];  // tokens from here on are not seen
  std::int32_t first_[kOwnRows];  // nor those before
  std::int32_t first_limit_;      // the smallest of all the block's rows
  std::int32_t last_first_;       // the largest
  float max_[kOwnRows];           // what weights refer to, log2 domain
  float shift_[kOwnRows];         // fused_shift() of that,
  float most_[kOwnRows];          // and fused_limit()
  float sum_[kOwnRows];
  float scale_[kConfig.scaled() ? kOwnRows : 1];  // products times this are scores in the log2 domain
  float s_[kColumns][4];
  float o_[kBlocks][kColumns][4];
};

}  // namespace lean::cuda
