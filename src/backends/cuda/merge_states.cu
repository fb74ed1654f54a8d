// merge_states() on a device: a warp takes a row at a time, its lanes the row's elements in turn, and rows are dealt out over
// as many warps as the launch has. The rows are short and the arithmetic is a memory's pace: nothing here is tuned.
#include "backends/cuda/merge_states.hpp"

#include <algorithm>
#include <cstdint>

#include "backends/cuda/device.hpp"
#include "base/int_math.hpp"
#include "base/with_type.hpp"

namespace lean::cuda {
namespace {

constexpr std::int32_t kLanes = 32;
constexpr std::int32_t kWarps = 8;                         // of a CTA
constexpr std::int64_t kMostCtas = std::int64_t{1} << 20;  // more rows than their warps: each takes several

template <typename T>
__global__ void __launch_bounds__(kLanes* kWarps) merge_rows(const softmax::FinishedStates states) {
  T* const o_a = static_cast<T*>(states.o_a);
  const T* const o_b = static_cast<const T*>(states.o_b);
  const std::int32_t lane = static_cast<std::int32_t>(threadIdx.x) % kLanes;
  const std::int64_t first = std::int64_t{blockIdx.x} * kWarps + threadIdx.x / kLanes;
  for (std::int64_t row = first; row < states.rows; row += std::int64_t{gridDim.x} * kWarps) {
    const softmax::FinishedMerge merge(states.lse_a[row], states.lse_b[row]);
    for (std::int64_t i = row * states.value_dim + lane; i < (row + 1) * states.value_dim; i += kLanes) {
      o_a[i] = from_float<T>(merge.element(to_float(o_a[i]), to_float(o_b[i])));
    }
    __syncwarp();  // every lane has read lse_a
    if (lane == 0) states.lse_a[row] = merge.lse();
  }
}

const void* kernel_for(DType dtype) noexcept {
  const void* kernel = nullptr;
  with_query_type(dtype, [&]<typename T>(T) { kernel = reinterpret_cast<const void*>(merge_rows<T>); });
  return kernel;  // of other types, which are refused before: null
}

}  // namespace

Status merge_states(const softmax::FinishedStates& states, const Options& options) noexcept {
  const auto ctas = static_cast<unsigned>(std::min(kMostCtas, ceil_div(states.rows, std::int64_t{kWarps})));
  softmax::FinishedStates given = states;
  void* arguments[] = {&given};
  return cuda_status(cudaLaunchKernel(kernel_for(states.dtype), dim3(ctas), dim3(kLanes * kWarps), arguments, 0,
                                      static_cast<cudaStream_t>(options.stream)),
                     "cudaLaunchKernel");
}

}  // namespace lean::cuda
