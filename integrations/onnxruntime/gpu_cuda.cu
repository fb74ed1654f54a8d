// gpu.hpp by kernels of a few lines. The library has none of them: it takes lengths, masks and tables as it reads them, and
// moves no cache.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <algorithm>

#include "gpu.hpp"
#include "integrations/runtime/cuda_memory.hpp"

namespace lean::ort::gpu {
namespace {

using runtime::device::check;

constexpr unsigned kThreads = 256;
constexpr std::int64_t kMostCtas = 1 << 16;  // each takes what is left by turns

/// kernel(arguments...) on as many threads as there are items, up to a limit. The kernel begins with follow_earlier_kernels().
template <class... P, class... A>
void launch(const Stream& stream, std::int64_t items, void (*kernel)(P...), const A&... arguments) {
  if (items == 0) return;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(std::min((items + kThreads - 1) / kThreads, kMostCtas)));
  config.blockDim = dim3(kThreads);
  config.stream = static_cast<cudaStream_t>(stream.handle);
  config.attrs = &attribute;
  config.numAttrs = stream.dependents ? 1 : 0;
  check(cudaLaunchKernelEx(&config, kernel, P(arguments)...), "cudaLaunchKernelEx");
}

/// Lets the kernel after this one be launched, and waits for those before: neither means anything where kernels are not dependents.
__device__ void follow_earlier_kernels() {
#if __CUDA_ARCH__ >= 900
  cudaTriggerProgrammaticLaunchCompletion();
  cudaGridDependencySynchronize();
#endif
}

__device__ std::int64_t first_item() { return std::int64_t{blockIdx.x} * kThreads + threadIdx.x; }
__device__ std::int64_t items_at_once() { return std::int64_t{gridDim.x} * kThreads; }

__global__ void count_kernel(GivenCounts given, std::int64_t batch, std::int32_t* to) {
  follow_earlier_kernels();
  for (std::int64_t b = first_item(); b < batch; b += items_at_once()) {
    std::int64_t tokens = given.int64 ? static_cast<const std::int64_t*>(given.values)[b]
                                      : std::int64_t{static_cast<const std::int32_t*>(given.values)[b]};
    if (given.starts != nullptr) tokens += std::int64_t{given.starts[b + 1]} - given.starts[b];
    tokens += given.plus;
    to[b] = static_cast<std::int32_t>(max(std::int64_t{INT32_MIN}, min(std::int64_t{INT32_MAX}, tokens)));
  }
}

__global__ void split_padding_kernel(PaddedRows given) {
  follow_earlier_kernels();
  for (std::int64_t b = first_item(); b < given.batch; b += items_at_once()) {
    const std::int32_t most = max(0, min(given.rows, given.totals[b]));
    const std::int32_t tokens = given.tokens != nullptr ? max(0, min(most, given.tokens[b])) : most;
    const auto begin = static_cast<std::int32_t>(b * given.rows);
    given.lengths[2 * b] = given.totals[b];
    given.lengths[2 * b + 1] = 0;
    given.cu_q_tokens[2 * b] = begin;
    given.cu_q_tokens[2 * b + 1] = begin + tokens;
    if (b + 1 == given.batch) given.cu_q_tokens[2 * b + 2] = begin + given.rows;
  }
}

__global__ void mark_seen_kernel(SeenKeys keys, bool* seen) {
  follow_earlier_kernels();
  for (std::int64_t i = first_item(); i < keys.rows * keys.keys; i += items_at_once())
    seen[i] = keys.lengths ? i % keys.keys < keys.given[i / keys.keys] : keys.given[i] > 0;
}

__global__ void to_floats_kernel(const std::uint16_t* from, bool bf16, std::int64_t count, float* to) {
  follow_earlier_kernels();
  for (std::int64_t i = first_item(); i < count; i += items_at_once())
    to[i] = bf16 ? __bfloat162float(__ushort_as_bfloat16(from[i])) : __half2float(__ushort_as_half(from[i]));
}

/// What a thread moves at once.
struct alignas(16) Piece {
  std::uint32_t words[4];
};

/// Tokens of a cache in pieces of T, a row's side by side.
template <class T>
struct Rows {
  T* first = nullptr;
  std::int64_t sequence = 0, head = 0, token = 0;  // strides in pieces

  [[nodiscard]] __device__ T& at(std::int64_t b, std::int64_t h, std::int64_t t, std::int64_t piece) const {
    return first[b * sequence + h * head + t * token + piece];
  }
};

struct Work {
  std::int64_t batch, heads, tokens, pieces;  // of a row

