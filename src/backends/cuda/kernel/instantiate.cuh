// Instantiates a family: every row block of one type and head dimension. Each family has a translation unit of its own.
#pragma once

#include "backends/cuda/kernel/decode_kernel.cuh"
#include "backends/cuda/kernel_table.hpp"

namespace lean::cuda {

template <KernelFamily kFamily, std::int32_t kRows>
[[nodiscard]] constexpr KernelEntry entry_of() noexcept {
  if constexpr (kRows > max_row_block(kFamily.head_dim)) {
    return {};
  } else {
    constexpr KernelConfig kConfig = config_of(kFamily, kRows);
    return {.config = kConfig,
            .kernel = decode_kernel<kFamily.dtype, kFamily.head_dim, kRows>,
            .fixed_shared_bytes = {shared_bytes<kConfig>(false), shared_bytes<kConfig>(true)}};
  }
}

template <KernelFamily kFamily>
inline constexpr KernelFamilyEntries kEntriesOf = {entry_of<kFamily, 16>(), entry_of<kFamily, 32>(), entry_of<kFamily, 64>(),
                                                   entry_of<kFamily, 128>()};

}  // namespace lean::cuda
