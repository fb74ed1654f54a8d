// Products of a warpgroup (sm_90a): 64 rows by N columns by 16, of 16-bit factors, added up in fp32 in the registers of four warps
// that issue them together and go on before they are done. Operand B, and A of Q K^T, lie in shared memory in columns of 128
// bytes a row, swizzled as tensor copies lay them down. Of an accumulator, warp w of the warpgroup and lane 4 quad + in_quad
// hold rows 16 w + quad and + 8, of every 8 columns 2 in_quad and + 1: what a product of a single warp gives too (mma.cuh).
// Source: PTX ISA, "Asynchronous Warpgroup Level Matrix Multiply-Accumulate Instructions", "Matrix Descriptor", "setmaxnreg".
#pragma once

#include <cstdint>

#include "backends/cuda/ptx/arch.cuh"
#include "backends/cuda/ptx/warp.cuh"
#include "backends/cuda/wide_layout.hpp"
#include "lean/problem.hpp"

namespace lean::cuda::ptx {

inline constexpr std::int32_t kWarpgroupThreads = 128;

/// What a product is told of a factor in shared memory. Swizzled rows of 128 bytes repeat every 8 rows, 1024 bytes on;
/// `column_bytes` lie between columns of 128 bytes, which only a factor whose rows run along the sum (V) crosses within one
/// product.
[[nodiscard]] __device__ __forceinline__ std::uint64_t factor_at(std::uint32_t shared_address, std::uint32_t column_bytes) {
  return wide::descriptor(shared_address, column_bytes);
}

/// The same, known to the compiler to be the same in all lanes of a warp: what is added to it takes no registers of each lane, nor time
/// between a turn and its first product.
[[nodiscard]] __device__ __forceinline__ std::uint64_t uniform_factor_at(std::uint32_t shared_address, std::uint32_t column_bytes) {
  const std::uint64_t factor = factor_at(shared_address, column_bytes);
  return (factor >> 32) << 32 | __shfl_sync(kAllLanes, static_cast<std::uint32_t>(factor), 0);
}

/// Before the first product after registers that it takes or gives were written by anything else.
__device__ __forceinline__ void begin_products() {
#ifdef LEAN_CUDA_WARPGROUPS
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}
/// Closes a group of products.
__device__ __forceinline__ void end_products() {
#ifdef LEAN_CUDA_WARPGROUPS
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}
/// Until all groups but the last kPending are done.
template <int kPending>
__device__ __forceinline__ void await_products() {
#ifdef LEAN_CUDA_WARPGROUPS
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
#endif
}

/// Registers that products are writing: nothing of them is moved across this.
template <int kCount>
__device__ __forceinline__ void pin_registers(float (&x)[kCount][4]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) asm volatile("" : "+f"(x[i][j])::"memory");
  }
}

/// Registers that each of a warpgroup's threads has from here on: fewer, or more once others have given theirs up.
template <int kRegisters>
__device__ __forceinline__ void give_up_registers() {
#ifdef LEAN_CUDA_WARPGROUPS
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
#endif
}
template <int kRegisters>
__device__ __forceinline__ void take_registers() {
#ifdef LEAN_CUDA_WARPGROUPS
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
#endif
}

/// c = a b, or c += a b where `adds`: A and B from shared memory, rows of both along the sum. kCount x 8 columns.
template <DType kType, int kCount>
__device__ __forceinline__ void multiply_rows(float (&c)[kCount][4], std::uint64_t a, std::uint64_t b, bool adds);
/// c = a b, or c += a b: A, 16 rows a warp, from registers; B's rows are the sum's terms.
template <DType kType, int kCount>
__device__ __forceinline__ void multiply_columns(float (&c)[kCount][4], const std::uint32_t (&a)[4], std::uint64_t b, bool adds);

