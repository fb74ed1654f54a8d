#include "gpu/test_kernels.hpp"

#include "backends/cuda/ptx/fp8.cuh"
#include "backends/cuda/ptx/grid.cuh"

namespace lean::gpu {
namespace {

__device__ std::uint64_t nanoseconds() {
  std::uint64_t now = 0;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}

__device__ bool told_to_stop(const std::uint32_t* stop, std::uint64_t end) {
  return *static_cast<const volatile std::uint32_t*>(stop) != 0 || nanoseconds() > end;
}

__global__ void occupy_kernel(const std::uint32_t* stop, std::uint32_t* started, std::uint64_t limit) {
  if (threadIdx.x != 0) return;
  const std::uint64_t end = nanoseconds() + limit;
  *static_cast<volatile std::uint32_t*>(started + blockIdx.x) = 1;
  __threadfence_system();
  while (!told_to_stop(stop, end)) __nanosleep(2000);
}

__global__ void hog_bandwidth_kernel(uint4* memory, std::size_t count, const std::uint32_t* stop, std::uint64_t limit) {
  const std::uint64_t end = nanoseconds() + limit;
  const std::size_t stride = std::size_t{gridDim.x} * blockDim.x;
  while (!told_to_stop(stop, end)) {
    for (std::size_t i = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += stride) {
      uint4 x = memory[i];
      x.x += 1;
      memory[i] = x;
    }
  }
}

__device__ void copy(const IntCopy& ints) {
  for (auto i = static_cast<std::int32_t>(threadIdx.x); i < ints.count; i += static_cast<std::int32_t>(blockDim.x)) {
    ints.to[i] = ints.from[i];
  }
}

__global__ void copy_ints_kernel(IntCopy ints) { copy(ints); }

__global__ void copy_ints_late_kernel(IntCopy first, IntCopy second, std::uint64_t delay) {
  cuda::ptx::start_dependents();
  const std::uint64_t end = nanoseconds() + delay;
  while (nanoseconds() < end) __nanosleep(200);
  copy(first);
  copy(second);
}

__global__ void count_kernel(const std::uint32_t* words, std::size_t count, std::uint32_t pattern, unsigned long long* others) {
  unsigned long long own = 0;
  const std::size_t stride = std::size_t{gridDim.x} * blockDim.x;
  for (std::size_t i = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += stride) own += words[i] != pattern;
  if (own > 0) atomicAdd(others, own);
}

__global__ void convert_fp8_kernel(std::uint32_t* halves, Fp8Conversion conversion, bool upper) {
  namespace ptx = cuda::ptx;
  const std::uint32_t pair = blockIdx.x * blockDim.x + threadIdx.x;
  const std::uint32_t word = upper ? pair << 16 : pair;
  switch (conversion) {
    case Fp8Conversion::kE5M2: halves[pair] = ptx::e5m2_to_half(word, upper); break;
    case Fp8Conversion::kE4M3: halves[pair] = ptx::e4m3_to_half(word, upper); break;
    case Fp8Conversion::kE4M3ByProduct: halves[pair] = ptx::e4m3_to_half_by_product(word, upper); break;
  }
}

__global__ void fill_shared_kernel(std::uint32_t word, std::uint64_t delay) {
  extern __shared__ std::uint32_t words[];
  std::uint32_t bytes = 0;
  asm volatile("mov.u32 %0, %%dynamic_smem_size;" : "=r"(bytes));
  for (std::uint32_t i = threadIdx.x; i < bytes / sizeof(word); i += blockDim.x)
    static_cast<volatile std::uint32_t*>(words)[i] = word;
  const std::uint64_t end = nanoseconds() + delay;  // until every multiprocessor has a CTA
  while (nanoseconds() < end) __nanosleep(200);
}

__global__ void trap_kernel() { __trap(); }

std::uint64_t nanoseconds_of(std::chrono::nanoseconds time) { return static_cast<std::uint64_t>(time.count()); }

}  // namespace

void occupy(const Stream& stream, std::int32_t ctas, const Signals& signals, std::chrono::milliseconds limit) {
  const std::int32_t shared = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  demand(cudaFuncSetAttribute(occupy_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared), "cudaFuncSetAttribute");
  occupy_kernel<<<static_cast<unsigned>(ctas), 32, static_cast<std::size_t>(shared), stream.get()>>>(
      signals.stop_word(), signals.started_words(), nanoseconds_of(limit));
  demand(cudaGetLastError(), "occupy");
}

void hog_bandwidth(const Stream& stream, const DeviceBuffer& memory, const Signals& signals, std::chrono::milliseconds limit) {
  // Half of the multiprocessors: a CTA of a decode kernel fills the registers of one, and waits for one without neighbours.
  hog_bandwidth_kernel<<<static_cast<unsigned>(multiprocessors() / 2), 1024, 0, stream.get()>>>(
      memory.as<uint4>(), memory.size_bytes() / sizeof(uint4), signals.stop_word(), nanoseconds_of(limit));
  demand(cudaGetLastError(), "hog_bandwidth");
}

void copy_ints(const Stream& stream, std::int32_t* to, const std::int32_t* from, std::int32_t count) {
  copy_ints_kernel<<<1, 256, 0, stream.get()>>>({to, from, count});
  demand(cudaGetLastError(), "copy_ints");
}

void copy_ints_late(const Stream& stream, IntCopy first, IntCopy second, std::chrono::microseconds delay) {
  copy_ints_late_kernel<<<1, 256, 0, stream.get()>>>(first, second, nanoseconds_of(delay));
  demand(cudaGetLastError(), "copy_ints_late");
}

std::uint64_t count_other_words(const DeviceBuffer& memory, std::uint32_t pattern) {
  const DeviceBuffer others(sizeof(unsigned long long));
  others.fill(std::byte{0});
  count_kernel<<<static_cast<unsigned>(8 * multiprocessors()), 256>>>(
      memory.as<std::uint32_t>(), memory.size_bytes() / sizeof(std::uint32_t), pattern, others.as<unsigned long long>());
  demand(cudaGetLastError(), "count_other_words");
  unsigned long long count = 0;
  others.copy_to(&count);
  return count;
}

void convert_fp8_pairs(std::uint32_t* halves, Fp8Conversion conversion, bool upper) {
  convert_fp8_kernel<<<256, 256>>>(halves, conversion, upper);
  demand(cudaGetLastError(), "convert_fp8_pairs");
}

void fill_shared(const Stream& stream, std::byte value) {
  const std::int32_t shared = device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  demand(cudaFuncSetAttribute(fill_shared_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared), "cudaFuncSetAttribute");
  fill_shared_kernel<<<static_cast<unsigned>(multiprocessors()), 256, static_cast<std::size_t>(shared), stream.get()>>>(
      0x01010101U * static_cast<std::uint32_t>(value), nanoseconds_of(std::chrono::microseconds(100)));
  demand(cudaGetLastError(), "fill_shared");
}

void trap(const Stream& stream) {
  trap_kernel<<<1, 1, 0, stream.get()>>>();
  demand(cudaGetLastError(), "trap");
}

}  // namespace lean::gpu
