// The kernels of this build, found by type, width, scope and rows. What is built follows from LEAN_CUDA_FAMILIES.
#include "backends/cuda/kernel_table.hpp"

#include <algorithm>
#include <array>
#include <iterator>
#include <string_view>
#include <utility>

namespace lean::cuda {
namespace {

/// "f16_d64 bf16_d128": what LEAN_CUDA_FAMILIES asked for (CMakeLists.txt). Empty: every family.
constexpr std::string_view kAskedFor = LEAN_CUDA_FAMILIES;

constexpr bool is_built(std::string_view name) noexcept {
  if (kAskedFor.empty()) return true;
  for (std::string_view rest = kAskedFor; !rest.empty();) {
    const std::size_t end = std::min(rest.find(' '), rest.size());
    if (rest.substr(0, end) == name) return true;
    rest.remove_prefix(std::min(end + 1, rest.size()));
  }
  return false;
}

using Kernels = std::span<const KernelEntry> (*)() noexcept;

constexpr bool has_wide_rows(const KernelFamily& family) noexcept {
  return std::ranges::any_of(kWideRows, [&](const KernelRow& row) { return family.has(row); });
}

/// Named here, so that a static library's are linked too. A family that is not built is not named.
template <const auto& kNamed, std::size_t kIndex, bool kWide>
constexpr Kernels kernels_if_built() noexcept {
  constexpr KernelFamily kFamily = kNamed[kIndex].family;
  if constexpr (!is_built(kNamed[kIndex].name)) {
    return nullptr;
  } else if constexpr (!kWide) {
    return kernels_of<kFamily>;
  } else if constexpr (LEAN_CUDA_WIDE != 0 && has_wide_rows(kFamily)) {
    return wide_kernels_of<kFamily>;
  } else {
    return nullptr;
  }
}

/// In the order of the families.
template <const auto& kNamed, bool kWide>
constexpr auto kBuilt = []<std::size_t... kIndex>(std::index_sequence<kIndex...>) {
  return std::array{kernels_if_built<kNamed, kIndex, kWide>()...};
}(std::make_index_sequence<std::size(kNamed)>());

/// Those of the family of a width that takes K and V of this type.
template <const auto& kNamed, bool kWide>
std::span<const KernelEntry> built_of_width(DType kv_dtype, std::int32_t width) noexcept {
  for (std::size_t i = 0; i < std::size(kNamed); ++i) {
    const KernelFamily& family = kNamed[i].family;
    if (family.head_dim != width || !family.takes(kv_dtype)) continue;
    return kBuilt<kNamed, kWide>[i] != nullptr ? kBuilt<kNamed, kWide>[i]() : std::span<const KernelEntry>{};
  }
  return {};
}

}  // namespace

std::span<const KernelEntry> kernels_for(DType kv_dtype, std::int32_t head_dim) noexcept {
  const auto* const width = std::ranges::find_if(kHeadDims, [&](std::int32_t dims) { return head_dim <= dims; });
  if (width == std::end(kHeadDims)) return {};
  return built_of_width<kFamilies, false>(kv_dtype, *width);
}

std::span<const KernelEntry> wide_kernels_for(DType kv_dtype, std::int32_t head_dim) noexcept {
  for (const KernelRow& row : kWideRows) {
    if (head_dim > row.head_dim) continue;
    for (const auto& built : {built_of_width<kFamilies, true>, built_of_width<kWideFamilies, true>}) {
      if (const std::span<const KernelEntry> kernels = built(kv_dtype, row.head_dim); !kernels.empty()) return kernels;
    }
  }
  return {};
}

const KernelEntry* find_kernel(std::span<const KernelEntry> kernels, Architecture device, Scope scope, std::int64_t rows) noexcept {
  const KernelEntry* widest = nullptr;
  for (const KernelEntry& entry : kernels) {
    if (entry.config.scope != scope || !runs(device, entry.config.architecture)) continue;
    if (entry.config.q_rows >= rows) return &entry;
    if (widest == nullptr || entry.config.q_rows > widest->config.q_rows) widest = &entry;
  }
  return widest;
}

}  // namespace lean::cuda
