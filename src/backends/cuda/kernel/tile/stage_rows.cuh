// StageRows: reads K and V from a stage. Where it holds rows end to end as bulk copies bring them, which swizzle nothing, equal
// 16-byte pieces of 8 rows may share banks: row r reads piece c ^ swizzle(r) where it should read c, which is free of conflicts,
// and pieces are put right in registers. Where it holds columns, that is where piece c lies, and nothing is to be put right
// (load/stage_columns.cuh).
#pragma once

#include <cstdint>

#include "backends/cuda/kernel/load/stage_columns.cuh"
#include "backends/cuda/kernel/tile/fragment.cuh"
#include "backends/cuda/ptx/copy.cuh"
#include "backends/cuda/ptx/mma.cuh"
#include "backends/cuda/ptx/shared.cuh"

namespace lean::cuda {

/// kWhole: d is the variant's own; else a smaller multiple of 8.
template <KernelConfig kConfig, bool kWhole>
class StageRows {
 public:
  using Held = Fragment<kConfig.dtype>;
  static constexpr std::int32_t kPieces = kConfig.head_dim / Held::kPieceDims;
  static constexpr std::int32_t kSetPieces = kPieces < 8 ? kPieces : 8;  // are read and put right together
  static constexpr std::int32_t kSets = kPieces / kSetPieces;

  __device__ __forceinline__ StageRows(std::int32_t head_dim, std::int32_t lane) {
    const std::int32_t pieces = kWhole ? kPieces : kConfig.stage_row_bytes(head_dim) / kPieceBytes;
    const std::int32_t bits = same_bank_bits(pieces);
    const std::int32_t swizzle_shift = 3 - bits;
    const std::int32_t quad = lane / 4;
    const std::int32_t in_quad = lane % 4;
    row_bytes_ = static_cast<std::uint32_t>(kInColumns ? kConfig.column_bytes() : pieces * kPieceBytes);
    k_swizzle_ = quad >> swizzle_shift;
    v_swizzle_ = (2 * in_quad) >> swizzle_shift;
    v_select_ = bits == 3 ? Held::kSecondFromOther : Held::kSameToken;
    read_piece_ = (lane / 8) ^ (lane % 8 >> swizzle_shift);
    read_row_ = lane % 8;
    own_pieces_ = (head_dim - in_quad * Held::kLaneDims + Held::kPieceDims - 1) / Held::kPieceDims;
  }

  /// Set g of the pieces of the keys in rows `row` to `row` + 7.
  __device__ __forceinline__ void read_keys(std::uint32_t stage, std::int32_t row, int g, std::uint32_t (&k)[kSetPieces]) const {
    const std::uint32_t from = row_address(stage, row);
#pragma unroll
    for (int c = 0; c < kSetPieces; c += 4) ptx::load_matrices(k + c, from + piece_offset(g, c));
    if constexpr (!kInColumns) put_right<1>(k, k_swizzle_);
    if constexpr (!kWhole) {  // what lies past d is another row's
#pragma unroll
      for (int c = 0; c < kSetPieces; ++c) k[c] = g * kSetPieces + c < own_pieces_ ? k[c] : 0U;
    }
  }

  /// Set g of the pieces of the values in rows `row` to `row` + 7.
  __device__ __forceinline__ void read_values(std::uint32_t stage, std::int32_t row, int g, std::uint32_t (&v)[kSetPieces]) const {
    // With a swizzle of three bits a register's two tokens differ in the last one: the second then comes from the neighbouring
    // piece.
    constexpr bool kThreeBits = kWhole && same_bank_bits(kPieces) == 3;
    const std::uint32_t from = row_address(stage, row);
    std::uint32_t read[kSetPieces];
#pragma unroll
    for (int c = 0; c < kSetPieces; c += 4) ptx::load_matrices_transposed(read + c, from + piece_offset(g, c));
    if constexpr (!kInColumns) put_right<kThreeBits ? 2 : 1>(read, v_swizzle_);
    const std::uint32_t select = kInColumns ? Held::kSameToken : (kThreeBits ? Held::kSecondFromOther : v_select_);
#pragma unroll
    for (int c = 0; c < kSetPieces; ++c) v[c] = __byte_perm(read[c], read[c ^ 1], select);
  }

  /// Zeros in rows [begin, end) of a stage, by a warp, for itself: what they held must not reach a sum.
  __device__ __forceinline__ void clear(std::uint32_t stage, std::int32_t begin, std::int32_t end, std::int32_t lane) const {
    const std::uint32_t last = stage + static_cast<std::uint32_t>(end) * row_bytes_;
#pragma unroll 1
    for (std::uint32_t at = stage + static_cast<std::uint32_t>(begin) * row_bytes_ + static_cast<std::uint32_t>(lane * kPieceBytes);
         at < last; at += kWarpThreads * kPieceBytes) {
#pragma unroll
      for (std::uint32_t column = 0; column < kColumns; ++column) ptx::store_shared(at + column * kSetBytes, {0, 0, 0, 0});
    }
    ptx::fence_before_copies();
    __syncwarp();
  }

 private:
  static constexpr bool kInColumns = kConfig.in_columns();
  static_assert(!kInColumns || kSetPieces * kPieceBytes == kConfig.column_bytes());
  static constexpr std::uint32_t kColumns = kInColumns ? kSets : 1;        // a row that is not in columns counts as one
  static constexpr std::uint32_t kSetBytes = column_stage_bytes<kConfig>;  // from a column, a set of pieces, to the next

  [[nodiscard]] __device__ __forceinline__ std::uint32_t row_address(std::uint32_t stage, std::int32_t row) const {
    return stage + static_cast<std::uint32_t>(read_row_ + row) * row_bytes_;
  }

  /// Where this lane's row holds what it reads for pieces `piece` to `piece` + 3 of set g.
  [[nodiscard]] __device__ __forceinline__ std::uint32_t piece_offset(int g, int piece) const {
    if constexpr (kInColumns) {
      return static_cast<std::uint32_t>(g) * kSetBytes + static_cast<std::uint32_t>((read_piece_ ^ piece) * kPieceBytes);
    } else {
      return static_cast<std::uint32_t>((g * kSetPieces + (read_piece_ ^ piece)) * kPieceBytes);
    }
  }

  /// m[c] holds piece c ^ swizzle; afterwards piece c, as far as the swizzle's bits from kFirstBit on go.
  template <int kFirstBit>
  __device__ __forceinline__ static void put_right(std::uint32_t (&m)[kSetPieces], std::int32_t swizzle) {
#pragma unroll
    for (int bit = kFirstBit; bit < kSetPieces; bit *= 2) {
      const bool swap = (swizzle & bit) != 0;
#pragma unroll
      for (int c = 0; c < kSetPieces; ++c) {
        if ((c & bit) != 0) continue;
        const std::uint32_t low = m[c];
        const std::uint32_t high = m[c | bit];
        m[c] = swap ? high : low;
        m[c | bit] = swap ? low : high;
      }
    }
  }

  std::int32_t k_swizzle_, v_swizzle_, read_piece_, read_row_, own_pieces_;
  std::uint32_t row_bytes_, v_select_;
};

}  // namespace lean::cuda
