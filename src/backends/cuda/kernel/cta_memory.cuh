// CtaShared: what the warps of a CTA share beside the ring of tiles and the exchange area.
#pragma once

#include <cstddef>
#include <cstdint>

#include "backends/cuda/kernel/asked.cuh"
#include "backends/cuda/kernel/device_call.hpp"
#include "backends/cuda/kernel_config.hpp"
#include "backends/cuda/ptx/barrier.cuh"
#include "softmax/state.hpp"

namespace lean::cuda {

inline constexpr std::int32_t kRecords = 2;  // segments the producer may be ahead
inline constexpr std::int32_t kQueryBytes = 2;

[[nodiscard]] __device__ __forceinline__ std::int32_t lane() { return static_cast<std::int32_t>(threadIdx.x % kWarpThreads); }

/// Partials that one worker merges, of an output's contributors or of a group of them: what is known of them before they come.
struct MergeRun {
  const float* first = nullptr;
  const float* second = nullptr;  // all after the first are a pitch apart
  std::int64_t pitch = 0;         // floats
  std::int32_t parts = 0;
  fixup::Counter* counter = nullptr;  // of their arrivals
  float* slot = nullptr;              // for the result; null: it goes to the output

  [[nodiscard]] __device__ __forceinline__ const float* at(std::int32_t part) const {
    return part == 0 ? first : second + (part - 1) * pitch;
  }
};

/// fixed_chunk: where the result of one chunk goes in the worker's stack of tree nodes.
struct ChunkPlace {
  std::int32_t output_first = 0;  // first chunk of the output
  std::int32_t place = 0;         // on the stack
  std::int32_t merges = 0;        // with this many nodes below it
  fixup::ChunkNode node;          // what is left of them
  bool ends_output = false;       // the last chunk of an output that nobody shares
  bool ends_shared = false;       // the segment's last chunk, of an output that is shared
};

/// One segment, or with fixed_chunk one chunk of it, as the producer announces it to the other warps.
struct SegmentRecord {
  std::int64_t sequence = 0;
  std::int32_t kv_head = 0;
  std::int32_t row_block = 0;
  std::int32_t rows = 0;
  Sequence lengths;
  std::int32_t token_begin = 0;  // tokens [begin, end) of the sequence that a row sees, in whole tiles but for the ends
  std::int32_t token_end = 0;
  std::int32_t first_seen = 0;  // no row sees a token before this one
  // Known when the barrier sharing_known has been passed.
  std::int32_t contributor = 0;
  std::int32_t contributors = 1;
  schedule::SlotMap slots;
  float* slot = nullptr;            // where the result goes; null: to the output
  MergeRun run;                     // the first to be merged, by whoever of it arrives last
  std::uint16_t* output = nullptr;  // query token 0 of the group's first head
  float v_scale = 1.0F;             // of fp8 values
  ChunkPlace chunk;
  bool last = false;  // nothing more: no segment

  [[nodiscard]] __device__ bool sole() const { return contributors == 1; }

