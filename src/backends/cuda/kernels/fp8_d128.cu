#include "backends/cuda/kernel/instantiate.cuh"

namespace lean::cuda {

const KernelFamilyEntries& kernels_fp8_d128() noexcept { return kEntriesOf<KernelFamily{DType::kFloat8E4M3, 128}>; }

}  // namespace lean::cuda
