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
  return wide::descriptor(ptx::uniform(shared_address), column_bytes);
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
/// c = a b, or c += a b: both from shared memory, where A lies transposed, a column of 64 of its rows (V), and B's rows run along the sum.
template <DType kType, int kCount>
__device__ __forceinline__ void multiply_transposed(float (&c)[kCount][4], std::uint64_t a, std::uint64_t b, bool adds);

// clang-format off: registers one by one
// The sums of a product, as operands: their numbers and their registers, each width those of the one before and more.
#define LEAN_SUMS_16 "%0, %1, %2, %3, %4, %5, %6, %7"
#define LEAN_SUMS_32 LEAN_SUMS_16 \
  ", %8, %9, %10, %11, %12, %13, %14, %15"
#define LEAN_SUMS_64 LEAN_SUMS_32 \
  ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define LEAN_SUMS_96 LEAN_SUMS_64 \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define LEAN_SUMS_128 LEAN_SUMS_96 \
  ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define LEAN_SUMS_192 LEAN_SUMS_128 \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79" \
  ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define LEAN_SUMS_256 LEAN_SUMS_192 \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111" \
  ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define LEAN_COLUMN(i) "+f"(c[i][0]), "+f"(c[i][1]), "+f"(c[i][2]), "+f"(c[i][3])
#define LEAN_FOUR_COLUMNS(i) LEAN_COLUMN(i), LEAN_COLUMN(i + 1), LEAN_COLUMN(i + 2), LEAN_COLUMN(i + 3)
#define LEAN_COLUMNS_16 LEAN_COLUMN(0), LEAN_COLUMN(1)
#define LEAN_COLUMNS_32 LEAN_FOUR_COLUMNS(0)
#define LEAN_COLUMNS_64 LEAN_COLUMNS_32, LEAN_FOUR_COLUMNS(4)
#define LEAN_COLUMNS_96 LEAN_COLUMNS_64, LEAN_FOUR_COLUMNS(8)
#define LEAN_COLUMNS_128 LEAN_COLUMNS_96, LEAN_FOUR_COLUMNS(12)
#define LEAN_COLUMNS_192 LEAN_COLUMNS_128, LEAN_FOUR_COLUMNS(16), LEAN_FOUR_COLUMNS(20)
#define LEAN_COLUMNS_256 LEAN_COLUMNS_192, LEAN_FOUR_COLUMNS(24), LEAN_FOUR_COLUMNS(28)
#ifdef LEAN_CUDA_WARPGROUPS
#define LEAN_MULTIPLY(N, TYPE, A, B, ADDS, TRANSPOSED, ...) \
  asm volatile("{ .reg .pred p; setp.ne.b32 p, " ADDS ", 0; wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" \
               LEAN_SUMS_##N "}, " A ", " B ", p, 1, 1, " TRANSPOSED "; }" \
               : LEAN_COLUMNS_##N \
               : __VA_ARGS__, "l"(b), "r"(static_cast<std::uint32_t>(adds)))
