#include "backends/cuda/kernel_table.hpp"

namespace lean::cuda {
namespace {

const KernelFamilyEntries* family_of(DType dtype, std::int32_t head_dim) noexcept {
  const bool f16 = dtype == DType::kFloat16;
  if (!f16 && dtype != DType::kBFloat16) return nullptr;
  if (head_dim <= 64) return f16 ? &kernels_f16_d64() : &kernels_bf16_d64();
  if (head_dim <= 128) return f16 ? &kernels_f16_d128() : &kernels_bf16_d128();
  if (head_dim <= 256) return f16 ? &kernels_f16_d256() : &kernels_bf16_d256();
  return nullptr;
}

}  // namespace

const KernelEntry* find_kernel(DType dtype, std::int32_t head_dim, std::int64_t rows) noexcept {
  const KernelFamilyEntries* family = family_of(dtype, head_dim);
  if (family == nullptr) return nullptr;
  const KernelEntry* found = nullptr;
  for (const KernelEntry& entry : *family) {
    if (entry.kernel == nullptr) continue;
    found = &entry;
    if (entry.config.q_rows >= rows) break;
  }
  return found;
}

}  // namespace lean::cuda
