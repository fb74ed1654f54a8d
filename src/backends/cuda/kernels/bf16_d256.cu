#include "backends/cuda/kernel/instantiate.cuh"

namespace lean::cuda {

const KernelFamilyEntries& kernels_bf16_d256() noexcept { return kEntriesOf<KernelFamily{DType::kBFloat16, 256}>; }

}  // namespace lean::cuda
