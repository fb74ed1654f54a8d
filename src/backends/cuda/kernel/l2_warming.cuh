// The first read of a decode step: it begins as soon as one length is known, thousands of cycles before the plan is, and goes into the L2.
#pragma once

#include <cstdint>

#include "backends/cuda/kernel/device_call.hpp"
#include "backends/cuda/kernel/row_pieces.cuh"
#include "backends/cuda/ptx/copy.cuh"
#include "problem/address.hpp"
#include "problem/sequence.hpp"

namespace lean::cuda {

/// Sends for the K and V of one tile, about where this worker's share would begin if all sequences were alike. Mostly another worker meets
/// it, which is no loss: workers ask for different tiles, of tokens that exist, and so the memory is not idle meanwhile. By one thread.
template <KernelConfig kConfig, bool kCumulative>
__device__ __forceinline__ void warm_l2(const DeviceCall& call) {
  const Problem& problem = call.problem;
  const float place = static_cast<float>(blockIdx.x) * call.outputs_a_worker;
  const auto output = static_cast<std::int32_t>(place);
  const std::int32_t sequence =
      min(static_cast<std::int32_t>(place * call.sequences_an_output), static_cast<std::int32_t>(problem.batch) - 1);
  const std::int32_t head =
      min(max(output - sequence * call.shape.kv_heads, 0), call.shape.kv_heads - 1);  // the products are rounded
  const Sequence lengths = BasicLengthSource<kCumulative>(problem)(sequence);
  if (lengths.q_tokens == 0 || (kCumulative && !call.queries.has(lengths.q_tokens))) return;
  const KeySpan seen = visible_span(lengths, 0, lengths.q_tokens - 1, call.shape.reach);
  const std::int32_t tokens = seen.end - seen.begin;
  if (tokens < call.least_warmed_tokens) return;
  const float part = place - static_cast<float>(output);
  std::int32_t token = seen.begin + min(static_cast<std::int32_t>(part * static_cast<float>(tokens)), tokens - 1);
  token = max(token - (token - lengths.kv_begin) % kConfig.tile_tokens, seen.begin);
  const auto bytes = static_cast<std::uint32_t>(min(kConfig.tile_tokens, seen.end - token) * row_bytes<kConfig>(call));
  const auto send_for = [&](const TensorView& tensor) {
    const std::int64_t first = kv_offset(tensor.strides, lengths, {sequence, head}, kCumulative && problem.cu_kv_tokens != nullptr);
    ptx::prefetch_l2(static_cast<const std::byte*>(tensor.data) + (first + token * tensor.strides.token) * bytes_of(kConfig.dtype),
                     bytes);
  };
  send_for(problem.k);
  send_for(problem.v);
}

}  // namespace lean::cuda
