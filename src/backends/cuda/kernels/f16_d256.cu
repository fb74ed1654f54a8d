#include "backends/cuda/kernel/instantiate.cuh"

namespace lean::cuda {

const KernelFamilyEntries& kernels_f16_d256() noexcept { return kEntriesOf<KernelFamily{DType::kFloat16, 256}>; }

}  // namespace lean::cuda
