// CtaMemory: a CTA's dynamic shared memory. decode_kernel.cuh draws it; the host sizes it by shared_bytes() and the ring's stages.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "backends/cuda/kernel/asked.cuh"
#include "backends/cuda/kernel/device_call.hpp"
#include "backends/cuda/kernel/lines.cuh"
#include "backends/cuda/kernel/segment_record.cuh"
#include "backends/cuda/kernel/staged_queries.cuh"
#include "backends/cuda/kernel/tuning.hpp"
#include "backends/cuda/kernel_config.hpp"
#include "backends/cuda/ptx/barrier.cuh"
#include "fixup/exchange.hpp"
#include "fixup/joint_merge.hpp"
#include "lean/exchange.hpp"
#include "softmax/state.hpp"
#include "timeline/timeline.hpp"

namespace lean::cuda {

inline constexpr std::int32_t kRecords = 2;  // segments the producer may be ahead

[[nodiscard]] __device__ __forceinline__ std::int32_t lane() { return static_cast<std::int32_t>(threadIdx.x % kWarpThreads); }

/// States of the warps' parts, whose O lies in the exchange area (tile/staged_parts.cuh).
template <KernelConfig kConfig>
struct CtaParts {
  static constexpr std::int32_t kRows = kConfig.consumer_warps * kConfig.staged_rows();  // of all parts together
  float m[kRows];                                                                        // [part][row]
  float l[kRows];
};

/// Whether the CTA has arrived last at an output that it shares, or what of a joint merge is its; and the exchange that its launch is
/// part of.
template <bool kExchanges>
struct CtaArrival {
  std::int32_t last;
  fixup::MergeShare share;
};
template <>
struct CtaArrival<true> {
  std::int32_t last;
  fixup::Epoch epoch;
  Exchange exchange;
};

/// What only wide kernels have. What waits rehearses: threads that wait for others run through what comes next with what is
/// rehearsed here, whose results are looked at by nobody, so that its instructions have come from the L2 when they are needed.
template <KernelConfig kConfig>
struct CtaWide {
  CtaWalk walks[2];  // the second is rehearsed: a share that begins and ends inside one output
  // Of latent tiles a row of each warpgroup's: what is exchanged; in turns maxima, and sums in places of their own,
  // since one warpgroup gives maxima of the next segment while the other still reads sums of this. Of swapped tiles what each warp has
  // of a row, and the row's maximum.
  float kept[kConfig.swaps_ab() ? 5 : kConfig.in_turns() ? 4 : 2][kConfig.consumer_threads() / 4];
  float query_scale[kConfig.converts() ? kConfig.q_rows : 1];  // of bf16 queries that became fp16: what scores are multiplied by
  // Of the tokens of a tile under rules, by warps and lanes of a quad: bit j stands for the lane's token j, which one of the warp's rows sees
  // (WideTile::say_seen()).
  std::uint32_t seen[kConfig.ruled() ? kConfig.consumer_warps : 1][4];
  alignas(16) std::byte unconverted[max_of(16, kConfig.unconverted_bytes())];
  SegmentRecord rehearsed;  // the consumers': a whole tile, and no row that is written

  __device__ __forceinline__ void begin_rehearsal() {
    rehearsed = {};
    rehearsed.lengths.q_tokens = kConfig.tile_tokens;
    rehearsed.lengths.kv_end = kConfig.tile_tokens;
    rehearsed.token_end = kConfig.tile_tokens;
    walks[1].even = false;
    walks[1].plan = {};
    walks[1].walk = {};
    walks[1].walk.lengths.q_tokens = 8 * kConfig.q_rows;
    walks[1].walk.lengths.kv_end = 16 * kConfig.q_rows;
    walks[1].walk.share = {.begin = 100, .end = 150};  // of 208 units and more
    walks[1].walk.place = 100;
  }
};
struct Nothing {};

template <KernelConfig kConfig>
struct CtaShared {
  alignas(16) std::uint64_t stage_full[max_stages(kConfig) * kConfig.stage_parts()];  // a stage's parts one behind the other
  std::uint64_t stage_free[max_stages(kConfig) * kConfig.stage_parts()];
  std::uint64_t record_full[kRecords];
  std::uint64_t record_free[kRecords];
  std::uint64_t queries_full[kRecords];  // with queries_ahead()
  std::uint64_t queries_free;            // where one place holds the queries of one segment after the other
  std::uint64_t contributors_known[kRecords];
  SegmentRecord records[kRecords + (kConfig.wide() ? 1 : 0)];  // the last is written in a rehearsal
  DeviceCall call;  // for what is called, not inlined, and for what runs once a segment: read from here it is not kept in registers
  union {
    CtaFlatLine<kConfig> flat_line;  // until the walk begins
    CtaParts<kConfig> parts;
  };
  std::conditional_t<kConfig.wide(), CtaWide<kConfig>, Nothing> wide;
  CtaArrival<kConfig.exchanges()> arrival;
#ifdef LEAN_TIMELINE
  timeline::Recorder recorder;  // the first thread's
#endif
  std::int32_t workers;      // of this launch, where another runs beside it (plan/side_workers.cuh)
  std::int32_t lacks_pages;  // nonzero from the first page on that lies outside the pool: its tokens are 0, and count as not there
};

/// Tensor copies place pieces by their addresses' bits, up to 8 rows of 128 bytes.
template <KernelConfig kConfig>
inline constexpr std::size_t kRestAlignment = kConfig.in_columns() ? 1024 : 128;

/// Products of warpgroups read the queries, placed by their addresses' bits too.
template <KernelConfig kConfig>
inline constexpr std::size_t kQueriesAlignment = kConfig.wide() ? 1024 : 16;

/// They read weights of swapped tiles there.
template <KernelConfig kConfig>
inline constexpr std::size_t kExchangeAlignment = kConfig.swaps_ab() ? 1024 : 16;

/// A CTA's dynamic shared memory: this, the CtaLine of a call whose line is not flat, and the ring.
template <KernelConfig kConfig>
struct CtaMemory {
  CtaShared<kConfig> shared;
  alignas(kQueriesAlignment<kConfig>)
      std::byte queries[kConfig.query_places()][kConfig.queries_ahead() ? kConfig.q_rows * kQueryRowBytes<kConfig> : 16];
  alignas(kExchangeAlignment<kConfig>) float exchange[kConfig.exchange_floats()];  // queries without a place, parts of results
  alignas(kRestAlignment<kConfig>) std::byte rest[kRestAlignment<kConfig>];        // it ends where this does

