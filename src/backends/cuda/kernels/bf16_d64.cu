#include "backends/cuda/kernel/instantiate.cuh"

namespace lean::cuda {

const KernelFamilyEntries& kernels_bf16_d64() noexcept { return kEntriesOf<KernelFamily{DType::kBFloat16, 64}>; }

}  // namespace lean::cuda
