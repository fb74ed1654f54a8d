// The kernels that are built, for the host: one entry a variant, found by type, head dimension and rows.
#pragma once

#include <array>
#include <cstdint>

#include "backends/cuda/kernel_config.hpp"

namespace lean::cuda {

struct DeviceCall;
struct TensorMaps;

struct KernelEntry {
  KernelConfig config;
  void (*kernel)(DeviceCall, TensorMaps) = nullptr;  // null: the family has no such row block
  std::int64_t fixed_shared_bytes[2] = {};           // dynamic shared memory beside the ring: any line, a flat line
};

using KernelFamilyEntries = std::array<KernelEntry, std::size(kRowBlocks) * std::size(kScopes)>;

/// One function a family, each defined in kernels/. The build may leave some out (LEAN_CUDA_FAMILIES).
[[nodiscard]] const KernelFamilyEntries& kernels_f16_d64() noexcept;
[[nodiscard]] const KernelFamilyEntries& kernels_f16_d128() noexcept;
[[nodiscard]] const KernelFamilyEntries& kernels_f16_d256() noexcept;
[[nodiscard]] const KernelFamilyEntries& kernels_bf16_d64() noexcept;
[[nodiscard]] const KernelFamilyEntries& kernels_bf16_d128() noexcept;
[[nodiscard]] const KernelFamilyEntries& kernels_bf16_d256() noexcept;
[[nodiscard]] const KernelFamilyEntries& kernels_fp8_d64() noexcept;
[[nodiscard]] const KernelFamilyEntries& kernels_fp8_d128() noexcept;
[[nodiscard]] const KernelFamilyEntries& kernels_fp8_d256() noexcept;

/// The narrowest variant of a scope for K and V of this type that holds head_dim, with the smallest row block that holds `rows` (or
/// the largest there is). Null when there is none: another type, head_dim above 256, or a family that is left out.
[[nodiscard]] const KernelEntry* find_kernel(DType kv_dtype, std::int32_t head_dim, std::int64_t rows, Scope scope) noexcept;

}  // namespace lean::cuda
