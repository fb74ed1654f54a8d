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
  KernelEntry entry{.config = kConfig, .fixed_shared_bytes = {shared_bytes<kConfig>(false), shared_bytes<kConfig>(true)}};
  if constexpr (kConfig.exchanges()) {
    entry.exchanging_kernel =
        exchanging_decode_kernel<kConfig.architecture, kConfig.dtype, kConfig.head_dim, kConfig.q_rows, kConfig.scope>;
  } else {
    entry.kernel = decode_kernel<kConfig.architecture, kConfig.dtype, kConfig.head_dim, kConfig.q_rows, kConfig.scope>;
  }
  return entry;
}

/// Calls `visit` with each of a family's rows and its architecture: wide ones, or all others.
template <typename TVisit>
constexpr void visit_rows(const KernelFamily& family, bool wide, const TVisit& visit) noexcept {
  const auto visit_table = [&](const ArchitectureRows& table) {
    for (const KernelRow& row : table) {
      if (family.has(row)) visit(table.architecture, row);
    }
  };
  if (wide) return visit_table(kWideRows);
  for (const ArchitectureRows& table : kKernelRows) visit_table(table);
}

[[nodiscard]] constexpr std::size_t row_count_of(const KernelFamily& family, bool wide) noexcept {
  std::size_t count = 0;
  visit_rows(family, wide, [&](Architecture, const KernelRow&) { ++count; });
  return count;
}

template <KernelFamily kFamily, bool kWide>
[[nodiscard]] constexpr auto configs_of() noexcept {
  std::array<KernelConfig, row_count_of(kFamily, kWide)> configs;
  std::size_t next = 0;
  visit_rows(kFamily, kWide, [&](Architecture architecture, const KernelRow& row) {
    configs[next++] = config_of(architecture, row, kFamily.dtype);
  });
  return configs;
}

template <KernelFamily kFamily, bool kWide, std::size_t... kIndex>
[[nodiscard]] constexpr auto entries_of(std::index_sequence<kIndex...>) noexcept {
  constexpr auto kConfigs = configs_of<kFamily, kWide>();
  return std::array{entry_of<kConfigs[kIndex]>()...};
}

template <KernelFamily kFamily>
std::span<const KernelEntry> kernels_of() noexcept {
  static constexpr auto kEntries = entries_of<kFamily, false>(std::make_index_sequence<row_count_of(kFamily, false)>());
  return kEntries;
}

template <KernelFamily kFamily>
std::span<const KernelEntry> wide_kernels_of() noexcept {
  static constexpr auto kEntries = entries_of<kFamily, true>(std::make_index_sequence<row_count_of(kFamily, true)>());
  return kEntries;
}

}  // namespace lean::cuda
