"""Kernels that read bytes and do nothing else: what no attention over as many bytes can be faster than, in torch's process and graphs.

`lean bench` has its own (cli/cuda/read_kernels.cu); these are compiled by torch's NVRTC where it has that.
"""
import torch

#: What the kernel counts in; less than one at the end of a tensor is not read.
PIECE_BYTES = 4096 * 16
READ = """
extern "C" __global__ void __launch_bounds__(512) read_words(const uint4* words, unsigned pieces, unsigned* sink) {
  const unsigned long long count = 4096ull * pieces;  // an int of Python comes as one of 32 bits
  const unsigned long long begin = count * blockIdx.x / gridDim.x;
  const unsigned long long end = count * (blockIdx.x + 1) / gridDim.x;
  unsigned long long i = begin + threadIdx.x;
  unsigned fold = 0;
  for (; i + 7 * 512u < end; i += 8 * 512u) {
    uint4 w[8];
#pragma unroll
    for (int j = 0; j < 8; ++j)
      asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(w[j].x), "=r"(w[j].y), "=r"(w[j].z), "=r"(w[j].w) : "l"(words + i + j * 512u));
#pragma unroll
    for (int j = 0; j < 8; ++j) fold ^= w[j].x ^ w[j].y ^ w[j].z ^ w[j].w;
  }
  for (; i < end; i += 512u) fold ^= words[i].x ^ words[i].y ^ words[i].z ^ words[i].w;
  if (fold == 0x9E3779B9u) *sink = fold;
}
"""


def readers(device: torch.device) -> list:
    """Functions that read a tensor of bytes and do nothing else with them."""
    if device.type == "cpu":
        return [lambda data: data.view(torch.int64).sum()]
    found = [lambda data: data.view(torch.float32).sum()]
    try:
        kernel = torch.cuda._compile_kernel(READ, "read_words")
    except Exception as error:  # whatever torch has of NVRTC: its reduction reads, too
        print(f"read_limit: no kernel that reads: {error}", flush=True)
        return found
    sink = torch.zeros(1, dtype=torch.int32, device=device)
    processors = torch.cuda.get_device_properties(device).multi_processor_count

    def reader(ctas: int) -> object:
        return lambda data: kernel(grid=(ctas * processors, 1, 1), block=(512, 1, 1), args=[data, data.numel() // PIECE_BYTES, sink])

    return [*found, reader(2), reader(3)]
