#include "backends/cuda/kernel_table.hpp"

#include <algorithm>
#include <iterator>

namespace lean::cuda {
namespace {

/// Those of this build: src/backends/cuda/CMakeLists.txt names them, as in "F(f16_d64) F(f16_d128)".
using Family = const KernelFamilyEntries& (*)() noexcept;
#define F(name) kernels_##name,
constexpr Family kFamilies[] = {LEAN_CUDA_FAMILIES};
#undef F

/// The family of the narrowest width that holds head_dim, or null where it is left out.
const KernelFamilyEntries* family_of(DType kv_dtype, std::int32_t head_dim) noexcept {
  const auto width = std::find_if(std::begin(kHeadDims), std::end(kHeadDims), [&](std::int32_t dims) { return head_dim <= dims; });
  if (width == std::end(kHeadDims)) return nullptr;
  for (const Family family : kFamilies) {
    const KernelConfig& config = family().front().config;
    const bool holds_type = config.fp8() ? is_fp8(kv_dtype) : config.dtype == kv_dtype;
    if (holds_type && config.head_dim == *width) return &family();
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
