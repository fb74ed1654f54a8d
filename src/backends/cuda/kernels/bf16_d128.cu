#include "backends/cuda/kernel/instantiate.cuh"

namespace lean::cuda {

const KernelFamilyEntries& kernels_bf16_d128() noexcept { return kEntriesOf<KernelFamily{DType::kBFloat16, 128}>; }

}  // namespace lean::cuda
