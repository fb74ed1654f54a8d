// DeviceAtomic: the atomics of arrivals (fixup/arrival.hpp) and of sticky faults (fixup/sticky.hpp) on device memory.
#pragma once

#include <cuda/atomic>

#include "fixup/arrival.hpp"

namespace lean::cuda {

struct DeviceAtomic {
  using Ref = ::cuda::atomic_ref<fixup::Counter, ::cuda::thread_scope_device>;
  __device__ static fixup::Counter fetch_add_acq_rel(fixup::Counter& counter, fixup::Counter amount) {
    return Ref(counter).fetch_add(amount, ::cuda::memory_order_acq_rel);
  }
  __device__ static fixup::Counter fetch_add_relaxed(fixup::Counter& counter, fixup::Counter amount) {
    return Ref(counter).fetch_add(amount, ::cuda::memory_order_relaxed);
  }
  __device__ static void store_relaxed(fixup::Counter& counter, fixup::Counter value) {
    Ref(counter).store(value, ::cuda::memory_order_relaxed);
  }
  __device__ static void store_release(fixup::Counter& counter, fixup::Counter value) {
    Ref(counter).store(value, ::cuda::memory_order_release);
  }
  __device__ static fixup::Counter load_acquire(fixup::Counter& counter) { return Ref(counter).load(::cuda::memory_order_acquire); }
  __device__ static fixup::Counter load_relaxed(fixup::Counter& counter) { return Ref(counter).load(::cuda::memory_order_relaxed); }
  __device__ static bool replace_relaxed(fixup::Counter& counter, fixup::Counter expected, fixup::Counter value) {
    return Ref(counter).compare_exchange_strong(expected, value, ::cuda::memory_order_relaxed);
  }
  __device__ static void relax() { __nanosleep(20); }
};

}  // namespace lean::cuda
