// LeanTile() of the paper (Alg. 1) on one warp: 16 query rows against the warp's share of a tile's tokens, by 16x8x16 matrix
// products; scores, online softmax and accumulate in registers. Each warp keeps its own (O, m, l); cta_combine.cuh merges them.
//
// Stages hold rows end to end, as bulk copies bring them, so equal 16-byte pieces of 8 rows may share banks. Row r therefore
// reads piece c ^ twist(r) where it should read c, which is free of conflicts, and pieces are put right in registers.
#pragma once

#include <cstdint>

#include "backends/cuda/kernel/cta_parts.cuh"
#include "backends/cuda/kernel/cta_shared.cuh"
#include "backends/cuda/kernel/score_rules.cuh"
#include "backends/cuda/ptx/barrier.cuh"
#include "backends/cuda/ptx/copy.cuh"
#include "backends/cuda/ptx/mma.cuh"
#include "problem/address.hpp"
#include "softmax/state.hpp"

namespace lean::cuda {

inline constexpr std::int32_t kPieceDims = 8;    // 16 bytes
inline constexpr std::int32_t kGroupPieces = 8;  // pieces that are read and put right together: 64 dims
inline constexpr std::int32_t kGroupDims = kPieceDims * kGroupPieces;

/// A register of V holds tokens 2 quad and 2 quad + 1. With a twist of three bits they differ in the last one: the upper half
/// then comes from the neighbouring piece (selectors of __byte_perm).
inline constexpr std::uint32_t kKeepHalves = 0x3210;
inline constexpr std::uint32_t kSwapHighHalf = 0x7610;

/// kWhole: d is the variant's own; else a smaller multiple of 8.
template <KernelConfig kConfig, bool kWhole>
class WarpTile {
 public:
  static constexpr std::int32_t kDims = kConfig.head_dim;
  static constexpr std::int32_t kGroups = kDims / kGroupDims;
  static constexpr std::int32_t kRuns = kConfig.warp_runs();

  __device__ explicit WarpTile(const DeviceCall& call) : call_(call) {
    const auto thread = static_cast<std::int32_t>(ptx::thread_index());
    lane_ = thread % kWarpThreads;
    group_ = lane_ / 4;
    quad_ = lane_ % 4;
    const std::int32_t warp = thread / kWarpThreads;
    row_warp_ = warp % kConfig.row_warps();
    token_warp_ = warp / kConfig.row_warps();
    pieces_ = kWhole ? kDims / kPieceDims : call.problem.head_dim / kPieceDims;
    row_bytes_ = static_cast<std::uint32_t>(pieces_) * 16U;
    // Rows share banks in sets of gcd(pieces, 8): that many must be told apart.
    std::int32_t same_bank_bits = kWhole ? 3 : 0;
    while (same_bank_bits < 3 && pieces_ % (2 << same_bank_bits) == 0) ++same_bank_bits;
    twist_shift_ = 3 - same_bank_bits;
    k_twist_ = group_ >> twist_shift_;
    v_twist_ = (2 * quad_) >> twist_shift_;
    v_select_ = same_bank_bits == 3 ? kSwapHighHalf : kKeepHalves;
    const std::int32_t row_in_matrix = lane_ % 8;
    read_piece_ = (lane_ / 8) ^ (row_in_matrix >> twist_shift_);
    read_row_ = token_warp_ * kMmaTokens + row_in_matrix;
  }

  /// Loads the queries of a row block through the exchange area, by all consumer threads together, and empties (O, m, l).
  __device__ __forceinline__ void begin(CtaMemory<kConfig>& memory, const SegmentRecord& record) {
    const std::uint32_t staged = ptx::shared_address(memory.exchange);
    stage_queries(record, staged);
    consumer_sync<kConfig>();
    const std::int32_t row = row_warp_ * kMmaRows + lane_ % 16;
#pragma unroll
    for (int step = 0; step < kDims / kMmaDims; ++step) {
      ptx::load_matrices(query_[step], query_address(staged, row, 2 * step + lane_ / 16));
    }
    if (may_rule()) consumer_sync<kConfig>();  // apply_rules() uses the area too
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      limit_[half] = record.lengths.kv_end;  // of a single query; a window to the right ends there too
      if (record.lengths.q_tokens > 1) {
        const std::int32_t token = query_of(record, row_of(half)).token;
        limit_[half] = visible_span(record.lengths, token, token, call_.shape.reach).end;
      }
      max_[half] = softmax::kNegInf;
      sum_[half] = 0.0F;
    }
    first_limit_ = __reduce_min_sync(0xFFFFFFFFU, min(limit_[0], limit_[1]));
#pragma unroll
    for (auto& column : o_) {
#pragma unroll
      for (float& x : column) x = 0.0F;
    }
  }

