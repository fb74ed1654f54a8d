// Instantiates a family: every row block of one type and head dimension. Each family has a translation unit of its own.
#pragma once

#include <cstddef>
#include <iterator>
#include <utility>

#include "backends/cuda/kernel/decode_kernel.cuh"
#include "backends/cuda/kernel_table.hpp"

namespace lean::cuda {

template <KernelFamily kFamily, std::int32_t kRows, Scope kScope>
[[nodiscard]] constexpr KernelEntry entry_of() noexcept {
  if constexpr (!has_variant(kFamily, kRows, kScope)) {
    return {.config = config_of(kFamily, kRows, kScope)};
  } else {
    constexpr KernelConfig kConfig = config_of(kFamily, kRows, kScope);
    return {.config = kConfig,
            .kernel = decode_kernel<kFamily.dtype, kFamily.head_dim, kRows, kScope>,
            .fixed_shared_bytes = {shared_bytes<kConfig>(false), shared_bytes<kConfig>(true)}};
  }
}

/// Every row block in every scope.
template <KernelFamily kFamily, std::size_t... kIndex>
[[nodiscard]] constexpr KernelFamilyEntries entries_of(std::index_sequence<kIndex...>) noexcept {
  return {entry_of<kFamily, kRowBlocks[kIndex / std::size(kScopes)], kScopes[kIndex % std::size(kScopes)]>()...};
}

template <KernelFamily kFamily>
inline constexpr KernelFamilyEntries kEntriesOf =
    entries_of<kFamily>(std::make_index_sequence<std::size(kRowBlocks) * std::size(kScopes)>());

}  // namespace lean::cuda
