#include "backends/cuda/kernel/instantiate.cuh"

namespace lean::cuda {

const KernelFamilyEntries& kernels_f16_d128() noexcept { return kEntriesOf<KernelFamily{DType::kFloat16, 128}>; }

}  // namespace lean::cuda
