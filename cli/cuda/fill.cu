// Numbers from a table, drawn by the host's own rule, so that both sides hold the same bits.
#include "cli/cuda/check.hpp"
#include "cli/normal_hash.hpp"

namespace lean::cli::gpu {
namespace {

constexpr int kThreads = 256;
constexpr int kBlocksPerMultiprocessor = 8;

template <typename T>
__global__ void __launch_bounds__(kThreads) fill(T* data, const T* table, std::int64_t elements, std::uint64_t key) {
  const std::int64_t stride = std::int64_t{gridDim.x} * kThreads;
  for (std::int64_t group = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; group * kPerHash < elements; group += stride) {
    std::uint64_t bits = quantile_bits(key, group);
    for (std::int64_t i = group * kPerHash; i < min(elements, (group + 1) * kPerHash); ++i, bits >>= 16) {
      data[i] = table[bits & 0xFFFFU];
    }
  }
}

template <typename T>
void launch(void* data, const void* table, std::int64_t elements, std::uint64_t key) {
  int device = 0;
  int multiprocessors = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  check(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
  const std::int64_t groups = (elements + kPerHash - 1) / kPerHash;
  const std::int64_t blocks = min((groups + kThreads - 1) / kThreads, std::int64_t{multiprocessors} * kBlocksPerMultiprocessor);
  if (blocks == 0) return;
  fill<<<static_cast<unsigned>(blocks), kThreads>>>(static_cast<T*>(data), static_cast<const T*>(table), elements, key);
  check(cudaGetLastError(), "fill");
}

}  // namespace

void fill_from_table(void* data, const void* table, std::int64_t element_bytes, std::int64_t elements, std::uint64_t key) {
  if (element_bytes == 1) return launch<std::uint8_t>(data, table, elements, key);
  if (element_bytes == 2) return launch<std::uint16_t>(data, table, elements, key);
  if (element_bytes == 4) return launch<std::uint32_t>(data, table, elements, key);
  throw GpuError("fill_from_table: no such element size");
}

}  // namespace lean::cli::gpu
