// The tensor cores' ceiling: products of warpgroups (wgmma, sm_90a) and nothing else, on factors that stay in shared memory. What a
// call of many rows is held against where its products are the limit, measured on the same card and in the same run.
// Prints one JSON object: the device, TFLOP/s of fp16 and bf16 (median, least and most of kRounds), and the rows and columns of a
// product. Exits with 1 where a CUDA call fails, with 2 where the GPU has no such products.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <cstdlib>

#include "backends/cuda/ptx/copy.cuh"
#include "backends/cuda/ptx/shared.cuh"
#include "backends/cuda/ptx/warpgroup.cuh"
#include "backends/cuda/wide_layout.hpp"
#include "lean/problem.hpp"

namespace {

namespace ptx = lean::cuda::ptx;
namespace wide = lean::cuda::wide;

constexpr int kWarpgroups = 2;  // a multiprocessor's, as many as a wide kernel has
constexpr int kThreads = kWarpgroups * ptx::kWarpgroupThreads;
constexpr int kRows = 64;  // of a product
constexpr int kColumns = 128;
constexpr int kDepth = 128;    // of the sum that a group of products makes: two columns of 128 bytes
constexpr int kGroups = 4000;  // of products a launch: some milliseconds, so that clocks settle as in a long call
constexpr int kRounds = 15;
constexpr int kFactorBytes = (kWarpgroups * kRows + kColumns) * kDepth * 2;
constexpr double kFlop = 2.0 * kRows * kColumns * kDepth * kGroups * kWarpgroups;  // of a CTA

void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "tensor_peak: %s: %s\n", what, cudaGetErrorString(error));
  std::exit(1);
}

/// Pseudo-random halves of either sign, |x| < 2 in both types: what toggles fewer wires draws less power and clocks higher.
__device__ std::uint32_t factors(std::uint32_t i) {
  const std::uint32_t x = (i + 1) * 2654435761U;
  return (x & 0x83FF83FFU) | 0x3C003C00U >> (x >> 31);
}

template <lean::DType kType>
__global__ void __launch_bounds__(kThreads, 1) multiply(float* sink) {
  extern __shared__ __align__(1024) std::uint32_t words[];
  for (std::uint32_t i = threadIdx.x; i < kFactorBytes / 4; i += kThreads) words[i] = factors(i);
  ptx::fence_before_copies();  // products read by the async proxy what threads stored
  __syncthreads();
  const std::uint32_t b = ptx::shared_address(words);
  const std::uint32_t a = b + kColumns * kDepth * 2 + threadIdx.x / ptx::kWarpgroupThreads * kRows * kDepth * 2;
  float c[kColumns / 8][4] = {};
  ptx::pin_registers(c);
  for (int group = 0; group < kGroups; ++group) {
    ptx::begin_products();
#pragma unroll
    for (int step = 0; step < kDepth / 16; ++step) {
      ptx::multiply_rows<kType, kColumns / 8>(c, ptx::factor_at(a + wide::step_place(kRows, step), 16),
                                              ptx::factor_at(b + wide::step_place(kColumns, step), 16), true);
    }
    ptx::end_products();
    ptx::await_products<1>();  // the next group is asked for while this one runs
  }
  ptx::await_products<0>();
  ptx::pin_registers(c);
  float sum = 0.0F;
  for (const auto& column : c) sum += column[0] + column[1] + column[2] + column[3];
  if (sum == 12345.0F) *sink = sum;  // never, as far as the compiler knows
}

/// TFLOP/s of the whole GPU, ascending.
template <lean::DType kType>
std::array<double, kRounds> rates(int multiprocessors, float* sink) {
  check(cudaFuncSetAttribute(multiply<kType>, cudaFuncAttributeMaxDynamicSharedMemorySize, kFactorBytes), "cudaFuncSetAttribute");
  cudaEvent_t begin = nullptr;
  cudaEvent_t end = nullptr;
  check(cudaEventCreate(&begin), "cudaEventCreate");
  check(cudaEventCreate(&end), "cudaEventCreate");
  const auto launch = [&] { multiply<kType><<<static_cast<unsigned>(multiprocessors), kThreads, kFactorBytes>>>(sink); };
  for (int i = 0; i < kRounds; ++i) launch();  // until clocks are those of work
  std::array<double, kRounds> found{};
  for (double& rate : found) {
    check(cudaEventRecord(begin), "cudaEventRecord");
    launch();
    check(cudaEventRecord(end), "cudaEventRecord");
    check(cudaEventSynchronize(end), "a kernel of products");
    float ms = 0.0F;
    check(cudaEventElapsedTime(&ms, begin, end), "cudaEventElapsedTime");
    rate = kFlop * multiprocessors / (static_cast<double>(ms) * 1e9);
  }
  check(cudaEventDestroy(begin), "cudaEventDestroy");
  check(cudaEventDestroy(end), "cudaEventDestroy");
  std::sort(found.begin(), found.end());
  return found;
}

void print(const char* dtype, const std::array<double, kRounds>& found) {
  std::printf(", \"%s_tflops\": %.1f, \"%s_tflops_min\": %.1f, \"%s_tflops_max\": %.1f", dtype, found[kRounds / 2], dtype,
              found.front(), dtype, found.back());
}

}  // namespace

int main() {
  cudaDeviceProp device{};
  check(cudaGetDeviceProperties(&device, 0), "cudaGetDeviceProperties");
  if (device.major != 9 || device.minor != 0) {
    std::fprintf(stderr, "tensor_peak: %s has compute capability %d.%d; wgmma is of 9.0 alone\n", device.name, device.major,
                 device.minor);
    return 2;
  }
  float* sink = nullptr;
  check(cudaMalloc(&sink, sizeof(float)), "cudaMalloc");
  std::printf("{\"device\": \"%s\", \"rows\": %d, \"columns\": %d", device.name, kRows, kColumns);
  print("fp16", rates<lean::DType::kFloat16>(device.multiProcessorCount, sink));
  print("bf16", rates<lean::DType::kBFloat16>(device.multiProcessorCount, sink));
  std::printf("}\n");
  check(cudaFree(sink), "cudaFree");
  return 0;
}
