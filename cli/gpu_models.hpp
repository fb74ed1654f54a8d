// GpuModel: what `lean simulate` knows of a GPU that is not at hand, published figures and nothing else. One row a GPU, each with
// where its figures were published.
#pragma once

#include <cstdint>
#include <string_view>

#include "backends/cuda/architecture.hpp"

namespace lean::cli {

struct GpuModel {
  std::string_view name;                                   // as it is asked for
  std::string_view device;                                 // as the driver names it, and result files do; empty: none was measured
  std::string_view description;                            // the part's full name
  cuda::Architecture kernels = cuda::Architecture::kSm80;  // whose variants it runs
  std::int32_t multiprocessors = 0;
  double read_gbps = 0.0;      // published memory bandwidth, 1e9 bytes a second
  std::int32_t clock_mhz = 0;  // the highest published clock of the multiprocessors
  std::string_view source;
};

inline constexpr GpuModel kGpuModels[] = {
    {"a100", "", "A100 SXM 80 GB", cuda::Architecture::kSm80, 108, 2039.0, 1410,
     "NVIDIA A100 datasheet (2021), bandwidth; NVIDIA A100 architecture whitepaper (2020), multiprocessors and clock"},
    {"a100-40gb", "", "A100 SXM 40 GB", cuda::Architecture::kSm80, 108, 1555.0, 1410, "NVIDIA A100 architecture whitepaper (2020)"},
    {"h100", "NVIDIA H100 80GB HBM3", "H100 SXM 80 GB", cuda::Architecture::kSm90, 132, 3352.0, 1980,
     "NVIDIA H100 architecture whitepaper (2022); clock: highest that NVML reports"},
    {"h100-pcie", "", "H100 PCIe 80 GB", cuda::Architecture::kSm90, 114, 2039.0, 1755,
     "NVIDIA H100 architecture whitepaper (2022)"},
    {"h200", "NVIDIA H200", "H200 SXM 141 GB", cuda::Architecture::kSm90, 132, 4800.0, 1980,
     "NVIDIA H200 datasheet (2024); clock: highest that NVML reports"},
    {"h200-sm80", "NVIDIA H200, sm_80 path", "H200 SXM 141 GB by the kernels of sm_80", cuda::Architecture::kSm80, 132, 4800.0,
     1980, "as h200; a build with LEAN_CUDA_SM80_PATH=ON, measured to learn what these kernels take"},
    {"b200", "", "B200 SXM 192 GB", cuda::Architecture::kSm90, 148, 7700.0, 1980,
     "hmc-tech.com, NVIDIA B200 vs NVIDIA B100 (read in 2026); NVIDIA publishes neither multiprocessors nor clock"},
    {"l40s", "", "L40S 48 GB", cuda::Architecture::kSm80, 142, 864.0, 2520, "NVIDIA L40S datasheet (2023)"},
    {"rtx4090", "", "GeForce RTX 4090", cuda::Architecture::kSm80, 128, 1008.0, 2520,
     "NVIDIA Ada GPU architecture whitepaper (2022)"},
};

/// The GPU that the driver names so; null: none that was measured.
[[nodiscard]] constexpr const GpuModel* gpu_of_device(std::string_view device) noexcept {
  for (const GpuModel& gpu : kGpuModels) {
    if (!gpu.device.empty() && gpu.device == device) return &gpu;
  }
  return nullptr;
}

}  // namespace lean::cli
