#include "backends/cuda/kernel_table.hpp"

#include <cstddef>
#include <iterator>

namespace lean::cuda {
namespace {

/// By type and width, narrowest first.
const KernelFamilyEntries* family_of(DType kv_dtype, std::int32_t head_dim) noexcept {
  using Family = const KernelFamilyEntries& (*)() noexcept;
  static constexpr Family kF16[] = {kernels_f16_d64, kernels_f16_d128, kernels_f16_d256};
  static constexpr Family kBF16[] = {kernels_bf16_d64, kernels_bf16_d128, kernels_bf16_d256};
  static constexpr Family kFp8[] = {kernels_fp8_d64, kernels_fp8_d128, kernels_fp8_d256};
  if (kv_dtype == DType::kFloat32) return nullptr;
  const Family* families = kv_dtype == DType::kFloat16 ? kF16 : (kv_dtype == DType::kBFloat16 ? kBF16 : kFp8);
  for (std::size_t width = 0; width < std::size(kHeadDims); ++width) {
    if (head_dim <= kHeadDims[width]) return families[width] != nullptr ? &families[width]() : nullptr;
  }
  return nullptr;
}

}  // namespace

const KernelEntry* find_kernel(DType kv_dtype, std::int32_t head_dim, std::int64_t rows, Scope scope) noexcept {
  const KernelFamilyEntries* family = family_of(kv_dtype, head_dim);
  if (family == nullptr) return nullptr;
  const KernelEntry* found = nullptr;
  for (const KernelEntry& entry : *family) {
    if (entry.kernel == nullptr || entry.config.scope != scope) continue;
    found = &entry;
    if (entry.config.q_rows >= rows) break;
  }
  return found;
}

}  // namespace lean::cuda
