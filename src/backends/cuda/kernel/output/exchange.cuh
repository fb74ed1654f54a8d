// A launch that is one rank's part of an exchange (fixup/exchange.hpp): whoever has finished a row sends it to every rank, its own too,
// and takes the next segment; a CTA without work left collects its blocks of words, merges what the ranks sent, and writes the output.
// Nothing waits before it has sent all that it will. A call's rows are (sequence, query head), one query a sequence.
#pragma once

#include <math_constants.h>

#include <cstdint>

#include "backends/cuda/exchanged_words.cuh"
#include "backends/cuda/kernel/cta_memory.cuh"
#include "backends/cuda/kernel/output/rows.cuh"
#include "backends/cuda/ptx/special_registers.cuh"
#include "backends/cuda/ptx/warp.cuh"
#include "base/int_math.hpp"

namespace lean::cuda {

/// Which consumer thread joins the exchange: not the first, which asks for queries.
inline constexpr std::uint32_t kJoiningThread = kWarpThreads;

/// Counts the CTA among those that take part in the call, and asks what the call's number is. Called by all consumer threads, once the
/// launches before this one are over; joined_exchange() takes the answer, after a barrier of theirs.
template <KernelConfig kConfig>
[[nodiscard]] __device__ __forceinline__ std::uint64_t join_exchange(const Exchange& exchange, CtaShared<kConfig>& shared) {
  if (threadIdx.x != kJoiningThread) return 0;
  shared.arrival.exchange = exchange;
  return call_count(exchange).fetch_add(fixup::CallCount::share_of(blockIdx.x, gridDim.x), ::cuda::memory_order_relaxed);
}
template <KernelConfig kConfig>
__device__ __forceinline__ void joined_exchange(std::uint64_t calls, CtaShared<kConfig>& shared) {
  if (threadIdx.x == kJoiningThread) shared.arrival.epoch = fixup::CallCount::epoch_after(calls);
}

template <KernelConfig kConfig>
inline constexpr std::int32_t kRowWords = kConfig.value_dim() / kVectorDims;  // a vector of 16-bit elements is a word's piece

/// Sends a merged slice of a row to every rank. Called by a warp, a barrier of the consumers behind joined_exchange().
template <KernelConfig kConfig>
__device__ __forceinline__ void send_slice(const CtaShared<kConfig>& shared, const SegmentRecord& record, std::int32_t row,
                                           std::int32_t slice, const RowSlice<kConfig>& whole) {
  static_assert(kVectorDims * sizeof(std::uint16_t) == fixup::kPieceBytes);
  const DeviceCall& call = shared.call;
  const std::int32_t head = row_in_block<kConfig>(call, record, row).head_in_group;
  const PackedRow at{.token = 0, .head_in_group = head};
  const float sink = output::row_sink(call.problem, call.shape.group, {record.sequence, record.kv_head}, at);
  const RowEnd end{.scale = output_scale<kConfig>(whole.state, sink)};
  const OutputPairs<kConfig> packed(call, end, whole.o);
  std::uint64_t piece = packed.pairs[0];
  if constexpr (kLaneDims<kConfig> == kVectorDims) {
    piece |= std::uint64_t{packed.pairs[1]} << 32;
  } else {  // of two lanes
    piece |= std::uint64_t{__shfl_down_sync(ptx::kAllLanes, packed.pairs[0], 1)} << 32;
  }
  const std::int32_t dim = output_dim<kConfig>(row, dim_of_lane<kConfig>(slice));
  if (dim % kVectorDims != 0) return;
  const std::int64_t exchanged_row =
      std::int64_t{record.sequence} * call.problem.q_heads + record.kv_head * call.shape.group + head;
  const std::int64_t word = exchanged_row * kRowWords<kConfig> + dim / kVectorDims;
  const std::int64_t block = word / fixup::ExchangeLayout::kBlockWords;
  const auto i = static_cast<std::int32_t>(word % fixup::ExchangeLayout::kBlockWords);
  const Exchange& exchange = shared.arrival.exchange;
  const fixup::Epoch epoch = shared.arrival.epoch;
  const ExchangeSystem::Word sent{.data = piece, .lse = softmax::natural_lse(whole.state, sink), .epoch = epoch};
  const std::int32_t own = exchange.rank;
  fixup::send<ExchangeSystem>(sent, own, exchange.ranks,
                              [&](std::int32_t rank) -> ptx::SystemWord& { return word_at(exchange, block, i, epoch, rank, own); });
  ExchangeSystem::store(word_at(exchange, block, i, epoch, own, own), sent);  // pairs with collect_rows()
}

/// Writes the merged elements of a word, and with a row's first its log-sum-exp.
template <KernelConfig kConfig>
__device__ __forceinline__ void write_word(const DeviceCall& call, std::int64_t word, std::uint64_t piece, float lse) {
  const Problem& problem = call.problem;
  const std::int64_t row = word / kRowWords<kConfig>;
  const auto dim = static_cast<std::int32_t>(word % kRowWords<kConfig>) * kVectorDims;
  const std::int64_t sequence = quotient(row, std::int64_t{problem.q_heads});
  const std::int64_t head = row - sequence * problem.q_heads;
  const std::int64_t offset = sequence * problem.o.strides.sequence + head * problem.o.strides.head + dim;
  std::uint16_t* const to = static_cast<std::uint16_t*>(problem.o.data) + offset;
  if (call.output.vector_output) {
    *reinterpret_cast<std::uint64_t*>(to) = piece;
  } else {
#pragma unroll
    for (int i = 0; i < kVectorDims; ++i) to[i] = static_cast<std::uint16_t>(piece >> (16 * i));
  }
  if (dim == 0 && problem.lse.data != nullptr)
    problem.lse.data[sequence * problem.lse.sequence_stride + head * problem.lse.head_stride] = lse;
}

/// Waits for what all ranks have of the CTA's blocks, merges it and writes it. Called by all consumer threads, which have no work left.
template <KernelConfig kConfig>
__device__ __noinline__ void collect_rows() {
  constexpr std::int32_t kBlockWords = fixup::ExchangeLayout::kBlockWords;
  const CtaShared<kConfig>& shared = cta_memory<kConfig>().shared;
  consumer_sync<kConfig>();  // a CTA that never had work knows the epoch only now
  const Exchange& exchange = shared.arrival.exchange;
  const fixup::Epoch epoch = shared.arrival.epoch;
  const std::int64_t words = shared.call.problem.batch * shared.call.problem.q_heads * kRowWords<kConfig>;
  fixup::Patience<ExchangeSystem> patience(exchange.limit_ns);
#pragma unroll 1
  for (std::int64_t block = blockIdx.x; block * kBlockWords < words; block += gridDim.x) {
#pragma unroll 1
    for (std::int32_t i = static_cast<std::int32_t>(threadIdx.x); i < kBlockWords; i += kConfig.consumer_threads()) {
      const std::int64_t word = block * kBlockWords + i;
      if (word >= words) return;
      Merged<kConfig.dtype> merged;
      const fixup::Collected collected = fixup::collect_all<ExchangeSystem>(
          epoch, exchange.ranks, patience,
          [&](std::int32_t sender) -> ptx::SystemWord& { return word_at(exchange, block, i, epoch, exchange.rank, sender); },
          [&](const ExchangeSystem::Word& sent) { merged.take(sent); });
      const bool complete = collected.fault == fixup::ExchangeFault::kNone;
      if (!complete) report(exchange, collected);
      Piece<kConfig.dtype> piece;
#pragma unroll
      for (int j = 0; j < kVectorDims; ++j) piece.put(j, complete ? merged.o[j] : CUDART_NAN_F);
      write_word<kConfig>(shared.call, word, piece.bits, complete ? merged.lse : CUDART_NAN_F);
    }
  }
}

}  // namespace lean::cuda