  [[nodiscard]] __device__ __forceinline__ std::byte* queries_of(std::int32_t record_index) {
    return queries[kConfig.query_places() == 1 ? 0 : record_index];
  }
  [[nodiscard]] __device__ __forceinline__ CtaLine& line() { return *reinterpret_cast<CtaLine*>(rest); }
  [[nodiscard]] __device__ __forceinline__ std::byte* ring(const DeviceCall& call) {
    return rest + line_bytes(Asked<kConfig>(call).flat());
  }

  [[nodiscard]] static constexpr LEAN_HD std::int32_t line_bytes(bool flat) noexcept {
    constexpr std::size_t kUnit = kRestAlignment<kConfig>;
    return flat ? 0 : static_cast<std::int32_t>((sizeof(CtaLine) + kUnit - 1) / kUnit * kUnit);
  }
};

/// Found by name wherever it is asked for, so that functions that are called, not inlined, know that it is shared memory.
template <KernelConfig kConfig>
[[nodiscard]] __device__ __forceinline__ CtaMemory<kConfig>& cta_memory() {
  extern __shared__ __align__(1024) std::byte dynamic_shared_memory[];
  return *reinterpret_cast<CtaMemory<kConfig>*>(dynamic_shared_memory);
}

/// For what is not needed before the first copy. Any call's is read from shared memory, so that nothing of it is kept in
/// registers. In a decode step it is worked out ahead of time instead: what ends a segment is waited for, and the first copy did
/// not come earlier.
template <KernelConfig kConfig>
[[nodiscard]] __device__ __forceinline__ const DeviceCall& call_for_later(const DeviceCall& call) {
  return kConfig.step() ? call : cta_memory<kConfig>().shared.call;
}

/// Named barriers; 0 is that of __syncthreads().
inline constexpr std::uint32_t kConsumerBarrier = 1;
inline constexpr std::uint32_t kSetupBarrier = 2;  // what is shared is set up
/// Of latent tiles: scores are known, and weights lie where the other warpgroup finds them; in turns one each.
inline constexpr std::uint32_t kWeightsBarrier = 3;
inline constexpr std::uint32_t kGroupBarrier = 5;  // of many rows: a warpgroup's own; one each
inline constexpr std::uint32_t kWalkBarrier = 7;   // of many rows: kSetupBarrier of the warp that builds a short line

/// The consumer threads' own barrier.
template <KernelConfig kConfig>
__device__ __forceinline__ void consumer_sync() {
  ptx::named_barrier(kConsumerBarrier, kConfig.consumer_threads());
}

/// Bytes of all but the ring. Behind the ring lies room for what is read, and selected away, past the last row of fewer dims than
/// the variant's; wide tiles have whole columns.
template <KernelConfig kConfig>
[[nodiscard]] constexpr std::int64_t shared_bytes(bool flat) noexcept {
  constexpr std::int64_t kRowBytes = kConfig.wide() ? 0 : kConfig.stage_row_bytes(kConfig.head_dim);
  static_assert(alignof(CtaMemory<kConfig>) == kRestAlignment<kConfig>, "nothing lies behind the rest");
  constexpr std::int64_t kBeforeRest = sizeof(CtaMemory<kConfig>) - sizeof(CtaMemory<kConfig>::rest);
  return kBeforeRest + CtaMemory<kConfig>::line_bytes(flat) + kRowBytes;
}

}  // namespace lean::cuda