  /// S = Q K^T of this warp's tokens, from a stage that holds K.
  __device__ void scores(std::uint32_t stage) {
#pragma unroll
    for (int run = 0; run < kRuns; ++run) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float(&s)[4] = scores_[run][half];
        s[0] = s[1] = s[2] = s[3] = 0.0F;
        const std::uint32_t row = row_address(stage, run, half);
#pragma unroll
        for (int g = 0; g < kGroups; ++g) {
          std::uint32_t k[kGroupPieces];
          ptx::load_matrices(k, row + piece_offset(g, 0));
          ptx::load_matrices(k + 4, row + piece_offset(g, 4));
          put_right<1>(k, k_twist_);
          if constexpr (!kWhole) {  // what lies past d is another row's
#pragma unroll
            for (int c = 0; c < kGroupPieces; ++c) k[c] = g * kGroupPieces + c < pieces_ ? k[c] : 0U;
          }
#pragma unroll
          for (int pair = 0; pair < kGroupPieces / 2; ++pair) {
            ptx::multiply_add<kConfig.dtype>(s, query_[g * kGroupPieces / 2 + pair], k[2 * pair], k[2 * pair + 1]);
          }
        }
      }
    }
  }

  /// The online softmax over this warp's tokens; the stage held the sequence's tokens [tile_token, tile_token + tile_tokens), and
  /// leftovers behind.
  __device__ void update_softmax(CtaMemory<kConfig>& memory, const SegmentRecord& record, std::int32_t tile_token,
                                 std::int32_t tile_tokens) {
    float scale = call_.log2_scale;
    if (may_rule() && (call_.score_rules || memory.shared.lacks_pages != 0)) {
      apply_rules(memory, record, tile_token);
      scale = 1.0F;
    }
    const std::int32_t own = tile_token + token_warp_ * kMmaTokens + 2 * quad_;
    const std::int32_t stage_end = tile_token + tile_tokens;
    const bool masked = tile_token + kConfig.tile_tokens > min(first_limit_, stage_end);  // of the whole warp
    const std::int32_t limit[2] = {min(limit_[0], stage_end), min(limit_[1], stage_end)};
    float tile_max[2] = {softmax::kNegInf, softmax::kNegInf};
#pragma unroll
    for (int run = 0; run < kRuns; ++run) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float& s = scores_[run][half][i];
          s *= scale;
          if (masked && own + run * run_tokens() + half * 8 + i % 2 >= limit[i / 2]) s = softmax::kNegInf;
          tile_max[i / 2] = fmaxf(tile_max[i / 2], s);
        }
      }
    }
#pragma unroll
    for (float& m : tile_max) {
      m = fmaxf(m, __shfl_xor_sync(0xFFFFFFFFU, m, 1));
      m = fmaxf(m, __shfl_xor_sync(0xFFFFFFFFU, m, 2));
    }
    if (__any_sync(0xFFFFFFFFU, tile_max[0] > max_[0] || tile_max[1] > max_[1])) rescale(tile_max);
    // An empty row's maximum is -inf: subtracting 0 instead leaves its scores at -inf and its weights at 0.
    const float shift[2] = {max_[0] == softmax::kNegInf ? 0.0F : max_[0], max_[1] == softmax::kNegInf ? 0.0F : max_[1]};
