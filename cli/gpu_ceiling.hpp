// GpuReadCeiling: a pure read of as many bytes as a call on the GPU must read, from the same memory: what no attention kernel
// can beat there. The fastest of several kernels, chosen for this very size.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cli/decode_problem.hpp"
#include "cli/gpu.hpp"

namespace lean::cli {

class GpuReadCeiling {
 public:
  /// `kernels` outlives this, and is not empty.
  GpuReadCeiling(const DecodeProblem& problem, const std::vector<gpu::ReadKernel>& kernels);

  /// One pass over one copy of K and V.
  void enqueue(std::int64_t copy, void* stream) const { read(*kernel_, copy, stream); }

  [[nodiscard]] const std::string& kernel_name() const { return kernel_->name; }

 private:
  void read(const gpu::ReadKernel& kernel, std::int64_t copy, void* stream) const;

  const KvPool& pool_;
  std::int64_t bytes_;
  const gpu::ReadKernel* kernel_;
};

}  // namespace lean::cli
