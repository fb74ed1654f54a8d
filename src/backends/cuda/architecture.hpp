// Architecture: what a variant of the kernel is written for, by its compute capability. A device runs its own architecture's
// variants and those of older ones; kernel_rows.hpp has the rows of each.
#pragma once

#include <cstdint>

namespace lean::cuda {

enum class Architecture : std::int32_t {
  kSm80 = 80,  // cp.async and mma.sync; serves whatever is asked
  kSm90 = 90,  // TMA (cp.async.bulk), mbarriers, programmatic dependent launch; serves decode steps
};

inline constexpr Architecture kArchitectures[] = {Architecture::kSm90, Architecture::kSm80};  // the newest first

[[nodiscard]] constexpr bool runs(Architecture device, Architecture variant) noexcept { return device >= variant; }

/// The newest there is of those that a device of this compute capability runs. `major` is 8 or more.
[[nodiscard]] constexpr Architecture architecture_of(std::int32_t major, std::int32_t minor) noexcept {
  for (const Architecture architecture : kArchitectures) {
    if (10 * major + minor >= static_cast<std::int32_t>(architecture)) return architecture;
  }
  return Architecture::kSm80;
}

}  // namespace lean::cuda
