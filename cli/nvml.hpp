// Clocks, power and driver of a GPU, as NVIDIA's management library says. The library is opened at run time, so the command
// neither links it nor needs it: without it everything here is unknown.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

namespace lean::cli {

/// A moment of a GPU; 0: unknown.
struct GpuState {
  std::int32_t sm_clock_mhz = 0;
  std::int32_t memory_clock_mhz = 0;
  double power_watts = 0.0;
  std::uint64_t throttle_reasons = 0;  // NVML's bits
};

class Nvml {
 public:
  explicit Nvml(const std::string& pci_bus_id);
  ~Nvml();
  Nvml(const Nvml&) = delete;
  Nvml& operator=(const Nvml&) = delete;

  [[nodiscard]] GpuState state() const;
  [[nodiscard]] std::string driver() const;  // empty: unknown
  /// What the GPU has taken since its driver was loaded; nothing: unknown.
  [[nodiscard]] std::optional<double> joules() const;

 private:
  struct Library;
  std::unique_ptr<Library> library_;  // null: not there
};

}  // namespace lean::cli
