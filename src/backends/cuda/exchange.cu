// The exchange's kernel (exchange.hpp). A thread has a word: 8 bytes of a row of O, the row's log-sum-exp, the epoch. It stores its
// rank's to every other rank, waits for theirs, merges and writes the result: threads need nothing of each other. A CTA has a
// block of words, or several where there are more than CTAs that fit the GPU together; it sends all before it waits.
#include "backends/cuda/exchange.hpp"

#include <cuda_runtime_api.h>

#include <math_constants.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "backends/cuda/device.hpp"
#include "backends/cuda/enqueue_kernel.hpp"
#include "backends/cuda/exchanged_words.cuh"
#include "backends/cuda/ptx/grid.cuh"
#include "base/alignment.hpp"
#include "base/int_math.hpp"
#include "base/message.hpp"
#include "base/with_type.hpp"
#include "fixup/exchanged_rows.hpp"

namespace lean::cuda {
namespace {

constexpr std::int32_t kThreads = fixup::ExchangeLayout::kBlockWords;
constexpr std::int32_t kCtasOfMultiprocessor = 4;  // at least, beside each other

struct ExchangeCall {
  Exchange exchange;
  ExchangedStates states;
  fixup::ExchangedRows shape;
  bool vectors;  // pieces of O lie at multiples of their size
};

using Word = ExchangeSystem::Word;

__device__ std::int32_t thread_of_block() { return static_cast<std::int32_t>(threadIdx.x); }

/// Where a word comes from and its result goes to.
template <DType kType>
struct Place {
  std::int64_t row;
  std::int32_t dim;    // its first
  std::int32_t count;  // of its dims that exist; 0: the word does not

  __device__ Place(const ExchangeCall& call, std::int64_t block) {
    const std::int64_t word = block * kThreads + threadIdx.x;
    row = quotient(word, std::int64_t{call.shape.row_words});
    dim = static_cast<std::int32_t>(word - row * call.shape.row_words) * kPieceElements<kType>;
    count = row < call.shape.rows ? min(kPieceElements<kType>, call.states.value_dim - dim) : 0;
  }

  [[nodiscard]] __device__ std::int64_t offset(const ExchangeCall& call) const { return row * call.states.value_dim + dim; }

  [[nodiscard]] __device__ Word load(const ExchangeCall& call, fixup::Epoch epoch) const {
    const auto* const from = static_cast<const ExchangedElement<kType>*>(call.states.o) + offset(call);
    Piece<kType> piece;
    if (call.vectors) {
      piece.bits = *reinterpret_cast<const std::uint64_t*>(from);
    } else {
      for (std::int32_t i = 0; i < count; ++i) piece.elements[i] = from[i];
    }
    return {.data = piece.bits, .lse = call.states.lse[row], .epoch = epoch};
  }

