// The kernels of this build, for the host: one entry for each variant of kernel_rows.hpp and each type that it serves.
#pragma once

#include <cstdint>
#include <span>

#include "backends/cuda/kernel_config.hpp"
#include "backends/cuda/kernel_rows.hpp"
#include "lean/exchange.hpp"

namespace lean::cuda {

struct DeviceCall;
struct TensorMaps;

struct KernelEntry {
  KernelConfig config;
  void (*kernel)(DeviceCall, TensorMaps) = nullptr;
  void (*exchanging_kernel)(DeviceCall, TensorMaps, Exchange) = nullptr;  // of a scope that exchanges; else `kernel`
  std::int64_t fixed_shared_bytes[2] = {};  // dynamic shared memory beside the ring: any line, a flat line
};

/// A family's kernels, newer architectures' first, and its wide ones; each defined in a translation unit of the family's own
/// (kernel_family.cu.in).
template <KernelFamily kFamily>
[[nodiscard]] std::span<const KernelEntry> kernels_of() noexcept;
template <KernelFamily kFamily>
[[nodiscard]] std::span<const KernelEntry> wide_kernels_of() noexcept;

/// Those of K and V of this type and of the narrowest width that holds head_dim. None: another type, head_dim above all widths, or
/// a family that is left out of the build (LEAN_CUDA_FAMILIES).
[[nodiscard]] std::span<const KernelEntry> kernels_for(DType kv_dtype, std::int32_t head_dim) noexcept;
/// The same of wide and latent kernels, which run where Device::warpgroups says so: those of the narrowest width of their own that
/// is built. None, too: the build is without them (LEAN_CUDA_WIDE).
[[nodiscard]] std::span<const KernelEntry> wide_kernels_for(DType kv_dtype, std::int32_t head_dim) noexcept;

/// The kernel of a scope that the device runs, from `kernels`: the first row block that holds `rows`, or the largest there is.
/// Null: none.
[[nodiscard]] const KernelEntry* find_kernel(std::span<const KernelEntry> kernels, Architecture device, Scope scope,
                                             std::int64_t rows) noexcept;

}  // namespace lean::cuda
