// The build with CUDA: what target.hpp asks of a device.
#include <cuda_runtime_api.h>

#include <bit>
#include <cstdio>
#include <map>
#include <mutex>
#include <stdexcept>
#include <utility>
#include <vector>

#include "support/target.hpp"

namespace lean::support {
namespace {

std::string text_of(cudaError_t error) { return std::string(cudaGetErrorName(error)) + ": " + cudaGetErrorString(error); }

void demand(cudaError_t error, const char* what) {
  if (error != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + text_of(error));
}

/// Registering takes longer than most tests' calls, so small mappings are kept and used again.
constexpr std::size_t kLargestKept = std::size_t{1} << 20;  // bytes

struct KeptPages {
  std::mutex mutex;
  std::map<std::pair<std::size_t, std::size_t>, std::vector<Pages>> by_size;
};

KeptPages& kept_pages() {
  static auto* const kPages = new KeptPages;  // outlives every buffer
  return *kPages;
}

}  // namespace

std::string open_device() {
  int device = 0;
  int same_pointer = 0;
  if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return text_of(error);
  if (const cudaError_t error = cudaFree(nullptr); error != cudaSuccess) return text_of(error);
  const cudaError_t error = cudaDeviceGetAttribute(&same_pointer, cudaDevAttrCanUseHostPointerForRegisteredMem, device);
  if (error != cudaSuccess) return text_of(error);
  return same_pointer != 0 ? "" : "the device does not use registered host memory through the host's pointers";
}

Status wait_for_device() {
  const cudaError_t error = cudaDeviceSynchronize();
  if (error == cudaSuccess) return {};
  Status status{.code = StatusCode::kBackendError};
  std::snprintf(status.message, sizeof(status.message), "cudaDeviceSynchronize: %s", text_of(error).c_str());
  return status;
}

Pages take_device_pages(std::size_t bytes, std::size_t closed_bytes) {
  const std::size_t rounded = bytes <= kLargestKept ? std::bit_ceil(bytes) : bytes;
  KeptPages& kept = kept_pages();
  {
    const std::lock_guard lock(kept.mutex);
    std::vector<Pages>& same = kept.by_size[{rounded, closed_bytes}];
    if (!same.empty()) {
      const Pages pages = same.back();
      same.pop_back();
      return pages;
    }
  }
  const Pages pages = map_pages(rounded, closed_bytes);
  demand(cudaHostRegister(pages.begin, pages.bytes, cudaHostRegisterDefault), "cudaHostRegister");
  return pages;
}

void give_device_pages(const Pages& pages) noexcept {
  if (pages.bytes <= kLargestKept) {
    KeptPages& kept = kept_pages();
    const std::lock_guard lock(kept.mutex);
    kept.by_size[{pages.bytes, pages.closed_bytes}].push_back(pages);
    return;
  }
  static_cast<void>(cudaHostUnregister(pages.begin));
  unmap_pages(pages);
}

std::byte* allocate_on_device(std::size_t bytes) {
  void* memory = nullptr;
  demand(cudaMalloc(&memory, bytes), "cudaMalloc");
  return static_cast<std::byte*>(memory);
}

void free_on_device(std::byte* memory) noexcept { static_cast<void>(cudaFree(memory)); }

void copy_to_device(std::byte* to, std::span<const std::byte> from) {
  if (!from.empty()) demand(cudaMemcpy(to, from.data(), from.size(), cudaMemcpyHostToDevice), "cudaMemcpy to the device");
  demand(cudaStreamSynchronize(nullptr), "cudaStreamSynchronize");  // streams that do not wait for the default one read it
}

void copy_from_device(std::span<std::byte> to, const std::byte* from) {
  if (!to.empty()) demand(cudaMemcpy(to.data(), from, to.size(), cudaMemcpyDeviceToHost), "cudaMemcpy from the device");
}

}  // namespace lean::support
