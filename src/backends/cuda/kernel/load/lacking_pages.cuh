// Pages whose id lies outside the pool: their tokens are 0 in a stage and count as not there, and the workspace says so. The
// producer reports them; the tiles look up every token's page from the first on that is lacking.
#pragma once

#include "backends/cuda/kernel/cta_memory.cuh"
#include "backends/cuda/ptx/copy.cuh"
#include "backends/cuda/ptx/shared.cuh"
#include "backends/cuda/sticky.cuh"

namespace lean::cuda {

/// Before the stage is announced full. Pairs with lacks_pages().
template <KernelConfig kConfig>
__device__ void report_lacking_page(const DeviceCall& call, CtaShared<kConfig>& shared) {
  report_sticky(call.fixup.slots.header(), StatusCode::kBadPageIndex);
  ptx::store_shared_relaxed(&shared.lacks_pages, 1);
  ptx::fence_before_arrival();
  ptx::fence_before_copies();
}

/// Once a stage is known to be full: whether a page of it, or of one before, was lacking. Pairs with report_lacking_page().
template <KernelConfig kConfig>
[[nodiscard]] __device__ __forceinline__ bool lacks_pages(const CtaShared<kConfig>& shared) {
  return ptx::load_shared_relaxed(&shared.lacks_pages) != 0;
}

}  // namespace lean::cuda