  /// Tokens copied and computed together from `token` on: up to the end of its LeanTile.
  [[nodiscard]] __device__ std::int32_t tokens_from(std::int32_t token, std::int32_t tile_tokens) const {
    return min(tile_tokens - (token - lengths.kv_begin) % tile_tokens, token_end - token);
  }
};

/// From a staged row of queries to the next: rows that the copy engine brings lie apart, so that ldmatrix meets no bank twice.
template <KernelConfig kConfig>
inline constexpr std::int32_t kQueryRowBytes = kConfig.head_dim * kQueryBytes + (kConfig.bulk_queries() ? kPieceBytes : 0);

/// The work line, the plan and their sums while they are built.
struct CtaLine {
  schedule::LineSums strip_rows[DeviceLine::kStrips / kWarpThreads];
  schedule::Plan plan;
  DeviceLine line;  // begun by one thread, built by all
};

/// Likewise of a flat line.
template <KernelConfig kConfig>
struct CtaFlatLine {
  schedule::BasicLineSums<std::int32_t> warp_sums[cta_threads(kConfig) / kWarpThreads];
  FlatLine line;
};

/// Of the warps' parts in the exchange area (cta_parts.cuh).
template <KernelConfig kConfig>
struct CtaParts {
  static constexpr std::int32_t kRows = kConfig.consumer_warps * kConfig.staged_rows();  // of all parts together
  float m[kRows];                                                                        // [part][row]
  float l[kRows];
};

template <KernelConfig kConfig>
struct CtaShared {
  alignas(16) std::uint64_t stage_full[max_stages(kConfig)];
  std::uint64_t stage_free[max_stages(kConfig)];
  std::uint64_t record_full[kRecords];
  std::uint64_t record_free[kRecords];
  std::uint64_t queries_full[kRecords];  // with bulk_queries()
  std::uint64_t sharing_known[kRecords];
  SegmentRecord records[kRecords];
  DeviceCall call;  // for what is called, not inlined, and for what runs once a segment: read from here it is not kept in registers
  union {
    CtaFlatLine<kConfig> flat_line;  // until the walk begins
    CtaParts<kConfig> parts;
  };
  std::int32_t arrived_last;
  std::int32_t lacks_pages;  // nonzero from the first page on that lies outside the pool: its tokens are 0, and count as not there
};

/// Tensor copies place pieces by their addresses' bits, up to 8 rows of 128 bytes.
template <KernelConfig kConfig>
inline constexpr std::size_t kRestAlignment = kConfig.in_columns() ? 1024 : 128;

/// A CTA's dynamic shared memory: this, the CtaLine of a call whose line is not flat, and the ring.
template <KernelConfig kConfig>
struct CtaMemory {
  CtaShared<kConfig> shared;
  alignas(16) std::byte queries[kRecords][kConfig.bulk_queries() ? kConfig.q_rows * kQueryRowBytes<kConfig> : 16];
  alignas(16) float exchange[kConfig.exchange_floats()];  // queries are staged there, and parts of results side by side
  alignas(kRestAlignment<kConfig>) std::byte rest[128];

  [[nodiscard]] __device__ __forceinline__ CtaLine& line() { return *reinterpret_cast<CtaLine*>(rest); }
  [[nodiscard]] __device__ __forceinline__ std::byte* ring(const DeviceCall& call) {
    return rest + line_bytes(Asked<kConfig>(call).flat());
  }

  [[nodiscard]] static constexpr LEAN_HD std::int32_t line_bytes(bool flat) noexcept {
    return flat ? 0 : static_cast<std::int32_t>((sizeof(CtaLine) + 127) / 128 * 128);
  }
};

/// Found by name wherever it is asked for, so that functions that are called, not inlined, know that it is shared memory.
template <KernelConfig kConfig>
[[nodiscard]] __device__ __forceinline__ CtaMemory<kConfig>& cta_memory() {
  extern __shared__ __align__(1024) std::byte dynamic_shared_memory[];
  return *reinterpret_cast<CtaMemory<kConfig>*>(dynamic_shared_memory);
}

/// The consumer threads' own barrier.
template <KernelConfig kConfig>
__device__ __forceinline__ void consumer_sync() {
  ptx::named_barrier(1, kConfig.consumer_threads());
}

/// All but the ring. Behind the ring lies room for what is read, and selected away, past the last row of fewer dims than the
/// variant's.
template <KernelConfig kConfig>
[[nodiscard]] constexpr std::int64_t shared_bytes(bool flat) noexcept {
  constexpr std::int64_t kRowBytes = kConfig.stage_row_bytes(kConfig.head_dim);
  return static_cast<std::int64_t>(offsetof(CtaMemory<kConfig>, rest)) + CtaMemory<kConfig>::line_bytes(flat) + kRowBytes;
}

}  // namespace lean::cuda
