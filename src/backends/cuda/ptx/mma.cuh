// Matrix fragments: loads from shared memory and products with fp32 accumulation, D = A B + D, A 16 x 16, B 16 x 8 (PTX ISA,
// "Warp-level Matrix Instructions"). Lane = 4 quad + in_quad: of an accumulator it holds rows quad and quad + 8, columns 2 in_quad
// and + 1.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "backends/cuda/ptx/arch.cuh"
#include "lean/problem.hpp"

namespace lean::cuda::ptx {

/// Four 8x8 matrices of 16-bit elements; lane i gives the address of row i % 8 of matrix i / 8.
__device__ __forceinline__ void load_matrices(std::uint32_t* fragment, std::uint32_t row_address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
               : "r"(row_address));
}

__device__ __forceinline__ void load_matrices_transposed(std::uint32_t* fragment, std::uint32_t row_address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
               : "r"(row_address));
}

/// The way back (sm_90), of which a lane holds two neighbours of row lane / 4 of each.
__device__ __forceinline__ void store_matrices(std::uint32_t row_address, const std::uint32_t (&fragment)[4]) {
#if LEAN_CUDA_ARCH >= 900
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row_address), "r"(fragment[0]),
               "r"(fragment[1]), "r"(fragment[2]), "r"(fragment[3])
               : "memory");
#endif
}

/// The same of matrices that are transposed on the way: a lane's two become neighbours of a column.
__device__ __forceinline__ void store_matrices_transposed(std::uint32_t row_address, const std::uint32_t (&fragment)[4]) {
#if LEAN_CUDA_ARCH >= 900
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row_address), "r"(fragment[0]),
               "r"(fragment[1]), "r"(fragment[2]), "r"(fragment[3])
               : "memory");
#endif
}

/// An 8x8 matrix of 16-bit elements, of which a lane holds two neighbours of a row, transposed.
[[nodiscard]] __device__ __forceinline__ std::uint32_t transposed(std::uint32_t pair) {
  std::uint32_t of_transposed;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(of_transposed) : "r"(pair));
  return of_transposed;
}

/// c += a b; a 16x16, b 16x8.
template <DType kType>
__device__ __forceinline__ void multiply_add(float (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1) {
  if constexpr (kType == DType::kFloat16) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

/// Two values rounded to the 16-bit type, the first in the low half.
template <DType kType>
[[nodiscard]] __device__ __forceinline__ std::uint32_t pack(float low, float high) {
  std::uint32_t bits;
  if constexpr (kType == DType::kFloat16) {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
  }
  return bits;
}

/// 2^x within 2 ulp; 2^-inf = 0.
[[nodiscard]] __device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/// The largest of three, of numbers as their bits are ordered: those that are not negative among themselves, above all others. One
/// instruction on sm_90. (As assembly, since the compiler keeps what it takes for an integer in other registers.)
[[nodiscard]] __device__ __forceinline__ float largest_by_bits(float x, float y, float z) {
  float largest;
  asm("{ .reg .s32 a, b, c; mov.b32 a, %1; mov.b32 b, %2; mov.b32 c, %3; max.s32 a, a, b; max.s32 a, a, c; mov.b32 %0, a; }"
      : "=f"(largest)
      : "f"(x), "f"(y), "f"(z));
  return largest;
}

/// Makes x -inf where `bias` is, or where `seen` is 0: in the register where it lies, since the compiler would have the numbers of many such
/// choices in others, and move them.
__device__ __forceinline__ void hide_where_infinite(float& x, float bias) {
  asm volatile("{ .reg .pred p; setp.neu.f32 p, %1, 0fFF800000; selp.f32 %0, %0, 0fFF800000, p; }" : "+f"(x) : "f"(bias));
}
__device__ __forceinline__ void hide_unless(float& x, std::uint32_t seen) {
  asm volatile("{ .reg .pred p; setp.ne.u32 p, %1, 0; selp.f32 %0, %0, 0fFF800000, p; }" : "+f"(x) : "r"(seen));
}

}  // namespace lean::cuda::ptx
