#include "backends/cuda/kernel/instantiate.cuh"

namespace lean::cuda {

const KernelFamilyEntries& kernels_fp8_d64() noexcept { return kEntriesOf<KernelFamily{DType::kFloat8E4M3, 64}>; }

}  // namespace lean::cuda
