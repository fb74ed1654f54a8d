// Instantiates a family: every row of one type and head dimension, of every architecture. Each family has a translation unit of
// its own (kernel_family.cu.in).
#pragma once

#include <array>
#include <cstddef>
#include <iterator>
#include <span>
#include <utility>

#include "backends/cuda/kernel/decode_kernel.cuh"
#include "backends/cuda/kernel_rows.hpp"
#include "backends/cuda/kernel_table.hpp"

namespace lean::cuda {

template <KernelConfig kConfig>
[[nodiscard]] constexpr KernelEntry entry_of() noexcept {
  return {.config = kConfig,
          .kernel = decode_kernel<kConfig.architecture, kConfig.dtype, kConfig.head_dim, kConfig.q_rows, kConfig.scope>,
          .fixed_shared_bytes = {shared_bytes<kConfig>(false), shared_bytes<kConfig>(true)}};
}

[[nodiscard]] constexpr std::size_t row_count_of(const KernelFamily& family) noexcept {
  std::size_t count = 0;
  for (const ArchitectureRows& table : kKernelRows) {
    for (const KernelRow& row : table) count += family.has(row) ? 1 : 0;
  }
  return count;
}

template <KernelFamily kFamily>
[[nodiscard]] constexpr auto configs_of() noexcept {
  std::array<KernelConfig, row_count_of(kFamily)> configs;
  std::size_t next = 0;
  for (const ArchitectureRows& table : kKernelRows) {
    for (const KernelRow& row : table) {
      if (kFamily.has(row)) configs[next++] = config_of(table.architecture, row, kFamily.dtype);
    }
  }
  return configs;
}

template <KernelFamily kFamily, std::size_t... kIndex>
[[nodiscard]] constexpr auto entries_of(std::index_sequence<kIndex...>) noexcept {
  constexpr auto kConfigs = configs_of<kFamily>();
  return std::array{entry_of<kConfigs[kIndex]>()...};
}

template <KernelFamily kFamily>
std::span<const KernelEntry> kernels_of() noexcept {
  static constexpr auto kEntries = entries_of<kFamily>(std::make_index_sequence<row_count_of(kFamily)>());
  return kEntries;
}

}  // namespace lean::cuda
