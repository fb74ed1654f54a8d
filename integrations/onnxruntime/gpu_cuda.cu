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
constexpr std::int64_t kMostCtas = 1 << 16;   // each takes what is left by turns
constexpr std::int64_t kMostCtasInY = 65535;  // CUDA's limit
constexpr std::int64_t kManyCtas = 4096;      // four times what a large GPU holds at once

/// kernel(arguments...) on so many CTAs. The kernel begins with follow_earlier_kernels().
template <class... P, class... A>
void launch_grid(const Stream& stream, const dim3& ctas, void (*kernel)(P...), const A&... arguments) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = ctas;
  config.blockDim = dim3(kThreads);
  config.stream = static_cast<cudaStream_t>(stream.handle);
  config.attrs = &attribute;
  config.numAttrs = stream.dependents ? 1 : 0;
  check(cudaLaunchKernelEx(&config, kernel, P(arguments)...), "cudaLaunchKernelEx");
}

/// On as many threads as there are items, up to a limit.
template <class... P, class... A>
void launch(const Stream& stream, std::int64_t items, void (*kernel)(P...), const A&... arguments) {
  if (items == 0) return;
  launch_grid(stream, dim3(static_cast<unsigned>(std::min((items + kThreads - 1) / kThreads, kMostCtas))), kernel, arguments...);
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

__global__ void fill_mask_kernel(const __grid_constant__ RuleMask rules, float* values) {
  follow_earlier_kernels();
  for (std::int64_t i = first_item(); i < rules.rows() * rules.keys; i += items_at_once())
    values[i] = mask_value(rules, i / rules.keys, i % rules.keys);
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

  [[nodiscard]] __device__ T* row(std::int64_t b, std::int64_t h) const { return first + b * sequence + h * head; }
};

/// Move, in pieces of T.
template <class T>
struct RowMove {
  Rows<const T> from;
  Rows<T> to;
  std::int64_t batch = 0, heads = 0, pieces = 0;  // of a row
  std::int64_t end = 0;                           // no token from here on is written
  Counts counts{};
};

template <class T>
struct RowMoves {
  RowMove<T> at[kMovesAtOnce];
};

[[nodiscard]] __device__ std::int64_t count_of(const Counts& counts, std::int64_t b) {
  return counts.of_sequence == nullptr ? counts.most : min(counts.most, std::int64_t{counts.of_sequence[b]});
}

/// CTAs (x, y, z): tokens of heads y, y + gridDim.y, ... of move z. A row takes so many threads as it has pieces, and a CTA as many
/// rows at once as have room.
template <class T>
__global__ void __launch_bounds__(kThreads) move_kernel(const __grid_constant__ RowMoves<T> moves) {
  follow_earlier_kernels();
  const RowMove<T>& move = moves.at[blockIdx.z];
  const unsigned row_threads = move.pieces < kThreads ? static_cast<unsigned>(move.pieces) : kThreads;
  const unsigned rows_at_once = kThreads / row_threads;
  const unsigned row = threadIdx.x / row_threads;
  if (row >= rows_at_once) return;
  for (std::int64_t head = blockIdx.y; head < move.batch * move.heads; head += gridDim.y) {
    const std::int64_t b = head / move.heads;
    const std::int64_t h = head - b * move.heads;
    const std::int64_t count = max(std::int64_t{0}, count_of(move.counts, b));
    const bool copies = move.from.first != nullptr;
    const T* const from = copies ? move.from.row(b, h) : nullptr;
    T* const to = move.to.row(b, h);
    const std::int64_t end = copies ? count : move.end;
    for (std::int64_t token = (copies ? 0 : count) + std::int64_t{blockIdx.x} * rows_at_once + row; token < end;
         token += std::int64_t{gridDim.x} * rows_at_once)
      for (std::int64_t piece = threadIdx.x % row_threads; piece < move.pieces; piece += row_threads)
        to[token * move.to.token + piece] = copies ? from[token * move.from.token + piece] : T{};
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

std::int64_t row_bytes_of(const Move& move) { return move.extent.dim * bytes_of(move.to.dtype); }

bool in_pieces(const Move& move) {
  return in_pieces(move.to, row_bytes_of(move)) && (move.from.data == nullptr || in_pieces(move.from, row_bytes_of(move)));
}

template <class T>
void launch_moves(const Stream& stream, std::span<const Move> moves) {
  RowMoves<T> all;
  std::int64_t heads = 0;
  std::int64_t ctas_of_head = 0;
  for (std::size_t i = 0; i < moves.size(); ++i) {
    const Move& move = moves[i];
    const bool copies = move.from.data != nullptr;
    const std::int64_t pieces = row_bytes_of(move) / static_cast<std::int64_t>(sizeof(T));
    all.at[i] = {.from = rows_of<const T>(move.from),
                 .to = rows_of<T>(move.to),
                 .batch = move.extent.batch,
                 .heads = move.extent.heads,
                 .pieces = pieces,
                 .end = move.end,
                 .counts = move.tokens};
    heads = std::max(heads, move.extent.batch * move.extent.heads);
    ctas_of_head = std::max(ctas_of_head, (copies ? move.tokens.most : move.end) * pieces / kThreads + 1);
  }
  if (heads == 0) return;
  const std::int64_t y = std::min(heads, kMostCtasInY);
  const std::int64_t x = std::min(ctas_of_head, std::max<std::int64_t>(1, kManyCtas / y));
  launch_grid(stream, dim3(static_cast<unsigned>(x), static_cast<unsigned>(y), static_cast<unsigned>(moves.size())), move_kernel<T>,
              all);
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

void move_tokens(const Stream& stream, std::span<const Move> moves) {
  for (; !moves.empty(); moves = moves.subspan(std::min(moves.size(), kMovesAtOnce))) {
    const auto some = moves.first(std::min(moves.size(), kMovesAtOnce));
    if (std::all_of(some.begin(), some.end(), [](const Move& move) { return in_pieces(move); }))
      launch_moves<Piece>(stream, some);
    else
      launch_moves<std::uint8_t>(stream, some);
  }
}

void fill_mask(const Stream& stream, const RuleMask& rules, float* values) {
  launch(stream, rules.rows() * rules.keys, fill_mask_kernel, rules, values);
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