#pragma unroll
    for (int run = 0; run < kRuns; ++run) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float& s = scores_[run][half][i];
          s = ptx::exp2_approx(s - shift[i / 2]);
          sum_[i / 2] += s;
        }
      }
    }
  }

  /// O += P V of this warp's tokens, from a stage that holds V. Rows past `tile_tokens` hold leftovers and are cleared.
  __device__ void accumulate(std::uint32_t stage, std::int32_t tile_tokens) {
#pragma unroll
    for (int run = 0; run < kRuns; ++run) {
      const std::uint32_t p[4] = {ptx::pack<kConfig.dtype>(scores_[run][0][0], scores_[run][0][1]),
                                  ptx::pack<kConfig.dtype>(scores_[run][0][2], scores_[run][0][3]),
                                  ptx::pack<kConfig.dtype>(scores_[run][1][0], scores_[run][1][1]),
                                  ptx::pack<kConfig.dtype>(scores_[run][1][2], scores_[run][1][3])};
      const std::int32_t run_token = token_warp_ * kMmaTokens + run * run_tokens();
      const bool ragged = run_token + kMmaTokens > tile_tokens;
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        std::uint32_t v[2][kGroupPieces];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const std::uint32_t row = row_address(stage, run, half);
          std::uint32_t read[kGroupPieces];
          ptx::load_matrices_transposed(read, row + piece_offset(g, 0));
          ptx::load_matrices_transposed(read + 4, row + piece_offset(g, 4));
          put_right<kWhole ? 2 : 1>(read, v_twist_);
#pragma unroll
          for (int piece = 0; piece < kGroupPieces; ++piece)
            v[half][piece] = __byte_perm(read[piece], read[piece ^ 1], kWhole ? kSwapHighHalf : v_select_);
          if (ragged) {
            const std::int32_t left = tile_tokens - (run_token + half * 8 + 2 * quad_);
            const std::uint32_t kept = left >= 2 ? 0xFFFFFFFFU : (left == 1 ? 0xFFFFU : 0U);
#pragma unroll
            for (std::uint32_t& x : v[half]) x &= kept;
          }
        }
#pragma unroll
        for (int piece = 0; piece < kGroupPieces; ++piece) {
          ptx::multiply_add<kConfig.dtype>(o_[g * kGroupPieces + piece], p, v[0][piece], v[1][piece]);
        }
      }
    }
  }

  /// Adds up l over the lanes of a row: after the segment's last tile.
  __device__ void finish() {
#pragma unroll
    for (float& l : sum_) {
      l += __shfl_xor_sync(0xFFFFFFFFU, l, 1);
      l += __shfl_xor_sync(0xFFFFFFFFU, l, 2);
    }
  }

  /// Stages this warp's part of a half of its rows. A lane's: row `group`, dims 8 piece + 2 quad and + 1.
  __device__ __forceinline__ void stage(CtaMemory<kConfig>& memory, const StagedRows& rows, int half) const {
    const std::int32_t place = token_warp_ * rows.count + row_warp_ * (kMmaRows / 2) + group_;
    float* row = memory.exchange + place * kDims + quad_ % 2 * 2;
#pragma unroll
    for (int piece = 0; piece < kDims / kPieceDims; ++piece) {
      float* to = row + twisted_quad(group_, 2 * piece + quad_ / 2) * kQuadDims;
      *reinterpret_cast<float2*>(to) = {o_[piece][2 * half], o_[piece][2 * half + 1]};
    }
    if (quad_ != 0) return;
    memory.shared.parts.m[place] = max_[half];
    memory.shared.parts.l[place] = sum_[half];
  }

  /// True when none of this warp's tokens is among the first `tile_tokens` of a tile.
  [[nodiscard]] __device__ bool idle(std::int32_t tile_tokens) const { return token_warp_ * kMmaTokens >= tile_tokens; }

 private:
  /// Rows of the block that this lane holds: half 0 and 1.
  [[nodiscard]] __device__ std::int32_t row_of(int half) const { return row_warp_ * kMmaRows + group_ + 8 * half; }

  [[nodiscard]] __device__ __forceinline__ bool may_rule() const { return call_.score_rules || is_paged(call_.problem.pages); }

  /// Every score in the log2 domain, after the rules.
  __device__ __forceinline__ void apply_rules(CtaMemory<kConfig>& memory, const SegmentRecord& record, std::int32_t tile_token) {
    constexpr int kScores = kRuns * 8;
    static_assert(kScores * kConfig.consumer_threads() <= kExchangeFloats);
    volatile float* own = memory.exchange + ptx::thread_index();  // one in consumer_threads()
#pragma unroll
    for (int j = 0; j < kScores; ++j) own[j * kConfig.consumer_threads()] = scores_[j / 8][j / 4 % 2][j % 4];
    const bool lacks_pages = memory.shared.lacks_pages != 0;
#pragma unroll 1
    for (int j = 0; j < kScores; ++j) {
      volatile float* score = own + j * kConfig.consumer_threads();
      const std::int32_t key = tile_token + token_warp_ * kMmaTokens + 2 * quad_ + j / 8 * run_tokens() + j / 4 % 2 * 8 + j % 2;
      const PackedRow at = query_of(record, row_of(j % 4 / 2));
      *score = ruled_score(call_, record, *score, at, key, lacks_pages);
    }
#pragma unroll
    for (int j = 0; j < kScores; ++j) scores_[j / 8][j / 4 % 2][j % 4] = own[j * kConfig.consumer_threads()];
  }

  /// Which query a row of the block is; rows that do not exist are the block's first.
  [[nodiscard]] __device__ __forceinline__ PackedRow query_of(const SegmentRecord& record, std::int32_t row) const {
    return packed_row(std::int64_t{record.row_block} * kConfig.q_rows + (row < record.rows ? row : 0), call_.shape.group);
  }

  /// Where 8 dims of a row are staged; the twist keeps ldmatrix free of bank conflicts.
  [[nodiscard]] __device__ __forceinline__ static std::uint32_t query_address(std::uint32_t staged, std::int32_t row,
                                                                              std::int32_t piece) {
    return staged + static_cast<std::uint32_t>(row * (kDims / kPieceDims) + (piece ^ (row % 8))) * 16U;
  }

  /// The queries of the block to shared memory, 8 dims at a time; rows and dims that do not exist are 0.
  __device__ __forceinline__ void stage_queries(const SegmentRecord& record, std::uint32_t staged) const {
    constexpr std::int32_t kPieces = kDims / kPieceDims;
    const Problem& problem = call_.problem;
#pragma unroll 1
    for (auto i = static_cast<std::int32_t>(ptx::thread_index()); i < kConfig.q_rows * kPieces; i += kConfig.consumer_threads()) {
      const std::int32_t row = i / kPieces;
      const std::int32_t piece = i % kPieces;
      uint4 eight = {0, 0, 0, 0};
      if (row < record.rows && piece < pieces_) {
        const PackedRow at = query_of(record, row);
        const HeadPosition head{record.sequence, record.kv_head * call_.shape.group + at.head_in_group};
        const std::int64_t offset = q_offset(problem.q.strides, record.lengths, head, problem.cu_q_tokens != nullptr) +
                                    at.token * problem.q.strides.token + piece * kPieceDims;
        const auto* from = static_cast<const std::uint16_t*>(problem.q.data) + offset;
        if (call_.vector_queries) {
          eight = *reinterpret_cast<const uint4*>(from);
        } else {
          const auto* pairs = reinterpret_cast<const std::uint32_t*>(from);
          eight = {pairs[0], pairs[1], pairs[2], pairs[3]};
        }
      }
      ptx::store_shared(query_address(staged, row, piece), eight);
    }
  }

  /// Tokens from one run of this warp to its next.
  [[nodiscard]] static constexpr std::int32_t run_tokens() { return kConfig.token_warps() * kMmaTokens; }

  [[nodiscard]] __device__ std::uint32_t row_address(std::uint32_t stage, int run, int half) const {
    return stage + static_cast<std::uint32_t>(read_row_ + run * run_tokens() + half * 8) * row_bytes_;
  }

  /// Where this lane's row holds what it reads for pieces `piece` to `piece` + 3 of group g.
  [[nodiscard]] __device__ std::uint32_t piece_offset(int g, int piece) const {
    return static_cast<std::uint32_t>(g * kGroupPieces + (read_piece_ ^ piece)) * 16U;
  }

  /// m[c] holds piece c ^ twist; afterwards piece c, as far as the twist's bits from kFirstBit on go.
  template <int kFirstBit>
  __device__ static void put_right(std::uint32_t (&m)[kGroupPieces], std::int32_t twist) {
#pragma unroll
    for (int bit = kFirstBit; bit < kGroupPieces; bit *= 2) {
      const bool swap = (twist & bit) != 0;
#pragma unroll
      for (int c = 0; c < kGroupPieces; ++c) {
        if ((c & bit) != 0) continue;
        const std::uint32_t low = m[c];
        const std::uint32_t high = m[c | bit];
        m[c] = swap ? high : low;
        m[c | bit] = swap ? low : high;
      }
    }
  }

  __device__ void rescale(const float (&tile_max)[2]) {
    float factor[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float larger = fmaxf(max_[half], tile_max[half]);
      factor[half] = softmax::rescale_factor(max_[half], larger);
      max_[half] = larger;
      sum_[half] *= factor[half];
    }
#pragma unroll
    for (auto& column : o_) {
#pragma unroll
      for (int i = 0; i < 4; ++i) column[i] *= factor[i / 2];
    }
  }

  const DeviceCall& call_;
  std::int32_t lane_, group_, quad_, row_warp_, token_warp_;
  std::int32_t pieces_, twist_shift_, k_twist_, v_twist_, read_piece_, read_row_;
  std::uint32_t row_bytes_, v_select_;
  std::int32_t limit_[2], first_limit_;
  std::uint32_t query_[kDims / kMmaDims][4];
  float scores_[kRuns][2][4];
  float max_[2], sum_[2];
  float o_[kDims / kPieceDims][4];
};

}  // namespace lean::cuda
