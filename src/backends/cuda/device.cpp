// What the current device offers, asked of the runtime once a device (device.hpp).
#include "backends/cuda/device.hpp"

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdio>

#include "base/message.hpp"

namespace lean::cuda {
namespace {

constexpr std::int32_t kMaxDevices = 64;

/// 0 where the driver does not say: nothing refuses a call for want of it.
std::int64_t ask_if_known(cudaDeviceAttr which, int ordinal) noexcept {
  int value = 0;
  if (cudaDeviceGetAttribute(&value, which, ordinal) == cudaSuccess) return value;
  static_cast<void>(cudaGetLastError());  // is no error
  return 0;
}

Status ask(int ordinal, Device& device) noexcept {
  int cooperative = 0;
  const struct {
    cudaDeviceAttr which;
    int* value;
  } attributes[] = {{cudaDevAttrMultiProcessorCount, &device.multiprocessors},
                    {cudaDevAttrComputeCapabilityMajor, &device.major},
                    {cudaDevAttrComputeCapabilityMinor, &device.minor},
                    {cudaDevAttrMaxSharedMemoryPerBlockOptin, &device.shared_bytes},
                    {cudaDevAttrCooperativeLaunch, &cooperative}};
  for (const auto& attribute : attributes) {
    const cudaError_t error = cudaDeviceGetAttribute(attribute.value, attribute.which, ordinal);
    if (error != cudaSuccess) return cuda_status(error, "cudaDeviceGetAttribute");
  }
  device.ordinal = ordinal;
  device.cooperative = cooperative != 0;
  const std::int64_t khz = ask_if_known(cudaDevAttrMemoryClockRate, ordinal);
  const std::int64_t bits = ask_if_known(cudaDevAttrGlobalMemoryBusWidth, ordinal);
  device.memory_share = static_cast<std::int32_t>(2 * khz * bits / 8 / 1000 / device.multiprocessors);  // two transfers a clock
  device.warpgroups = device.major == 9 && device.minor == 0;
  if (10 * device.major + device.minor > LEAN_CUDA_NEWEST_COMPILED) {  // it runs that architecture's code, translated by the driver
    device.major = LEAN_CUDA_NEWEST_COMPILED / 10;
    device.minor = LEAN_CUDA_NEWEST_COMPILED % 10;
  }
#ifdef LEAN_CUDA_SM80_PATH
  constexpr std::int32_t kSharedBytesOfSm80 = 163 * 1024;
  if (device.major > 8) device.major = 8, device.minor = 0;
  device.warpgroups = false;
  if (device.shared_bytes > kSharedBytesOfSm80) device.shared_bytes = kSharedBytesOfSm80;
#endif
  return {};
}

}  // namespace

Status cuda_status(int error, const char* what) noexcept {
  if (error == cudaSuccess) return {};
  const auto code = static_cast<cudaError_t>(error);
  Status status{.code = StatusCode::kBackendError};
  std::snprintf(status.message, sizeof(status.message), "%s: %s (%s)", what, cudaGetErrorString(code), cudaGetErrorName(code));
  return status;
}

Status current_device(Device& device) noexcept {
  static Device known[kMaxDevices];
  static std::atomic<bool> asked[kMaxDevices];
  static std::atomic_flag asking = ATOMIC_FLAG_INIT;
  int ordinal = -1;
  const cudaError_t error = cudaGetDevice(&ordinal);
  if (error != cudaSuccess) {
    Status status{.code = StatusCode::kUnsupported};
    std::snprintf(status.message, sizeof(status.message), "options.backend = 1: no CUDA device: %s", cudaGetErrorString(error));
    return status;
  }
  const bool kept = ordinal >= 0 && ordinal < kMaxDevices;
  if (kept && asked[ordinal].load(std::memory_order_acquire)) {  // pairs with the store below
    device = known[ordinal];
  } else {
    if (const Status status = ask(ordinal, device); !status.ok()) return status;  // to be asked again
    if (kept) {
      while (asking.test_and_set(std::memory_order_acquire)) {
      }
      if (!asked[ordinal].load(std::memory_order_relaxed)) {
        known[ordinal] = device;
        asked[ordinal].store(true, std::memory_order_release);
      }
      asking.clear(std::memory_order_release);
    }
  }
  if (device.major >= 8) return {};
  return refuse(StatusCode::kUnsupported, "options.backend", 1, "needs a device of compute capability 8.0 or newer");
}

}  // namespace lean::cuda
