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
#include "backends/cuda/kernel/elements.cuh"
#include "backends/cuda/ptx/grid.cuh"
#include "backends/cuda/ptx/system_word.cuh"
#include "base/alignment.hpp"
#include "base/int_math.hpp"
#include "base/message.hpp"
#include "base/with_type.hpp"
#include "fixup/exchanged_rows.hpp"
#include "softmax/finished_states.hpp"

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

/// What fixup::send and fixup::collect ask for, between GPUs.
struct DeviceSystem {
  struct Word {
    std::uint64_t data = 0;
    float lse = 0.0F;
    fixup::Epoch epoch = 0;
  };

  __device__ static Word load(const ptx::SystemWord& from) {
    const ptx::SystemWord word = ptx::load_relaxed_system(&from);
    return {.data = word.low,
            .lse = __uint_as_float(static_cast<std::uint32_t>(word.high)),
            .epoch = static_cast<fixup::Epoch>(word.high >> 32)};
  }
  __device__ static void store(ptx::SystemWord& to, const Word& word) {
    ptx::store_relaxed_system(&to, {word.data, std::uint64_t{word.epoch} << 32 | __float_as_uint(word.lse)});
  }
  __device__ static std::int64_t now_ns() { return ptx::global_time_ns(); }
  __device__ static void relax() { __nanosleep(20); }
};
using Word = DeviceSystem::Word;

template <DType kType>
using Element = std::conditional_t<kType == DType::kFloat32, float, std::uint16_t>;
template <DType kType>
inline constexpr std::int32_t kPieceElements = fixup::kPieceBytes / static_cast<std::int32_t>(sizeof(Element<kType>));

/// A piece of O, as it lies in a row and as numbers.
template <DType kType>
union Piece {
  std::uint64_t bits = 0;
  Element<kType> elements[kPieceElements<kType>];

  [[nodiscard]] __device__ __forceinline__ float number(std::int32_t i) const {
    if constexpr (kType == DType::kFloat32) {
      return elements[i];
    } else {
      return to_float<kType>(elements[i]);
    }
  }
  __device__ __forceinline__ void put(std::int32_t i, float number) {
    if constexpr (kType == DType::kFloat32) {
      elements[i] = number;
    } else {
      elements[i] = kType == DType::kFloat16 ? from_float<Half>(number).bits : from_float<BFloat16>(number).bits;
    }
  }
};

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
    const auto* const from = static_cast<const Element<kType>*>(call.states.o) + offset(call);
    Piece<kType> piece;
    if (call.vectors) {
      piece.bits = *reinterpret_cast<const std::uint64_t*>(from);
    } else {
      for (std::int32_t i = 0; i < count; ++i) piece.elements[i] = from[i];
    }
    return {.data = piece.bits, .lse = call.states.lse[row], .epoch = epoch};
  }

  __device__ void store(const ExchangeCall& call, const Piece<kType>& piece, float lse) const {
    auto* const to = static_cast<Element<kType>*>(call.states.merged_o) + offset(call);
    if (call.vectors) {
      *reinterpret_cast<std::uint64_t*>(to) = piece.bits;
    } else {
      for (std::int32_t i = 0; i < count; ++i) to[i] = piece.elements[i];
    }
    if (dim == 0) call.states.merged_lse[row] = lse;
  }
};

/// The rows of all ranks so far, merged in rank order in fp32 as merge_states() does, and in its bits.
template <DType kType>
struct Merged {
  float o[kPieceElements<kType>];
  float lse;
  bool any = false;

  __device__ __forceinline__ void take(const Word& word) {
    const Piece<kType> piece{.bits = word.data};
    if (!any) {
#pragma unroll
      for (std::int32_t i = 0; i < kPieceElements<kType>; ++i) o[i] = piece.number(i);
      lse = word.lse;
    } else {
      const softmax::FinishedMerge merge(lse, word.lse);
#pragma unroll
      for (std::int32_t i = 0; i < kPieceElements<kType>; ++i) o[i] = merge.element(o[i], piece.number(i));
      lse = merge.lse();
    }
    any = true;
  }
};

