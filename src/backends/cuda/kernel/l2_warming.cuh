// The first read of a decode step: it begins as soon as one length is known, thousands of cycles before the plan is, and goes into the L2.
#pragma once

#include <cstdint>

#include "backends/cuda/kernel/device_call.hpp"
#include "backends/cuda/kernel/row_pieces.cuh"
#include "backends/cuda/ptx/copy.cuh"
#include "problem/address.hpp"
#include "problem/sequence.hpp"

namespace lean::cuda {

/// Sends for the K and V of the worker's early tiles. Mostly another worker meets them, which is no loss: workers ask for different tiles,
/// of tokens that exist, and so the memory is not idle meanwhile. By one thread.
template <KernelConfig kConfig, bool kCumulative>
__device__ __forceinline__ void warm_l2(const DeviceCall& call) {
  const Problem& problem = call.problem;
  const auto worker = static_cast<std::int32_t>(blockIdx.x);
  const EarlyPlace place = early_place(call.alike, worker, static_cast<std::int32_t>(problem.batch), call.shape.kv_heads);
  const Sequence lengths = BasicLengthSource<kCumulative>(problem)(place.sequence);
  if (lengths.q_tokens == 0 || (kCumulative && !call.queries.has(lengths.q_tokens))) return;
  const KeySpan seen = visible_span(lengths, 0, lengths.q_tokens - 1, call.shape.reach);
  if (seen.begin >= seen.end) return;
  const KeySpan tokens = early_tokens(call.alike, place, seen, lengths.kv_begin, kConfig.tile_tokens);
  const auto bytes = static_cast<std::uint32_t>((tokens.end - tokens.begin) * row_bytes<kConfig>(call));
  const auto send_for = [&](const TensorView& tensor) {
    const HeadPosition head{place.sequence, place.kv_head};
    const std::int64_t first = kv_offset(tensor.strides, lengths, head, kCumulative && problem.cu_kv_tokens != nullptr);
    const std::int64_t offset = first + tokens.begin * tensor.strides.token;
    ptx::prefetch_l2(static_cast<const std::byte*>(tensor.data) + offset * bytes_of(kConfig.dtype), bytes);
  };
  send_for(problem.k);
  send_for(problem.v);
}

}  // namespace lean::cuda
