// Copies from global to shared memory that run beside the threads: by the Tensor Memory Accelerator (TMA, sm_90), which takes bulk
// copies (runs of bytes, cp.async.bulk) and tensor copies (boxes of a tensor, cp.async.bulk.tensor), and by threads (cp.async,
// sm_80).
// Source: PTX ISA, "Data Movement and Conversion Instructions: Asynchronous copy".
#pragma once

#include <cstddef>
#include <cstdint>

#include "backends/cuda/ptx/arch.cuh"
#include "backends/cuda/ptx/shared.cuh"

namespace lean::cuda::ptx {

/// A bulk copy, of one run of bytes: both addresses and the size are multiples of 16. Reports to the barrier. The L2 lets go of it
/// first: what is read once must not push out partials, queries and code.
__device__ __forceinline__ void bulk_copy(void* shared, const void* global, std::uint32_t bytes, std::uint64_t* barrier) {
#if LEAN_CUDA_ARCH >= 900
  asm volatile(
      "{ .reg .b64 policy;\n"
      "createpolicy.fractional.L2::evict_first.b64 policy, 1.0;\n"
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], policy; }" ::"r"(
          shared_address(shared)),
      "l"(global), "r"(bytes), "r"(shared_address(barrier))
      : "memory");
#endif
}

/// Has the TMA fetch a run of bytes into the L2: its address and size are multiples of 16.
__device__ __forceinline__ void prefetch_l2(const void* global, std::uint32_t bytes) {
#if LEAN_CUDA_ARCH >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(global), "r"(bytes) : "memory");
#endif
}

/// Has a line of kLineBytes fetched into the L2: of one thread's many, beside others' of the warp.
inline constexpr std::int32_t kLineBytes = 128;
__device__ __forceinline__ void prefetch_l2_line(const void* global) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(global) : "memory");
}

/// Where a box begins in a tensor: bytes of a row, then the other dimensions.
struct TensorPlace {
  std::int32_t byte;
  std::int32_t token;
  std::int32_t head;
  std::int32_t sequence;  // or page
};

/// The same in a tensor of queries, whose heads come before its tokens.
[[nodiscard]] __device__ __forceinline__ constexpr TensorPlace place_of_queries(std::int32_t byte, std::int32_t head,
                                                                                std::int32_t token, std::int32_t sequence) {
  return {.byte = byte, .token = head, .head = token, .sequence = sequence};
}

/// A tensor copy, of one box of the tensor that `map` (a CUtensorMap outside shared memory) describes. Reports to the barrier.
__device__ __forceinline__ void tensor_copy(void* shared, const void* map, const TensorPlace& from, std::uint64_t* barrier) {
#if LEAN_CUDA_ARCH >= 900
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(
          shared_address(shared)),
      "l"(map), "r"(from.byte), "r"(from.token), "r"(from.head), "r"(from.sequence), "r"(shared_address(barrier))
      : "memory");
#endif
}

/// The same of what is read once, which the L2 lets go of first.
__device__ __forceinline__ void tensor_copy_once(void* shared, const void* map, const TensorPlace& from, std::uint64_t* barrier) {
#if LEAN_CUDA_ARCH >= 900
  asm volatile(
      "{ .reg .b64 policy;\n"
      "createpolicy.fractional.L2::evict_first.b64 policy, 1.0;\n"
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%2, %3, %4, %5}], [%6], policy; }" ::"r"(shared_address(shared)),
      "l"(map), "r"(from.byte), "r"(from.token), "r"(from.head), "r"(from.sequence), "r"(shared_address(barrier))
      : "memory");
#endif
}

/// Has the TMA fetch a map that it will be asked to use.
__device__ __forceinline__ void prefetch_tensor_map(const void* map) {
#if LEAN_CUDA_ARCH >= 900
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
#endif
}

/// 16 bytes by this thread (sm_80), past the L1; 0 where `exists` is false, and `global` is not read then.
__device__ __forceinline__ void async_copy_16(std::uint32_t shared, const void* global, bool exists) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(exists ? 16U : 0U) : "memory");
}

/// 16 bytes into registers, past the L1, and the first to leave the L2; 0 where `exists` is false, and `global` is not read then.
[[nodiscard]] __device__ __forceinline__ uint4 load_past_l1_16(const void* global, bool exists) {
  uint4 x;
  asm volatile(
      "{ .reg .pred exists; .reg .b64 policy; setp.ne.u32 exists, %5, 0;\n"
      "createpolicy.fractional.L2::evict_first.b64 policy, 1.0;\n"
      "mov.b32 %0, 0; mov.b32 %1, 0; mov.b32 %2, 0; mov.b32 %3, 0;\n"
      "@exists ld.global.L1::no_allocate.L2::cache_hint.v4.b32 {%0, %1, %2, %3}, [%4], policy; }"
      : "=&r"(x.x), "=&r"(x.y), "=&r"(x.z), "=&r"(x.w)
      : "l"(global), "r"(static_cast<std::uint32_t>(exists))
      : "memory");
  return x;
}

/// 16, 8 or 4 bytes by this thread; 0 where `exists` is false.
__device__ __forceinline__ void async_copy(std::uint32_t shared, const void* global, std::int32_t bytes, bool exists) {
  if (bytes == 16) return async_copy_16(shared, global, exists);
  if (bytes == 8) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(shared), "l"(global), "r"(exists ? 8U : 0U) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared), "l"(global), "r"(exists ? 4U : 0U) : "memory");
  }
}

/// One byte by this thread, at once: for rows that begin anywhere.
__device__ __forceinline__ void copy_byte(std::uint32_t shared, const std::byte* global, bool exists) {
  const std::uint32_t x = exists ? static_cast<std::uint32_t>(*global) : 0U;
  asm volatile("st.shared.b8 [%0], %1;" ::"r"(shared), "r"(x) : "memory");
}

/// Between what this thread stored to shared memory and the TMA's copies to the same place (PTX ISA, "Async proxy").
__device__ __forceinline__ void fence_before_copies() {
#if LEAN_CUDA_ARCH >= 900
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

/// This thread's async_copy_16 since the last such call are a group.
__device__ __forceinline__ void group_async_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
/// Waits for all of this thread's groups but the last kLeft.
template <int kLeft>
__device__ __forceinline__ void await_async_groups() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
}

/// Waits for all of this thread's async_copy_16.
__device__ __forceinline__ void await_async_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

}  // namespace lean::cuda::ptx