  __device__ void store(const ExchangeCall& call, const Piece<kType>& piece, float lse) const {
    auto* const to = static_cast<ExchangedElement<kType>*>(call.states.merged_o) + offset(call);
    if (call.vectors) {
      *reinterpret_cast<std::uint64_t*>(to) = piece.bits;
    } else {
      for (std::int32_t i = 0; i < count; ++i) to[i] = piece.elements[i];
    }
    if (dim == 0) call.states.merged_lse[row] = lse;
  }
};

/// Sends this rank's words of a block.
template <DType kType>
[[nodiscard]] __device__ Word send_block(const ExchangeCall& call, std::int64_t block, fixup::Epoch epoch) {
  const Place<kType> place(call, block);
  if (place.count == 0) return {.epoch = epoch};
  const Word word = place.load(call, epoch);
  const std::int32_t own = call.exchange.rank;
  fixup::send<ExchangeSystem>(word, own, call.exchange.ranks, [&](std::int32_t rank) -> ptx::SystemWord& {
    return word_at(call.exchange, block, thread_of_block(), epoch, rank, own);
  });
  return word;
}

/// Merges all ranks' words of a block. `own` is what this thread sent of it.
template <DType kType>
__device__ void collect_block(const ExchangeCall& call, std::int64_t block, const Word& own,
                              fixup::Patience<ExchangeSystem>& patience) {
  const Place<kType> place(call, block);
  if (place.count == 0) return;
  Merged<kType> merged;
  const std::int32_t rank = call.exchange.rank;
  const fixup::Collected collected = fixup::collect<ExchangeSystem>(
      own, rank, call.exchange.ranks, patience,
      [&](std::int32_t sender) -> ptx::SystemWord& {
        return word_at(call.exchange, block, thread_of_block(), own.epoch, rank, sender);
      },
      [&](const Word& word) { merged.take(word); });
  const bool complete = collected.fault == fixup::ExchangeFault::kNone;
  if (!complete) report(call.exchange, collected);
  Piece<kType> piece;
#pragma unroll
  for (std::int32_t i = 0; i < kPieceElements<kType>; ++i) piece.put(i, complete ? merged.o[i] : CUDART_NAN_F);
  place.store(call, piece, complete ? merged.lse : CUDART_NAN_F);
}

template <DType kType>
__global__ void __launch_bounds__(kThreads, kCtasOfMultiprocessor) exchange_kernel(const __grid_constant__ ExchangeCall call) {
  ptx::start_dependents();
  ptx::await_earlier_kernels();  // the call's results are there, and the exchange before this one is over
  // Each thread asks for itself, beside what it sends: none waits for another.
  const fixup::Epoch epoch = fixup::CallCount::epoch_after(call_count(call.exchange).load(::cuda::memory_order_relaxed));
  const std::int64_t blocks = call.shape.blocks();
  const std::int64_t first = blockIdx.x;
  const Word own = send_block<kType>(call, first, epoch);
  for (std::int64_t block = first + gridDim.x; block < blocks; block += gridDim.x) {
    static_cast<void>(send_block<kType>(call, block, epoch));
  }
  fixup::Patience<ExchangeSystem> patience(call.exchange.limit_ns);
  collect_block<kType>(call, first, own, patience);
  for (std::int64_t block = first + gridDim.x; block < blocks; block += gridDim.x) {
    const Place<kType> place(call, block);
    if (place.count > 0) collect_block<kType>(call, block, place.load(call, epoch), patience);
  }
  __syncthreads();  // every thread of the CTA has asked for the count
  if (threadIdx.x == 0)
    call_count(call.exchange).fetch_add(fixup::CallCount::share_of(blockIdx.x, gridDim.x), ::cuda::memory_order_relaxed);
}

using Kernel = void (*)(ExchangeCall);

Kernel kernel_of(DType dtype) noexcept {
  Kernel kernel = nullptr;
  with_query_dtype(dtype, [&]<DType kType>() { kernel = exchange_kernel<kType>; });
  return kernel;
}

bool in_vectors(const ExchangedStates& states) noexcept {
  return states.value_dim * bytes_of(states.dtype) % fixup::kPieceBytes == 0 && aligned_to(states.o, fixup::kPieceBytes) &&
         aligned_to(states.merged_o, fixup::kPieceBytes);
}

}  // namespace

Status enqueue_exchange(const Exchange& exchange, const ExchangedStates& states, const Options& options) noexcept {
  Device device;
  if (const Status status = current_device(device); !status.ok()) return status;
  const ExchangeCall call{.exchange = exchange,
                          .states = states,
                          .shape = fixup::ExchangedRows::of(states.rows, states.value_dim, states.dtype),
                          .vectors = in_vectors(states)};
  const std::int64_t ctas = min_of(call.shape.blocks(), std::int64_t{kCtasOfMultiprocessor} * device.multiprocessors);
  const KernelLaunch launch{.grid = dim3(static_cast<unsigned>(ctas)),
                            .threads = kThreads,
                            .overlaps = device.launches_dependents(),
                            .stream = options.stream};
  return enqueue_kernel(launch, kernel_of(states.dtype), call);
}

}  // namespace lean::cuda
