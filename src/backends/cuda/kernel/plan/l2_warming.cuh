// The first read of a decode step: it begins as soon as one length is known, thousands of cycles before the plan is, and goes into
// the L2.
#pragma once

#include <cstdint>

#include "backends/cuda/kernel/asked.cuh"
#include "backends/cuda/kernel/device_call.hpp"
#include "backends/cuda/kernel/kv_rows.cuh"
#include "backends/cuda/kernel/lines.cuh"
#include "backends/cuda/kernel/plan/early_tile.hpp"
#include "backends/cuda/ptx/copy.cuh"
#include "backends/cuda/ptx/warp.cuh"
#include "problem/address.hpp"
#include "problem/pages.hpp"
#include "problem/sequence.hpp"

namespace lean::cuda {

/// Whether a variant has it: rows that threads copy gain nothing by it (docs/notebook/first-read.md).
template <KernelConfig kConfig>
inline constexpr bool kWarmsL2 = kConfig.traits().warms_l2;

/// Whether a call that overlaps the kernels ahead of it may prefetch before these have ended. They may still be writing the lengths
/// that say where: so only where lengths are clamped to a capacity, and all memory up to it is allocated.
template <KernelConfig kConfig>
[[nodiscard]] __device__ __forceinline__ bool may_warm_early(const DeviceCall& call) {
  return !call.plan.cumulative && !Asked<kConfig>(call).pages();
}

/// Tokens of a head that do not lie end to end, line by line, by a warp: a lane a row. `ids`: of the sequence's pages, where it has
/// any.
template <KernelConfig kConfig>
__device__ __forceinline__ void prefetch_rows(const DeviceCall& call, const HeadRows& k, const HeadRows& v, bool keys_only,
                                              const std::int32_t* ids, const KeySpan& tokens) {
  constexpr std::int32_t kRowBytes = kConfig.head_dim * bytes_of(kConfig.dtype);
  const PagedKv& pages = call.problem.pages;
#pragma unroll 1
  for (std::int32_t i = lane(); i < tokens.end - tokens.begin; i += kWarpThreads) {
    const std::int32_t token = tokens.begin + i;
    std::int32_t id = 0;
    std::int32_t row = token;
    if (ids != nullptr) {
      const std::int32_t page = page_of(call, token);
      id = ids[page];
      if (!in_pool(pages, id)) continue;
      row -= page * pages.page_tokens;
    }
#pragma unroll
    for (std::int32_t at = 0; at < kRowBytes; at += ptx::kLineBytes) {
      if (!has_piece<kConfig>(call, at / kPieceBytes)) break;
      ptx::prefetch_l2_line(k.first + id * k.page_bytes + row * k.token_bytes + at);
      if (!keys_only) ptx::prefetch_l2_line(v.first + id * v.page_bytes + row * v.token_bytes + at);
    }
  }
}

/// Sends for the K and V of the worker's early tiles. Mostly another worker meets them, which is no loss: workers ask for different
/// tiles, of tokens that exist, and so the memory is not idle meanwhile. Of fp8 row by row only where shares are short: in longer
/// ones the memory is not what is waited for. By a warp.
template <KernelConfig kConfig, bool kCumulative>
__device__ __forceinline__ void warm_l2(const DeviceCall& call) {
  const Problem& problem = call.problem;
  const bool paged = is_paged(problem.pages);
  const bool end_to_end = !paged && call.load.bulk_copies;
  if (!paged && !end_to_end && !Asked<kConfig>(call).tensor_copies()) return;
  const auto worker = static_cast<std::int32_t>(blockIdx.x);
  const EarlyPlace place = early_place(call.plan.alike, worker, static_cast<std::int32_t>(problem.batch), call.shape.kv_heads);
  const Sequence lengths = !kCumulative && call.launch.dependent ? BasicLengthSource<false, PastL1>(problem)(place.sequence)
                                                                 : BasicLengthSource<kCumulative>(problem)(place.sequence);
  if (lengths.q_tokens == 0 || (kCumulative && !call.plan.queries.has(lengths.q_tokens))) return;
  const KeySpan seen = visible_span(lengths, 0, lengths.q_tokens - 1, call.shape.reach);
  if (seen.begin >= seen.end) return;
  if (!end_to_end && kConfig.kv_type().converted() && is_long_share(call.plan.alike, seen, kConfig.tile_tokens)) return;
  const KeySpan tokens = early_tokens(call.plan.alike, place, seen, lengths.kv_begin, kConfig.tile_tokens);
  const HeadRows k = head_rows(Asked<kConfig>(call), true, lengths, {place.sequence, place.kv_head});
  const HeadRows v = head_rows(Asked<kConfig>(call), false, lengths, {place.sequence, place.kv_head});
  const bool keys_only = kConfig.latent() || (call.plan.even.outputs > 0 &&
                                              !is_long_share(call.plan.alike, seen, kConfig.tile_tokens, kEvenShareTiles));
  if (end_to_end) {
    if (lane() != 0) return;
    const auto bytes = static_cast<std::uint32_t>((tokens.end - tokens.begin) * k.token_bytes);  // rows lie end to end
    ptx::prefetch_l2(k.first + tokens.begin * k.token_bytes, bytes);
    if (!keys_only) ptx::prefetch_l2(v.first + tokens.begin * k.token_bytes, bytes);
  } else {
    prefetch_rows<kConfig>(call, k, v, keys_only, paged ? page_ids(problem.pages, lengths, place.sequence) : nullptr, tokens);
  }
}

}  // namespace lean::cuda
