// Words of shared memory by their 32-bit addresses (PTX ISA, "ld", "st").
#pragma once

#include <cstdint>

namespace lean::cuda::ptx {

[[nodiscard]] __device__ __forceinline__ std::uint32_t shared_address(const void* pointer) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void store_shared(std::uint32_t address, const uint4& x) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w) : "memory");
}

__device__ __forceinline__ void store_shared_word(std::uint32_t address, std::uint32_t x) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(x) : "memory");
}

[[nodiscard]] __device__ __forceinline__ std::uint32_t load_shared_word(std::uint32_t address) {
  std::uint32_t x;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(address) : "memory");
  return x;
}

[[nodiscard]] __device__ __forceinline__ float load_shared_float(const float& at) {
  return __uint_as_float(load_shared_word(shared_address(&at)));
}

[[nodiscard]] __device__ __forceinline__ uint4 load_shared_16(std::uint32_t address) {
  uint4 x;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(address) : "memory");
  return x;
}

[[nodiscard]] __device__ __forceinline__ uint2 load_shared_8(std::uint32_t address) {
  uint2 x;
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(x.x), "=r"(x.y) : "r"(address) : "memory");
  return x;
}

/// A number where it is below 0, else nothing: one that never is has to be known by then all the same.
__device__ __forceinline__ void store_shared_below_zero(std::uint32_t address, float x) {
  asm volatile("{ .reg .pred p; setp.lt.f32 p, %1, 0f00000000; @p st.shared.f32 [%0], %1; }" ::"r"(address), "f"(x) : "memory");
}

/// A word that this thread keeps there for itself, and that the compiler is not to keep in a register instead.
__device__ __forceinline__ void keep_shared(std::uint32_t address, std::uint32_t x) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(x));
}
[[nodiscard]] __device__ __forceinline__ std::uint32_t kept_shared(std::uint32_t address) {
  std::uint32_t x;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(address));
  return x;
}

/// A word that other threads of the CTA may be reading or writing.
/// Source: PTX ISA, "Memory Consistency Model": strong relaxed operations.
__device__ __forceinline__ void store_shared_relaxed(std::int32_t* at, std::int32_t x) {
  asm volatile("st.relaxed.cta.shared.s32 [%0], %1;" ::"r"(shared_address(at)), "r"(x) : "memory");
}
[[nodiscard]] __device__ __forceinline__ std::int32_t load_shared_relaxed(const std::int32_t* at) {
  std::int32_t x;
  asm volatile("ld.relaxed.cta.shared.s32 %0, [%1];" : "=r"(x) : "r"(shared_address(at)) : "memory");
  return x;
}

/// Between what this thread wrote and its arrival at a barrier: those who pass the barrier see both.
__device__ __forceinline__ void fence_before_arrival() { asm volatile("fence.acq_rel.cta;" ::: "memory"); }

}  // namespace lean::cuda::ptx