__device__ fixup::Epoch& epoch_word(const ExchangeCall& call, std::int64_t block) {
  auto* const own = static_cast<std::byte*>(call.exchange.memory[call.exchange.rank]);
  return *reinterpret_cast<fixup::Epoch*>(own + fixup::ExchangeLayout{call.exchange.ranks}.epoch_offset(block));
}

/// The thread's word of a block in the memory of `owner`, in the slot that `sender` has for this epoch.
__device__ ptx::SystemWord& word_at(const ExchangeCall& call, std::int64_t block, fixup::Epoch epoch, std::int32_t owner,
                                    std::int32_t sender) {
  const fixup::ExchangeLayout layout{call.exchange.ranks};
  auto* const memory = static_cast<std::byte*>(call.exchange.memory[owner]);
  const auto thread = static_cast<std::int32_t>(threadIdx.x);
  return *reinterpret_cast<ptx::SystemWord*>(memory + layout.word_offset(block, fixup::exchange_slot(epoch), sender, thread));
}

/// The first fault stays; whether that is so where two meet one at once does not matter.
__device__ void report(const ExchangeCall& call, const fixup::Collected& collected) {
  auto* const fault = static_cast<volatile std::uint32_t*>(call.exchange.fault);
  if (*fault == 0) *fault = fixup::fault_word(collected);
}

/// Sends this rank's words of a block. Its epoch is read beside them.
template <DType kType>
[[nodiscard]] __device__ Word send_block(const ExchangeCall& call, std::int64_t block) {
  const Place<kType> place(call, block);
  const fixup::Epoch epoch = epoch_word(call, block) + 1;
  if (place.count == 0) return {.epoch = epoch};
  const Word word = place.load(call, epoch);
  const std::int32_t own = call.exchange.rank;
  fixup::send<DeviceSystem>(word, own, call.exchange.ranks,
                            [&](std::int32_t rank) -> ptx::SystemWord& { return word_at(call, block, epoch, rank, own); });
  return word;
}

/// Merges all ranks' words of a block. `own` is what this thread sent of it.
template <DType kType>
__device__ void collect_block(const ExchangeCall& call, std::int64_t block, const Word& own,
                              fixup::Patience<DeviceSystem>& patience) {
  const Place<kType> place(call, block);
  if (place.count == 0) return;
  Merged<kType> merged;
  const std::int32_t rank = call.exchange.rank;
  const fixup::Collected collected = fixup::collect<DeviceSystem>(
      own, rank, call.exchange.ranks, patience,
      [&](std::int32_t sender) -> ptx::SystemWord& { return word_at(call, block, own.epoch, rank, sender); },
      [&](const Word& word) { merged.take(word); });
  const bool complete = collected.fault == fixup::ExchangeFault::kNone;
  if (!complete) report(call, collected);
  Piece<kType> piece;
#pragma unroll
  for (std::int32_t i = 0; i < kPieceElements<kType>; ++i) piece.put(i, complete ? merged.o[i] : CUDART_NAN_F);
  place.store(call, piece, complete ? merged.lse : CUDART_NAN_F);
}

template <DType kType>
__global__ void __launch_bounds__(kThreads, kCtasOfMultiprocessor) exchange_kernel(const __grid_constant__ ExchangeCall call) {
  ptx::start_dependents();
  ptx::await_earlier_kernels();  // the call's results are there, and the exchange before this one is over
  const std::int64_t blocks = call.shape.blocks();
  const std::int64_t first = blockIdx.x;
  const Word own = send_block<kType>(call, first);
  for (std::int64_t block = first + gridDim.x; block < blocks; block += gridDim.x) {
    static_cast<void>(send_block<kType>(call, block));
  }
  fixup::Patience<DeviceSystem> patience(call.exchange.limit_ns);
  collect_block<kType>(call, first, own, patience);
  for (std::int64_t block = first + gridDim.x; block < blocks; block += gridDim.x) {
    const Place<kType> place(call, block);
    if (place.count > 0) collect_block<kType>(call, block, place.load(call, epoch_word(call, block) + 1), patience);
  }
  __syncthreads();  // nobody reads the epochs any more
  for (std::int64_t i = threadIdx.x; first + i * gridDim.x < blocks; i += kThreads) {
    epoch_word(call, first + i * gridDim.x) += 1;
  }
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
