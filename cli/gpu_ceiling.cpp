#include "cli/gpu_ceiling.hpp"

#include <limits>

#include "cli/call_chain.hpp"

namespace lean::cli {
namespace {

constexpr std::int64_t kWordBytes = 16;
constexpr double kTryUs = 3000.0;  // of one kernel in one try
constexpr int kTries = 3;

}  // namespace

GpuReadCeiling::GpuReadCeiling(const DecodeProblem& problem, const std::vector<gpu::ReadKernel>& kernels)
    : pool_(problem.pool()), bytes_(problem.spec().kv_bytes() / kWordBytes * kWordBytes), kernel_(&kernels.at(0)) {
  double best_us = std::numeric_limits<double>::max();
  for (const gpu::ReadKernel& kernel : kernels) {
    const CallChain chain([&](std::int64_t copy, void* stream) { read(kernel, copy, stream); },
                          {.copies = pool_.copies(), .kv_bytes = bytes_});
    double us = std::numeric_limits<double>::max();
    for (int i = 0; i < kTries; ++i) us = std::min(us, chain.us_per_call(kTryUs));
    if (us < best_us) kernel_ = &kernel;
    best_us = std::min(best_us, us);
  }
}

void GpuReadCeiling::read(const gpu::ReadKernel& kernel, std::int64_t copy, void* stream) const {
  // V follows K, so both are one run of bytes.
  kernel.enqueue(pool_.k(copy), bytes_, stream);
}

}  // namespace lean::cli
