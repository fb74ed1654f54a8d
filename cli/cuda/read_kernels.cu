// Pure reads: what no attention kernel can beat on this GPU. Loads into registers, and bulk copies through a ring in shared
// memory (compute capability 9.0), each with as many CTAs and bytes in flight as have been seen to win at some size.
#include <memory>

#include "backends/cuda/ptx/barrier.cuh"
#include "backends/cuda/ptx/copy.cuh"
#include "cli/cuda/check.hpp"

namespace lean::cli::gpu {
namespace {

using cuda::ptx::barrier_arrive_expect;
using cuda::ptx::barrier_init;
using cuda::ptx::barrier_init_fence;
using cuda::ptx::barrier_wait;
using cuda::ptx::bulk_copy;

constexpr std::int64_t kWordBytes = sizeof(uint4);

/// Read-only, past the L1; asks the L2 for whole 256-byte sectors.
__device__ __forceinline__ uint4 stream_in(const uint4* address) {
  uint4 word;
  asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(word.x), "=r"(word.y), "=r"(word.z), "=r"(word.w)
               : "l"(address));
  return word;
}

__device__ __forceinline__ std::uint32_t folded(uint4 word) { return (word.x ^ word.y) ^ (word.z ^ word.w); }

/// Never true in practice, and the compiler cannot know: keeps every load alive.
__device__ __forceinline__ void keep(std::uint32_t fold, std::uint32_t* sink) {
  if (fold == 0x9E3779B9U) *sink = fold;
}

/// CTA `blockIdx.x`'s part of [0, total).
struct Part {
  std::int64_t begin;
  std::int64_t end;

  __device__ explicit Part(std::int64_t total)
      : begin(total * blockIdx.x / gridDim.x), end(total * (std::int64_t{blockIdx.x} + 1) / gridDim.x) {}
};

template <int kThreads, int kInFlight>
__global__ void __launch_bounds__(kThreads) read_by_loads(const uint4* words, std::int64_t count, std::uint32_t* sink) {
  const Part part(count);
  std::uint32_t fold = 0;
  std::int64_t i = part.begin + threadIdx.x;
  for (; i + std::int64_t{kInFlight - 1} * kThreads < part.end; i += std::int64_t{kInFlight} * kThreads) {
    uint4 batch[kInFlight];
#pragma unroll
    for (int j = 0; j < kInFlight; ++j) batch[j] = stream_in(words + i + std::int64_t{j} * kThreads);
#pragma unroll
    for (int j = 0; j < kInFlight; ++j) fold ^= folded(batch[j]);
  }
  for (; i < part.end; i += kThreads) fold ^= folded(stream_in(words + i));
  keep(fold, sink);
}

/// All threads look at every tile that comes in, so that a stage is free when the CTA has passed the barrier.
template <int kThreads, int kTileBytes, int kStages>
__global__ void __launch_bounds__(kThreads) read_by_bulk_copies(const std::byte* data, std::int64_t bytes, std::uint32_t* sink) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) std::byte ring[];
  __shared__ std::uint64_t full[kStages];
  const Part tiles((bytes + kTileBytes - 1) / kTileBytes);
  const auto tile_bytes = [&](std::int64_t tile) {
    return static_cast<std::uint32_t>(min(std::int64_t{kTileBytes}, bytes - tile * kTileBytes));
  };
  const auto request = [&](std::int64_t tile, int stage) {
    barrier_arrive_expect(&full[stage], tile_bytes(tile));
    bulk_copy(ring + stage * kTileBytes, data + tile * kTileBytes, tile_bytes(tile), &full[stage]);
  };
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; ++stage) barrier_init(&full[stage], 1);
    barrier_init_fence();
    for (int stage = 0; stage < kStages && tiles.begin + stage < tiles.end; ++stage) request(tiles.begin + stage, stage);
  }
  __syncthreads();
  std::uint32_t fold = 0;
  std::uint32_t parity = 0;
  int stage = 0;
  for (std::int64_t tile = tiles.begin; tile < tiles.end; ++tile) {
    barrier_wait(&full[stage], parity);
    const auto* words = reinterpret_cast<const uint4*>(ring + stage * kTileBytes);
    for (std::uint32_t i = threadIdx.x; i < tile_bytes(tile) / kWordBytes; i += kThreads) fold ^= folded(words[i]);
    __syncthreads();
    if (threadIdx.x == 0 && tile + kStages < tiles.end) request(tile + kStages, stage);
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1U;
    }
  }
  keep(fold, sink);
