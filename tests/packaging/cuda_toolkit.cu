// What tools/toolkit_test.py builds with the CUDA toolkit that tools/setup.sh fetches: a kernel, and the run time that is linked.
// Prints the run time's version, as in 13000; needs no GPU.
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <cuda/atomic>

#include <cstdio>

__global__ void add(__nv_bfloat16* sum, __nv_bfloat16 term, unsigned* arrivals) {
  *sum = *sum + term;
  cuda::atomic_ref<unsigned, cuda::thread_scope_device>(*arrivals).fetch_add(1, cuda::memory_order_release);
}

int main() {
  int version = 0;
  if (cudaRuntimeGetVersion(&version) != cudaSuccess) return 1;
  if (version < 0) add<<<1, 1>>>(nullptr, {}, nullptr);  // never: its code is linked, which is the point
  std::printf("%d\n", version);
}
