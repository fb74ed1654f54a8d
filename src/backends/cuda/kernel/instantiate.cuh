// Instantiates a family: every row block of one type and head dimension. Each family has a translation unit of its own.
#pragma once

#include "backends/cuda/kernel/decode_kernel.cuh"
#include "backends/cuda/kernel_table.hpp"

namespace lean::cuda {

template <KernelFamily kFamily, std::int32_t kRows, Scope kScope>
[[nodiscard]] constexpr KernelEntry entry_of() noexcept {
  if constexpr (kRows > max_row_block(kFamily.head_dim)) {
    return {};
  } else {
    constexpr KernelConfig kConfig = config_of(kFamily, kRows, kScope);
    return {.config = kConfig,
            .kernel = decode_kernel<kFamily.dtype, kFamily.head_dim, kRows, kScope>,
            .fixed_shared_bytes = {shared_bytes<kConfig>(false), shared_bytes<kConfig>(true)}};
  }
}

template <KernelFamily kFamily>
inline constexpr KernelFamilyEntries kEntriesOf = {
    entry_of<kFamily, 16, Scope::kDecodeStep>(),   entry_of<kFamily, 16, Scope::kStridedStep>(),
    entry_of<kFamily, 16, Scope::kAnyCall>(),      entry_of<kFamily, 32, Scope::kDecodeStep>(),
    entry_of<kFamily, 32, Scope::kStridedStep>(),  entry_of<kFamily, 32, Scope::kAnyCall>(),
    entry_of<kFamily, 64, Scope::kDecodeStep>(),   entry_of<kFamily, 64, Scope::kStridedStep>(),
    entry_of<kFamily, 64, Scope::kAnyCall>(),      entry_of<kFamily, 128, Scope::kDecodeStep>(),
    entry_of<kFamily, 128, Scope::kStridedStep>(), entry_of<kFamily, 128, Scope::kAnyCall>()};

}  // namespace lean::cuda