  [[nodiscard]] __host__ __device__ std::int64_t count() const { return batch * heads * tokens * pieces; }
};

[[nodiscard]] __device__ std::int64_t count_of(const Counts& counts, std::int64_t b) {
  return counts.of_sequence == nullptr ? counts.most : min(counts.most, std::int64_t{counts.of_sequence[b]});
}

/// Copies tokens before the sequence's count; where `from` is null, zeroes those from it on.
template <class T>
__global__ void rows_kernel(Rows<const T> from, Rows<T> to, Work work, Counts counts) {
  follow_earlier_kernels();
  for (std::int64_t i = first_item(); i < work.count(); i += items_at_once()) {
    const std::int64_t piece = i % work.pieces, row = i / work.pieces;
    const std::int64_t token = row % work.tokens, head = row / work.tokens % work.heads, b = row / work.tokens / work.heads;
    const bool before = token < count_of(counts, b);
    if (from.first != nullptr && before) to.at(b, head, token, piece) = from.at(b, head, token, piece);
    if (from.first == nullptr && !before) to.at(b, head, token, piece) = T{};
  }
}

/// Whether every row of the view begins at a multiple of 16 bytes and is as long as one.
bool in_pieces(const TensorView& view, std::int64_t row_bytes) {
  const std::int64_t bytes = bytes_of(view.dtype);
  const Strides& s = view.strides;
  const auto size = static_cast<std::int64_t>(sizeof(Piece));
  return reinterpret_cast<std::uintptr_t>(view.data) % sizeof(Piece) == 0 && row_bytes % size == 0 &&
         s.sequence * bytes % size == 0 && s.head * bytes % size == 0 && s.token * bytes % size == 0;
}

template <class T>
Rows<T> rows_of(const TensorView& view) {
  const auto pieces = [&](std::int64_t elements) { return elements * bytes_of(view.dtype) / static_cast<std::int64_t>(sizeof(T)); };
  return {static_cast<T*>(const_cast<void*>(view.data)), pieces(view.strides.sequence), pieces(view.strides.head),
          pieces(view.strides.token)};
}

template <class T>
void launch_rows(const Stream& stream, const TensorView& from, const TensorView& to, const Extent& extent, std::int64_t tokens,
                 const Counts& counts) {
  const std::int64_t row_bytes = extent.dim * bytes_of(to.dtype);
  const Work work{extent.batch, extent.heads, tokens, row_bytes / static_cast<std::int64_t>(sizeof(T))};
  launch(stream, work.count(), rows_kernel<T>, rows_of<const T>(from), rows_of<T>(to), work, counts);
}

void move_rows(const Stream& stream, const TensorView& from, const TensorView& to, const Extent& extent, std::int64_t tokens,
               const Counts& counts) {
  const std::int64_t row_bytes = extent.dim * bytes_of(to.dtype);
  const bool pieces = in_pieces(to, row_bytes) && (from.data == nullptr || in_pieces(from, row_bytes));
  if (pieces) return launch_rows<Piece>(stream, from, to, extent, tokens, counts);
  launch_rows<std::uint8_t>(stream, from, to, extent, tokens, counts);
}

}  // namespace

void count(const Stream& stream, const GivenCounts& given, std::int64_t batch, std::int32_t* to) {
  launch(stream, batch, count_kernel, given, batch, to);
}

void split_padding(const Stream& stream, const PaddedRows& given) { launch(stream, given.batch, split_padding_kernel, given); }

void mark_seen(const Stream& stream, const SeenKeys& keys, bool* seen) {
  launch(stream, keys.rows * keys.keys, mark_seen_kernel, keys, seen);
}

void to_floats(const Stream& stream, const void* from, DType dtype, std::int64_t count, float* to) {
  launch(stream, count, to_floats_kernel, static_cast<const std::uint16_t*>(from), dtype == DType::kBFloat16, count, to);
}

void copy(const Stream& stream, const void* from, void* to, std::size_t bytes) {
  check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, static_cast<cudaStream_t>(stream.handle)), "cudaMemcpyAsync");
}

void copy_tokens(const Stream& stream, const TensorView& from, const TensorView& to, const Extent& extent, const Counts& tokens) {
  move_rows(stream, from, to, extent, tokens.most, tokens);
}

void zero_tokens(const Stream& stream, const TensorView& to, const Extent& extent, const Counts& begins, std::int64_t end) {
  move_rows(stream, {.dtype = to.dtype}, to, extent, end, begins);
}

std::shared_ptr<const float> keep(const std::vector<float>& values) {
  void* memory = nullptr;
  const std::size_t bytes = values.size() * sizeof(float);
  check(cudaMalloc(&memory, std::max<std::size_t>(bytes, 1)), "cudaMalloc");
  std::shared_ptr<const float> kept(static_cast<const float*>(memory), [](const float* p) { cudaFree(const_cast<float*>(p)); });
  check(cudaMemcpy(memory, values.data(), bytes, cudaMemcpyHostToDevice), "cudaMemcpy");
  return kept;
}

std::vector<std::byte> read_back(const void* memory, std::size_t bytes) {
  std::vector<std::byte> values(bytes);
  check(cudaMemcpy(values.data(), memory, bytes, cudaMemcpyDefault), "cudaMemcpy");
  return values;
}

}  // namespace lean::ort::gpu
