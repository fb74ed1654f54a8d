// mbarrier: arrival counts and transaction bytes in shared memory (PTX ISA, "Parallel Synchronization ... mbarrier").
// A barrier's phase flips when all arrivals and all promised bytes have come; wait() takes the parity of the phase to pass.
#pragma once

#include <cstdint>

#include "backends/cuda/ptx/arch.cuh"
#include "backends/cuda/ptx/shared.cuh"

namespace lean::cuda::ptx {

__device__ __forceinline__ void barrier_init(std::uint64_t* barrier, std::uint32_t arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}

/// What it lies in is memory again, of which another may be made.
__device__ __forceinline__ void barrier_end(std::uint64_t* barrier) {
  asm volatile("mbarrier.inval.shared.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
}

/// Makes initialised barriers visible to the TMA; every thread still needs __syncthreads().
__device__ __forceinline__ void barrier_init_fence() {
#if LEAN_CUDA_ARCH >= 900
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

__device__ __forceinline__ void barrier_arrive(std::uint64_t* barrier) {
  asm volatile("{ .reg .b64 state; mbarrier.arrive.shared.b64 state, [%0]; }" ::"r"(shared_address(barrier)) : "memory");
}

/// What a warp that has met counts as: one arrival, by a lane; or all its lanes', where a tool is to follow that does not know how
/// __syncwarp() orders the others' accesses before that lane's arrival (racecheck; LEAN_CUDA_EVERY_LANE_ARRIVES).
#ifdef LEAN_CUDA_EVERY_LANE_ARRIVES
inline constexpr std::uint32_t kWarpArrivals = 32;
#else
inline constexpr std::uint32_t kWarpArrivals = 1;
#endif

/// A warp's arrival, by all its lanes; one of them leads.
__device__ __forceinline__ void barrier_arrive_by_warp(std::uint64_t* barrier, bool leads) {
  __syncwarp();
  if (leads || kWarpArrivals > 1) barrier_arrive(barrier);
}

/// One arrival, and `bytes` more to come by bulk copies.
__device__ __forceinline__ void barrier_arrive_expect(std::uint64_t* barrier, std::uint32_t bytes) {
#if LEAN_CUDA_ARCH >= 900
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes) : "memory");
#endif
}

/// `bytes` more to come by bulk or tensor copies, and no arrival.
__device__ __forceinline__ void barrier_expect(std::uint64_t* barrier, std::uint32_t bytes) {
#if LEAN_CUDA_ARCH >= 900
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes) : "memory");
#endif
}

/// The arrivals of all threads of a warp that has met, by a lane: where a barrier counts threads, and they have nothing under way.
__device__ __forceinline__ void barrier_arrive_for_warp(std::uint64_t* barrier, bool leads) {
#if LEAN_CUDA_ARCH >= 900
  __syncwarp();
  if (!leads) return;
  asm volatile("{ .reg .b64 state; mbarrier.arrive.shared.b64 state, [%0], 32; }" ::"r"(shared_address(barrier)) : "memory");
#endif
}

/// The calling thread's arrival, once all its cp.async before this have landed. The barrier's count includes it.
__device__ __forceinline__ void barrier_arrive_after_copies(std::uint64_t* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
}

__device__ __forceinline__ void barrier_wait(std::uint64_t* barrier, std::uint32_t parity) {
  std::uint32_t done;
  do {
#if LEAN_CUDA_ARCH >= 900  // suspends the thread for a while in hardware
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(done)
                 : "r"(shared_address(barrier)), "r"(parity)
                 : "memory");
#else
    asm volatile("{ .reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(done)
                 : "r"(shared_address(barrier)), "r"(parity)
                 : "memory");
#endif
  } while (done == 0);
}

/// Whether the phase has passed, without waiting for it.
[[nodiscard]] __device__ __forceinline__ bool barrier_has_passed(std::uint64_t* barrier, std::uint32_t parity) {
  std::uint32_t done;
  asm volatile("{ .reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
               : "=r"(done)
               : "r"(shared_address(barrier)), "r"(parity)
               : "memory");
  return done != 0;
}

/// A barrier of the first `threads` threads that name it; id 0 is __syncthreads().
__device__ __forceinline__ void named_barrier(std::uint32_t id, std::uint32_t threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/// The same; whether any of its threads says so.
[[nodiscard]] __device__ __forceinline__ bool named_barrier_any(std::uint32_t id, std::uint32_t threads, bool says) {
  std::uint32_t any;
  asm volatile("{ .reg .pred p, q; setp.ne.b32 p, %3, 0; bar.red.or.pred q, %1, %2, p; selp.b32 %0, 1, 0, q; }"
               : "=r"(any)
               : "r"(id), "r"(threads), "r"(static_cast<std::uint32_t>(says))
               : "memory");
  return any != 0;
}

/// Arrives at a named barrier without waiting: for those who have something to tell the ones who wait.
__device__ __forceinline__ void named_barrier_arrive(std::uint32_t id, std::uint32_t threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

}  // namespace lean::cuda::ptx
