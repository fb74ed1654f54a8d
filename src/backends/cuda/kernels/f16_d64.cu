#include "backends/cuda/kernel/instantiate.cuh"

namespace lean::cuda {

const KernelFamilyEntries& kernels_f16_d64() noexcept { return kEntriesOf<KernelFamily{DType::kFloat16, 64}>; }

}  // namespace lean::cuda