#endif
}

struct DeviceMemory {
  void operator()(std::uint32_t* memory) const noexcept { (void)cudaFree(memory); }
};

/// Where a fold would be stored; lives as long as a kernel that names it.
std::shared_ptr<std::uint32_t> make_sink() {
  void* memory = nullptr;
  check(cudaMalloc(&memory, sizeof(std::uint32_t)), "cudaMalloc");
  return {static_cast<std::uint32_t*>(memory), DeviceMemory{}};
}

struct Shape {
  int multiprocessors;
  std::shared_ptr<std::uint32_t> sink;
};

template <int kThreads, int kInFlight>
ReadKernel loads(const Shape& shape, int ctas) {
  const auto grid = static_cast<unsigned>(shape.multiprocessors * ctas);
  return {.name = "loads, " + std::to_string(ctas) + " x " + std::to_string(kThreads) + " threads, " + std::to_string(kInFlight) +
                  " in flight",
          .enqueue = [grid, sink = shape.sink](const void* data, std::int64_t bytes, void* stream) {
            read_by_loads<kThreads, kInFlight><<<grid, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
                static_cast<const uint4*>(data), bytes / kWordBytes, sink.get());
            check(cudaGetLastError(), "read_by_loads");
          }};
}

template <int kThreads, int kTileBytes, int kStages>
ReadKernel bulk_copies(const Shape& shape, int ctas) {
  constexpr int kSharedBytes = kTileBytes * kStages;
  const auto grid = static_cast<unsigned>(shape.multiprocessors * ctas);
  check(cudaFuncSetAttribute(read_by_bulk_copies<kThreads, kTileBytes, kStages>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             kSharedBytes),
        "cudaFuncSetAttribute");
  return {.name = "bulk copies, " + std::to_string(ctas) + " x " + std::to_string(kStages) + " x " +
                  std::to_string(kTileBytes >> 10) + " KB",
          .enqueue = [grid, sink = shape.sink](const void* data, std::int64_t bytes, void* stream) {
            read_by_bulk_copies<kThreads, kTileBytes, kStages><<<grid, kThreads, kSharedBytes, static_cast<cudaStream_t>(stream)>>>(
                static_cast<const std::byte*>(data), bytes, sink.get());
            check(cudaGetLastError(), "read_by_bulk_copies");
          }};
}

}  // namespace

std::vector<ReadKernel> read_kernels() {
  const Device device = devices().at(0);
  const Shape shape{.multiprocessors = device.multiprocessors, .sink = make_sink()};
  std::vector<ReadKernel> kernels{loads<256, 4>(shape, 2), loads<512, 8>(shape, 2), loads<256, 8>(shape, 4),
                                  loads<1024, 8>(shape, 1)};
  if (device.major >= 9) {
    kernels.push_back(bulk_copies<256, 16384, 12>(shape, 1));
    kernels.push_back(bulk_copies<256, 32768, 6>(shape, 1));
    kernels.push_back(bulk_copies<256, 16384, 6>(shape, 2));
    kernels.push_back(bulk_copies<128, 8192, 6>(shape, 4));
    kernels.push_back(bulk_copies<128, 4096, 12>(shape, 4));
  }
  return kernels;
}

}  // namespace lean::cli::gpu
