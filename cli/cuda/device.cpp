// Devices and memory of the CUDA runtime.
#include <algorithm>
#include <new>

#include "cli/cuda/check.hpp"

namespace lean::cli::gpu {
namespace {

std::int32_t attribute(cudaDeviceAttr which, int ordinal) {
  int value = 0;
  check(cudaDeviceGetAttribute(&value, which, ordinal), "cudaDeviceGetAttribute");
  return value;
}

Device ask(int ordinal) {
  cudaDeviceProp properties{};
  check(cudaGetDeviceProperties(&properties, ordinal), "cudaGetDeviceProperties");
  char bus_id[32] = {};
  check(cudaDeviceGetPCIBusId(bus_id, sizeof(bus_id), ordinal), "cudaDeviceGetPCIBusId");
  return {.name = properties.name,
          .pci_bus_id = bus_id,
          .major = attribute(cudaDevAttrComputeCapabilityMajor, ordinal),
          .minor = attribute(cudaDevAttrComputeCapabilityMinor, ordinal),
          .multiprocessors = attribute(cudaDevAttrMultiProcessorCount, ordinal),
          .memory_bytes = static_cast<std::int64_t>(properties.totalGlobalMem),
          .l2_bytes = attribute(cudaDevAttrL2CacheSize, ordinal)};
}

}  // namespace

std::vector<Device> devices() {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) count = 0;
  std::vector<Device> found;
  for (int ordinal = 0; ordinal < count; ++ordinal) found.push_back(ask(ordinal));
  return found;
}

std::string why_none() {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess) return cudaGetErrorString(error);
  return count > 0 ? "" : "no CUDA device";
}

std::byte* allocate(std::int64_t bytes) {
  void* memory = nullptr;
  const cudaError_t error = cudaMalloc(&memory, static_cast<std::size_t>(std::max<std::int64_t>(bytes, 1)));
  if (error == cudaErrorMemoryAllocation) {
    (void)cudaGetLastError();
    throw std::bad_alloc();
  }
  check(error, "cudaMalloc");
  return static_cast<std::byte*>(memory);
}

void release(std::byte* memory) noexcept { (void)cudaFree(memory); }

std::int64_t free_bytes() {
  std::size_t free = 0;
  std::size_t total = 0;
  check(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
  return static_cast<std::int64_t>(free);
}

void copy(void* to, const void* from, std::int64_t bytes) {
  check(cudaMemcpy(to, from, static_cast<std::size_t>(bytes), cudaMemcpyDefault), "cudaMemcpy");
}

void set_bytes(void* memory, unsigned char value, std::int64_t bytes) {
  check(cudaMemset(memory, value, static_cast<std::size_t>(bytes)), "cudaMemset");
}

void synchronize() { check(cudaDeviceSynchronize(), "cudaDeviceSynchronize"); }

}  // namespace lean::cli::gpu