#else
#define LEAN_MULTIPLY(N, TYPE, A, B, ADDS, TRANSPOSED, ...)
#endif
template <>
__device__ __forceinline__ void multiply_rows<DType::kFloat16, 2>(float (&c)[2][4], std::uint64_t a, std::uint64_t b, bool adds) {
  LEAN_MULTIPLY(16, "f16", "%8", "%9", "%10", "0, 0", "l"(a));
}
template <>
__device__ __forceinline__ void multiply_transposed<DType::kFloat16, 2>(float (&c)[2][4], std::uint64_t a, std::uint64_t b, bool adds) {
  LEAN_MULTIPLY(16, "f16", "%8", "%9", "%10", "1, 0", "l"(a));
}
template <>
__device__ __forceinline__ void multiply_rows<DType::kBFloat16, 2>(float (&c)[2][4], std::uint64_t a, std::uint64_t b, bool adds) {
  LEAN_MULTIPLY(16, "bf16", "%8", "%9", "%10", "0, 0", "l"(a));
}
template <>
__device__ __forceinline__ void multiply_transposed<DType::kBFloat16, 2>(float (&c)[2][4], std::uint64_t a, std::uint64_t b, bool adds) {
  LEAN_MULTIPLY(16, "bf16", "%8", "%9", "%10", "1, 0", "l"(a));
}
template <>
__device__ __forceinline__ void multiply_transposed<DType::kFloat16, 4>(float (&c)[4][4], std::uint64_t a, std::uint64_t b, bool adds) {
  LEAN_MULTIPLY(32, "f16", "%16", "%17", "%18", "1, 0", "l"(a));
}
template <>
__device__ __forceinline__ void multiply_transposed<DType::kBFloat16, 4>(float (&c)[4][4], std::uint64_t a, std::uint64_t b, bool adds) {
  LEAN_MULTIPLY(32, "bf16", "%16", "%17", "%18", "1, 0", "l"(a));
}
template <>
__device__ __forceinline__ void multiply_rows<DType::kFloat16, 4>(float (&c)[4][4], std::uint64_t a, std::uint64_t b, bool adds) {
  LEAN_MULTIPLY(32, "f16", "%16", "%17", "%18", "0, 0", "l"(a));
}
template <>
__device__ __forceinline__ void multiply_rows<DType::kBFloat16, 4>(float (&c)[4][4], std::uint64_t a, std::uint64_t b, bool adds) {
  LEAN_MULTIPLY(32, "bf16", "%16", "%17", "%18", "0, 0", "l"(a));
}
template <>
__device__ __forceinline__ void multiply_rows<DType::kFloat16, 8>(float (&c)[8][4], std::uint64_t a, std::uint64_t b, bool adds) {
  LEAN_MULTIPLY(64, "f16", "%32", "%33", "%34", "0, 0", "l"(a));
}
template <>
__device__ __forceinline__ void multiply_columns<DType::kFloat16, 8>(float (&c)[8][4], const std::uint32_t (&a)[4], std::uint64_t b, bool adds) {
  LEAN_MULTIPLY(64, "f16", "{%32, %33, %34, %35}", "%36", "%37", "1", "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]));
}
template <>
__device__ __forceinline__ void multiply_rows<DType::kBFloat16, 8>(float (&c)[8][4], std::uint64_t a, std::uint64_t b, bool adds) {
  LEAN_MULTIPLY(64, "bf16", "%32", "%33", "%34", "0, 0", "l"(a));
}
template <>
__device__ __forceinline__ void multiply_columns<DType::kBFloat16, 8>(float (&c)[8][4], const std::uint32_t (&a)[4], std::uint64_t b, bool adds) {
  LEAN_MULTIPLY(64, "bf16", "{%32, %33, %34, %35}", "%36", "%37", "1", "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]));
}
template <>
__device__ __forceinline__ void multiply_rows<DType::kFloat16, 12>(float (&c)[12][4], std::uint64_t a, std::uint64_t b, bool adds) {
  LEAN_MULTIPLY(96, "f16", "%48", "%49", "%50", "0, 0", "l"(a));
}
template <>
__device__ __forceinline__ void multiply_columns<DType::kFloat16, 12>(float (&c)[12][4], const std::uint32_t (&a)[4], std::uint64_t b, bool adds) {
  LEAN_MULTIPLY(96, "f16", "{%48, %49, %50, %51}", "%52", "%53", "1", "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]));
}
template <>
__device__ __forceinline__ void multiply_rows<DType::kBFloat16, 12>(float (&c)[12][4], std::uint64_t a, std::uint64_t b, bool adds) {
  LEAN_MULTIPLY(96, "bf16", "%48", "%49", "%50", "0, 0", "l"(a));
}
template <>
__device__ __forceinline__ void multiply_columns<DType::kBFloat16, 12>(float (&c)[12][4], const std::uint32_t (&a)[4], std::uint64_t b, bool adds) {
  LEAN_MULTIPLY(96, "bf16", "{%48, %49, %50, %51}", "%52", "%53", "1", "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]));
}
template <>
__device__ __forceinline__ void multiply_rows<DType::kFloat16, 16>(float (&c)[16][4], std::uint64_t a, std::uint64_t b, bool adds) {
  LEAN_MULTIPLY(128, "f16", "%64", "%65", "%66", "0, 0", "l"(a));
}
template <>
__device__ __forceinline__ void multiply_columns<DType::kFloat16, 16>(float (&c)[16][4], const std::uint32_t (&a)[4], std::uint64_t b, bool adds) {
  LEAN_MULTIPLY(128, "f16", "{%64, %65, %66, %67}", "%68", "%69", "1", "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]));
}
template <>
__device__ __forceinline__ void multiply_rows<DType::kBFloat16, 16>(float (&c)[16][4], std::uint64_t a, std::uint64_t b, bool adds) {
  LEAN_MULTIPLY(128, "bf16", "%64", "%65", "%66", "0, 0", "l"(a));
}
template <>
__device__ __forceinline__ void multiply_columns<DType::kBFloat16, 16>(float (&c)[16][4], const std::uint32_t (&a)[4], std::uint64_t b, bool adds) {
  LEAN_MULTIPLY(128, "bf16", "{%64, %65, %66, %67}", "%68", "%69", "1", "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]));
}
template <>
__device__ __forceinline__ void multiply_columns<DType::kFloat16, 24>(float (&c)[24][4], const std::uint32_t (&a)[4], std::uint64_t b, bool adds) {
  LEAN_MULTIPLY(192, "f16", "{%96, %97, %98, %99}", "%100", "%101", "1", "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]));
}
template <>
__device__ __forceinline__ void multiply_columns<DType::kBFloat16, 24>(float (&c)[24][4], const std::uint32_t (&a)[4], std::uint64_t b, bool adds) {
  LEAN_MULTIPLY(192, "bf16", "{%96, %97, %98, %99}", "%100", "%101", "1", "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]));
}
template <>
__device__ __forceinline__ void multiply_columns<DType::kFloat16, 32>(float (&c)[32][4], const std::uint32_t (&a)[4], std::uint64_t b, bool adds) {
  LEAN_MULTIPLY(256, "f16", "{%128, %129, %130, %131}", "%132", "%133", "1", "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]));
}
template <>
__device__ __forceinline__ void multiply_columns<DType::kBFloat16, 32>(float (&c)[32][4], const std::uint32_t (&a)[4], std::uint64_t b, bool adds) {
  LEAN_MULTIPLY(256, "bf16", "{%128, %129, %130, %131}", "%132", "%133", "1", "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]));
}
#undef LEAN_MULTIPLY
#undef LEAN_COLUMN
#undef LEAN_FOUR_COLUMNS
#undef LEAN_COLUMNS_16
#undef LEAN_SUMS_16
#undef LEAN_COLUMNS_32
#undef LEAN_SUMS_32
#undef LEAN_COLUMNS_64
#undef LEAN_SUMS_64
#undef LEAN_COLUMNS_96
#undef LEAN_SUMS_96
#undef LEAN_COLUMNS_128
#undef LEAN_SUMS_128
#undef LEAN_COLUMNS_192
#undef LEAN_SUMS_192
#undef LEAN_COLUMNS_256
#undef LEAN_SUMS_256
// clang-format on

}  // namespace lean::cuda::ptx