// clang-format off: registers one by one
#ifdef LEAN_CUDA_WARPGROUPS
#define LEAN_MULTIPLY_64(TYPE, A, B, ADDS, TRANSPOSED, ...) \
  asm volatile("{ .reg .pred p; setp.ne.b32 p, " ADDS ", 0; wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE " {" \
               "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
               "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31" \
               "}, " A ", " B ", p, 1, 1, " TRANSPOSED "; }" \
               : "+f"(c[0][0]), "+f"(c[0][1]), "+f"(c[0][2]), "+f"(c[0][3]), "+f"(c[1][0]), "+f"(c[1][1]), "+f"(c[1][2]), "+f"(c[1][3]), \
                 "+f"(c[2][0]), "+f"(c[2][1]), "+f"(c[2][2]), "+f"(c[2][3]), "+f"(c[3][0]), "+f"(c[3][1]), "+f"(c[3][2]), "+f"(c[3][3]), \
                 "+f"(c[4][0]), "+f"(c[4][1]), "+f"(c[4][2]), "+f"(c[4][3]), "+f"(c[5][0]), "+f"(c[5][1]), "+f"(c[5][2]), "+f"(c[5][3]), \
                 "+f"(c[6][0]), "+f"(c[6][1]), "+f"(c[6][2]), "+f"(c[6][3]), "+f"(c[7][0]), "+f"(c[7][1]), "+f"(c[7][2]), "+f"(c[7][3]) \
               : __VA_ARGS__, "l"(b), "r"(static_cast<std::uint32_t>(adds)))
#define LEAN_MULTIPLY_128(TYPE, A, B, ADDS, TRANSPOSED, ...) \
  asm volatile("{ .reg .pred p; setp.ne.b32 p, " ADDS ", 0; wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE " {" \
               "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
               "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
               "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
               "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63" \
               "}, " A ", " B ", p, 1, 1, " TRANSPOSED "; }" \
               : "+f"(c[0][0]), "+f"(c[0][1]), "+f"(c[0][2]), "+f"(c[0][3]), "+f"(c[1][0]), "+f"(c[1][1]), "+f"(c[1][2]), "+f"(c[1][3]), \
                 "+f"(c[2][0]), "+f"(c[2][1]), "+f"(c[2][2]), "+f"(c[2][3]), "+f"(c[3][0]), "+f"(c[3][1]), "+f"(c[3][2]), "+f"(c[3][3]), \
                 "+f"(c[4][0]), "+f"(c[4][1]), "+f"(c[4][2]), "+f"(c[4][3]), "+f"(c[5][0]), "+f"(c[5][1]), "+f"(c[5][2]), "+f"(c[5][3]), \
                 "+f"(c[6][0]), "+f"(c[6][1]), "+f"(c[6][2]), "+f"(c[6][3]), "+f"(c[7][0]), "+f"(c[7][1]), "+f"(c[7][2]), "+f"(c[7][3]), \
                 "+f"(c[8][0]), "+f"(c[8][1]), "+f"(c[8][2]), "+f"(c[8][3]), "+f"(c[9][0]), "+f"(c[9][1]), "+f"(c[9][2]), "+f"(c[9][3]), \
                 "+f"(c[10][0]), "+f"(c[10][1]), "+f"(c[10][2]), "+f"(c[10][3]), "+f"(c[11][0]), "+f"(c[11][1]), "+f"(c[11][2]), "+f"(c[11][3]), \
                 "+f"(c[12][0]), "+f"(c[12][1]), "+f"(c[12][2]), "+f"(c[12][3]), "+f"(c[13][0]), "+f"(c[13][1]), "+f"(c[13][2]), "+f"(c[13][3]), \
                 "+f"(c[14][0]), "+f"(c[14][1]), "+f"(c[14][2]), "+f"(c[14][3]), "+f"(c[15][0]), "+f"(c[15][1]), "+f"(c[15][2]), "+f"(c[15][3]) \
               : __VA_ARGS__, "l"(b), "r"(static_cast<std::uint32_t>(adds)))
#define LEAN_MULTIPLY_256(TYPE, A, B, ADDS, TRANSPOSED, ...) \
  asm volatile("{ .reg .pred p; setp.ne.b32 p, " ADDS ", 0; wgmma.mma_async.sync.aligned.m64n256k16.f32." TYPE "." TYPE " {" \
               "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
               "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
               "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
               "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, " \
               "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
               "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, " \
               "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
               "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127" \
               "}, " A ", " B ", p, 1, 1, " TRANSPOSED "; }" \
               : "+f"(c[0][0]), "+f"(c[0][1]), "+f"(c[0][2]), "+f"(c[0][3]), "+f"(c[1][0]), "+f"(c[1][1]), "+f"(c[1][2]), "+f"(c[1][3]), \
                 "+f"(c[2][0]), "+f"(c[2][1]), "+f"(c[2][2]), "+f"(c[2][3]), "+f"(c[3][0]), "+f"(c[3][1]), "+f"(c[3][2]), "+f"(c[3][3]), \
                 "+f"(c[4][0]), "+f"(c[4][1]), "+f"(c[4][2]), "+f"(c[4][3]), "+f"(c[5][0]), "+f"(c[5][1]), "+f"(c[5][2]), "+f"(c[5][3]), \
                 "+f"(c[6][0]), "+f"(c[6][1]), "+f"(c[6][2]), "+f"(c[6][3]), "+f"(c[7][0]), "+f"(c[7][1]), "+f"(c[7][2]), "+f"(c[7][3]), \
                 "+f"(c[8][0]), "+f"(c[8][1]), "+f"(c[8][2]), "+f"(c[8][3]), "+f"(c[9][0]), "+f"(c[9][1]), "+f"(c[9][2]), "+f"(c[9][3]), \
                 "+f"(c[10][0]), "+f"(c[10][1]), "+f"(c[10][2]), "+f"(c[10][3]), "+f"(c[11][0]), "+f"(c[11][1]), "+f"(c[11][2]), "+f"(c[11][3]), \
                 "+f"(c[12][0]), "+f"(c[12][1]), "+f"(c[12][2]), "+f"(c[12][3]), "+f"(c[13][0]), "+f"(c[13][1]), "+f"(c[13][2]), "+f"(c[13][3]), \
                 "+f"(c[14][0]), "+f"(c[14][1]), "+f"(c[14][2]), "+f"(c[14][3]), "+f"(c[15][0]), "+f"(c[15][1]), "+f"(c[15][2]), "+f"(c[15][3]), \
                 "+f"(c[16][0]), "+f"(c[16][1]), "+f"(c[16][2]), "+f"(c[16][3]), "+f"(c[17][0]), "+f"(c[17][1]), "+f"(c[17][2]), "+f"(c[17][3]), \
                 "+f"(c[18][0]), "+f"(c[18][1]), "+f"(c[18][2]), "+f"(c[18][3]), "+f"(c[19][0]), "+f"(c[19][1]), "+f"(c[19][2]), "+f"(c[19][3]), \
                 "+f"(c[20][0]), "+f"(c[20][1]), "+f"(c[20][2]), "+f"(c[20][3]), "+f"(c[21][0]), "+f"(c[21][1]), "+f"(c[21][2]), "+f"(c[21][3]), \
                 "+f"(c[22][0]), "+f"(c[22][1]), "+f"(c[22][2]), "+f"(c[22][3]), "+f"(c[23][0]), "+f"(c[23][1]), "+f"(c[23][2]), "+f"(c[23][3]), \
                 "+f"(c[24][0]), "+f"(c[24][1]), "+f"(c[24][2]), "+f"(c[24][3]), "+f"(c[25][0]), "+f"(c[25][1]), "+f"(c[25][2]), "+f"(c[25][3]), \
                 "+f"(c[26][0]), "+f"(c[26][1]), "+f"(c[26][2]), "+f"(c[26][3]), "+f"(c[27][0]), "+f"(c[27][1]), "+f"(c[27][2]), "+f"(c[27][3]), \
                 "+f"(c[28][0]), "+f"(c[28][1]), "+f"(c[28][2]), "+f"(c[28][3]), "+f"(c[29][0]), "+f"(c[29][1]), "+f"(c[29][2]), "+f"(c[29][3]), \
                 "+f"(c[30][0]), "+f"(c[30][1]), "+f"(c[30][2]), "+f"(c[30][3]), "+f"(c[31][0]), "+f"(c[31][1]), "+f"(c[31][2]), "+f"(c[31][3]) \
               : __VA_ARGS__, "l"(b), "r"(static_cast<std::uint32_t>(adds)))
#else
#define LEAN_MULTIPLY_64(TYPE, A, B, ADDS, TRANSPOSED, ...)
#define LEAN_MULTIPLY_128(TYPE, A, B, ADDS, TRANSPOSED, ...)
#define LEAN_MULTIPLY_256(TYPE, A, B, ADDS, TRANSPOSED, ...)
#endif
template <>
__device__ __forceinline__ void multiply_rows<DType::kFloat16, 8>(float (&c)[8][4], std::uint64_t a, std::uint64_t b, bool adds) {
  LEAN_MULTIPLY_64("f16", "%32", "%33", "%34", "0, 0", "l"(a));
}
template <>
__device__ __forceinline__ void multiply_columns<DType::kFloat16, 8>(float (&c)[8][4], const std::uint32_t (&a)[4], std::uint64_t b, bool adds) {
  LEAN_MULTIPLY_64("f16", "{%32, %33, %34, %35}", "%36", "%37", "1", "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]));
}
template <>
__device__ __forceinline__ void multiply_rows<DType::kBFloat16, 8>(float (&c)[8][4], std::uint64_t a, std::uint64_t b, bool adds) {
  LEAN_MULTIPLY_64("bf16", "%32", "%33", "%34", "0, 0", "l"(a));
}
template <>
__device__ __forceinline__ void multiply_columns<DType::kBFloat16, 8>(float (&c)[8][4], const std::uint32_t (&a)[4], std::uint64_t b, bool adds) {
  LEAN_MULTIPLY_64("bf16", "{%32, %33, %34, %35}", "%36", "%37", "1", "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]));
}
template <>
__device__ __forceinline__ void multiply_rows<DType::kFloat16, 16>(float (&c)[16][4], std::uint64_t a, std::uint64_t b, bool adds) {
  LEAN_MULTIPLY_128("f16", "%64", "%65", "%66", "0, 0", "l"(a));
}
template <>
__device__ __forceinline__ void multiply_columns<DType::kFloat16, 16>(float (&c)[16][4], const std::uint32_t (&a)[4], std::uint64_t b, bool adds) {
  LEAN_MULTIPLY_128("f16", "{%64, %65, %66, %67}", "%68", "%69", "1", "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]));
}
template <>
__device__ __forceinline__ void multiply_rows<DType::kBFloat16, 16>(float (&c)[16][4], std::uint64_t a, std::uint64_t b, bool adds) {
  LEAN_MULTIPLY_128("bf16", "%64", "%65", "%66", "0, 0", "l"(a));
}
template <>
__device__ __forceinline__ void multiply_columns<DType::kBFloat16, 16>(float (&c)[16][4], const std::uint32_t (&a)[4], std::uint64_t b, bool adds) {
  LEAN_MULTIPLY_128("bf16", "{%64, %65, %66, %67}", "%68", "%69", "1", "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]));
}
template <>
__device__ __forceinline__ void multiply_columns<DType::kFloat16, 32>(float (&c)[32][4], const std::uint32_t (&a)[4], std::uint64_t b, bool adds) {
  LEAN_MULTIPLY_256("f16", "{%128, %129, %130, %131}", "%132", "%133", "1", "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]));
}
template <>
__device__ __forceinline__ void multiply_columns<DType::kBFloat16, 32>(float (&c)[32][4], const std::uint32_t (&a)[4], std::uint64_t b, bool adds) {
  LEAN_MULTIPLY_256("bf16", "{%128, %129, %130, %131}", "%132", "%133", "1", "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]));
}
#undef LEAN_MULTIPLY_64
#undef LEAN_MULTIPLY_128
#undef LEAN_MULTIPLY_256
// clang-format on

}  // namespace lean::cuda::ptx
