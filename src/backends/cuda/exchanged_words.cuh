// Words of an exchange on GPUs (fixup/exchange.hpp): 8 bytes of a row of O, the row's log-sum-exp and the epoch in 16 bytes, which are
// stored and loaded whole; where they lie in the ranks' memory; and the rows of several ranks as one.
#pragma once

#include <cuda/atomic>

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "backends/cuda/kernel/elements.cuh"
#include "backends/cuda/ptx/system_word.cuh"
#include "fixup/exchange.hpp"
#include "fixup/exchanged_rows.hpp"
#include "lean/exchange.hpp"
#include "lean/float_types.hpp"
#include "softmax/finished_states.hpp"

namespace lean::cuda {

/// What fixup::send and fixup::collect ask for, between GPUs.
struct ExchangeSystem {
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

template <DType kType>
using ExchangedElement = std::conditional_t<kType == DType::kFloat32, float, std::uint16_t>;
template <DType kType>
inline constexpr std::int32_t kPieceElements = fixup::kPieceBytes / static_cast<std::int32_t>(sizeof(ExchangedElement<kType>));

/// A piece of O, as it lies in a row and as numbers.
template <DType kType>
union Piece {
  std::uint64_t bits = 0;
  ExchangedElement<kType> elements[kPieceElements<kType>];

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

/// The rows of all ranks so far, merged in rank order in fp32 as merge_states() does, and in its bits.
template <DType kType>
struct Merged {
  float o[kPieceElements<kType>];
  float lse;
  bool any = false;

  __device__ __forceinline__ void take(const ExchangeSystem::Word& word) {
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

/// The calls that this rank's memory has seen (fixup::CallCount).
[[nodiscard]] __device__ __forceinline__ ::cuda::atomic_ref<std::uint64_t, ::cuda::thread_scope_device> call_count(
    const Exchange& exchange) {
  return ::cuda::atomic_ref<std::uint64_t, ::cuda::thread_scope_device>(
      *static_cast<std::uint64_t*>(exchange.memory[exchange.rank]));
}

/// Word `i` of a block in the memory of `owner`, in the slot that `sender` has for this epoch.
[[nodiscard]] __device__ __forceinline__ ptx::SystemWord& word_at(const Exchange& exchange, std::int64_t block, std::int32_t i,
                                                                  fixup::Epoch epoch, std::int32_t owner, std::int32_t sender) {
  const fixup::ExchangeLayout layout{exchange.ranks};
  auto* const memory = static_cast<std::byte*>(exchange.memory[owner]);
  return *reinterpret_cast<ptx::SystemWord*>(memory + layout.word_offset(block, fixup::exchange_slot(epoch), sender, i));
}

/// The first fault stays; whether that is so where two meet one at once does not matter.
__device__ __forceinline__ void report(const Exchange& exchange, const fixup::Collected& collected) {
  auto* const fault = static_cast<volatile std::uint32_t*>(exchange.fault);
  if (*fault == 0) *fault = fixup::fault_word(collected);
}

}  // namespace lean::cuda
