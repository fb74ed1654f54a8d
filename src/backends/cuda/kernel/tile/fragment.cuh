// Fragment: what a register read from a stage holds, by the type of K and V, and how matrix products take it. Lane = 4 quad +
// in_quad.
#pragma once

#include <cstdint>

#include "backends/cuda/kernel/staged_queries.cuh"
#include "backends/cuda/kernel_config.hpp"
#include "backends/cuda/ptx/copy.cuh"
#include "backends/cuda/ptx/fp8.cuh"
#include "backends/cuda/ptx/mma.cuh"
#include "backends/cuda/ptx/shared.cuh"

namespace lean::cuda {

inline constexpr std::int32_t kAccumulatorDims = 8;  // of O, in one accumulator

/// 16-bit: of K dims 2 in_quad and + 1 of token `quad`; of V dim `quad` of tokens 2 in_quad and + 1. As products take them.
template <DType kType>
struct Fragment {
  static constexpr std::int32_t kPieceDims = 8;
  static constexpr std::int32_t kLaneDims = 2;  // of a piece of O, neighbours from kLaneDims in_quad on
  // Selectors of __byte_perm(x, y): the register as it is, or its second token from y; and what holds the first token.
  static constexpr std::uint32_t kSameToken = 0x3210;
  static constexpr std::uint32_t kSecondFromOther = 0x7610;
  static constexpr std::uint32_t kFirstToken = 0x0000FFFF;

  /// Factors of the product of Q K^T over dims [16 step, 16 step + 16) of a set of pieces.
  template <int kPieces>
  __device__ __forceinline__ static uint2 key_factors(const std::uint32_t (&k)[kPieces], int step) {
    return {k[2 * step], k[2 * step + 1]};
  }

  /// Factor of the product of P V that gives accumulator `accumulator` of a set of pieces.
  template <int kPieces>
  __device__ __forceinline__ static std::uint32_t value_factor(const std::uint32_t (&v)[kPieces], int accumulator) {
    return v[accumulator];
  }

  /// What this lane holds of a piece of O, of row `half` 0 or 1; `o`: the piece's first accumulator.
  __device__ __forceinline__ static void store(float* to, const float (*o)[4], int half) {
    *reinterpret_cast<float2*>(to) = {o[0][2 * half], o[0][2 * half + 1]};
  }

  /// Rows first_row to first_row + 15 of dims [16 step, 16 step + 16), from where they are staged, as operand A of a product.
  template <KernelConfig kConfig>
  __device__ __forceinline__ static void load_queries_as_a(std::uint32_t (&q)[4], std::uint32_t staged, std::int32_t first_row,
                                                           std::int32_t lane, int step) {
    ptx::load_matrices(q, query_address<kConfig>(staged, first_row + lane % 16, 2 * step + lane / 16));
  }

  /// Rows 0 to 7 as operand B of products, their columns; two registers a product.
  template <KernelConfig kConfig, int kRegisters>
  __device__ __forceinline__ static void load_queries_as_b(std::uint32_t (&q)[kRegisters], std::uint32_t staged,
                                                           std::int32_t lane) {
#pragma unroll
    for (int piece = 0; piece < kRegisters; piece += 4) {
      ptx::load_matrices(q + piece, query_address<kConfig>(staged, lane % 8, piece + lane / 8));
    }
  }

  /// Where O^T has what V^T brings as its rows `lane / 4` and + 8: dims of 16.
  [[nodiscard]] __device__ __forceinline__ static constexpr std::int32_t output_dim(std::int32_t quad, int half) {
    return quad + 8 * half;
  }
};

/// fp8: of K dims 4 in_quad to + 3 of token `quad`, which are given to the product as its dims 2 in_quad, + 1, + 8 and + 9: queries
/// are put in the same order. Of V dims 2 quad and + 1 of tokens 2 in_quad and + 1, sorted to pairs of tokens; one product takes
/// the even dims of a piece, one the odd ones, so that a lane holds dims 4 in_quad to + 3 of O.
template <DType kType>
  requires(kv_type_of(kType).converted())
struct Fragment<kType> {
  static constexpr std::int32_t kPieceDims = 16;
  static constexpr std::int32_t kLaneDims = 4;
  static constexpr std::uint32_t kSameToken = 0x3120;
  static constexpr std::uint32_t kSecondFromOther = 0x7160;
  static constexpr std::uint32_t kFirstToken = 0x00FF00FF;

  template <int kPieces>
  __device__ __forceinline__ static uint2 key_factors(const std::uint32_t (&k)[kPieces], int step) {
    return {ptx::fp8_to_half<kType>(k[step], false), ptx::fp8_to_half<kType>(k[step], true)};
  }

  template <int kPieces>
  __device__ __forceinline__ static std::uint32_t value_factor(const std::uint32_t (&v)[kPieces], int accumulator) {
    return ptx::fp8_to_half<kType>(v[accumulator / 2], accumulator % 2 != 0);
  }

  __device__ __forceinline__ static void store(float* to, const float (*o)[4], int half) {
    *reinterpret_cast<float4*>(to) = {o[0][2 * half], o[1][2 * half], o[0][2 * half + 1], o[1][2 * half + 1]};
  }

  template <KernelConfig kConfig>
  __device__ __forceinline__ static void load_queries_as_a(std::uint32_t (&q)[4], std::uint32_t staged, std::int32_t first_row,
                                                           std::int32_t lane, int step) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint2 four = load_four<kConfig>(staged, first_row + lane / 4 + 8 * half, lane % 4, step);
      q[half] = four.x;
      q[half + 2] = four.y;
    }
  }

  template <KernelConfig kConfig, int kRegisters>
  __device__ __forceinline__ static void load_queries_as_b(std::uint32_t (&q)[kRegisters], std::uint32_t staged,
                                                           std::int32_t lane) {
#pragma unroll
    for (int step = 0; step < kRegisters / 2; ++step) {
      const uint2 four = load_four<kConfig>(staged, lane / 4, lane % 4, step);
      q[2 * step] = four.x;
      q[2 * step + 1] = four.y;
    }
  }

  [[nodiscard]] __device__ __forceinline__ static constexpr std::int32_t output_dim(std::int32_t quad, int half) {
    return 2 * quad + half;
  }

 private:
  /// Dims 4 in_quad to + 3 of a step, of one row.
  template <KernelConfig kConfig>
  [[nodiscard]] __device__ __forceinline__ static uint2 load_four(std::uint32_t staged, std::int32_t row, std::int32_t in_quad,
                                                                  int step) {
    const std::uint32_t eight = query_address<kConfig>(staged, row, 2 * step + in_quad / 2);
    return ptx::load_shared_8(eight + static_cast<std::uint32_t>(in_quad % 2) * 8U);
  }
};

}  // namespace lean::cuda
