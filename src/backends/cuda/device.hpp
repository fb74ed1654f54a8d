// What the current device offers, asked once a device.
#pragma once

#include <cstdint>

#include "backends/cuda/architecture.hpp"
#include "lean/status.hpp"

namespace lean::cuda {

struct Device {
  std::int32_t ordinal = -1;
  std::int32_t multiprocessors = 0;
  std::int32_t major = 0;  // compute capability, at most the newest that this build is compiled for
  std::int32_t minor = 0;
  std::int32_t shared_bytes = 0;  // dynamic shared memory a CTA may have
  std::int32_t memory_share = 0;  // bytes a us of the memory for each multiprocessor, by its clock and width; 0: unknown
  bool cooperative = false;
  bool warpgroups = false;  // products of whole warpgroups: sm_90a's, of that GPU alone, whatever this build is compiled for

  /// Bytes a us of the memory: an H100's where nobody knows.
  [[nodiscard]] float memory_rate() const noexcept {
    return static_cast<float>(memory_share > 0 ? memory_share : 25'400) * static_cast<float>(multiprocessors);
  }
  /// Whose kernels it runs.
  [[nodiscard]] Architecture architecture() const noexcept { return architecture_of(major, minor); }
  [[nodiscard]] bool copies_in_bulk() const noexcept { return runs(architecture(), Architecture::kSm90); }
  [[nodiscard]] bool launches_dependents() const noexcept { return runs(architecture(), Architecture::kSm90); }
};

/// The calling thread's current device. Codes: ok, unsupported (none that runs this build's kernels).
[[nodiscard]] Status current_device(Device& device) noexcept;

/// The CUDA error as a Status that names what was tried; ok for cudaSuccess.
[[nodiscard]] Status cuda_status(int error, const char* what) noexcept;

}  // namespace lean::cuda
