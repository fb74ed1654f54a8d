// What pages hold of a tile, by bulk copies or by threads. Pages outside the pool are reported, and their rows become 0.
#pragma once

#include <cstdint>

#include "backends/cuda/kernel/cta_memory.cuh"
#include "backends/cuda/kernel/kv_rows.cuh"
#include "backends/cuda/kernel/load/lacking_pages.cuh"
#include "backends/cuda/kernel/load/row_pieces.cuh"
#include "backends/cuda/kernel/load/stage_columns.cuh"
#include "backends/cuda/kernel/tuning.hpp"
#include "backends/cuda/ptx/arch.cuh"
#include "backends/cuda/ptx/copy.cuh"
#include "backends/cuda/ptx/shared.cuh"
#include "backends/cuda/ptx/warp.cuh"
#include "problem/pages.hpp"

namespace lean::cuda {

/// The pages that a lane looks up of a tile. With TMA a lane has a page, or a box of tokens; where threads copy a warp has runs of
/// rows, and a lane a row of each run.
template <KernelConfig kConfig>
struct LanePages {
  static constexpr std::int32_t kRunRows = max_of(1, min_of(kWarpThreads, kConfig.tile_tokens / kConfig.producer_warps()));
  static constexpr std::int32_t kRuns = kConfig.tile_tokens / (kConfig.producer_warps() * kRunRows);
  static_assert(kRuns * kConfig.producer_warps() * kRunRows == kConfig.tile_tokens);

  std::int32_t ids[kRuns];

  /// Counted from the tile's first token.
  [[nodiscard]] static __device__ std::int32_t first_row(std::int32_t run) {
    const std::int32_t warp = static_cast<std::int32_t>(threadIdx.x) / kWarpThreads - kConfig.consumer_warps;
    return (run * kConfig.producer_warps() + warp) * kRunRows;
  }
};

/// The pages of [token, token + tokens), of which the first `boxed` come in boxes. Asked for before the wait for a stage; the same
/// for K and V.
template <KernelConfig kConfig>
[[nodiscard]] __device__ __forceinline__ LanePages<kConfig> ask_for_pages(const DeviceCall& call, const SegmentRecord& record,
                                                                          std::int32_t token, std::int32_t tokens,
                                                                          std::int32_t boxed) {
  using Pages = LanePages<kConfig>;
  const std::int32_t* ids = page_ids(call.problem.pages, record.lengths, record.sequence);
  Pages found{};
  if (Asked<kConfig>(call).bulk_copies()) {
    const std::int32_t page = page_of(call, token) + lane();
    if (page <= page_of(call, token + tokens - 1)) found.ids[0] = ids[page];
    return found;
  }
  if (boxed > 0) {
    const LaneBox<kConfig> box;
    if (box.row < boxed) found.ids[0] = ids[page_of(call, token + box.row)];
    return found;
  }
#pragma unroll
  for (std::int32_t run = 0; run < Pages::kRuns; ++run) {
    const std::int32_t row = Pages::first_row(run) + lane();
    if (lane() < Pages::kRunRows && row < tokens) found.ids[run] = ids[page_of(call, token + row)];
  }
  return found;
}

/// Where tokens of a head go, K or V, the barrier that is told of their bytes, and the page this lane copies from.
struct PageRuns {
  bool keys;
  std::byte* stage;
  std::uint64_t* full;
  std::int32_t token;
  std::int32_t tokens;
  std::int32_t page_id;
};

/// Copies what pages hold of a tile by bulk copies. Called by a warp: a lane a page.
template <KernelConfig kConfig>
__device__ __forceinline__ void copy_page_runs(const DeviceCall& call, const HeadRows rows, const PageRuns runs) {
  static_assert(kConfig.wide() || kConfig.tile_tokens * kConfig.stage_row_bytes(kConfig.head_dim) / kMinRunBytes < kWarpThreads);
  const PagedKv& pages = call.problem.pages;
  const auto row_bytes = static_cast<std::int32_t>(rows.token_bytes);  // they lie end to end
  const std::int32_t end = runs.token + runs.tokens;
  const std::int32_t last_page = page_of(call, end - 1);
  const bool holds = page_of(call, runs.token) + lane() <= last_page;
  const std::int32_t page_begin = (holds ? page_of(call, runs.token) + lane() : last_page) * pages.page_tokens;
  const std::int32_t begin = max(page_begin, runs.token);
  const std::int32_t bytes = holds ? (min(pages.page_tokens, end - page_begin) - (begin - page_begin)) * row_bytes : 0;
  const bool lacks = holds && !in_pool(pages, runs.page_id);
  std::byte* to = runs.stage + (begin - runs.token) * row_bytes;
  if (lacks) {
    for (std::int32_t at = 0; at < bytes; at += kPieceBytes) ptx::store_shared(ptx::shared_address(to + at), {0, 0, 0, 0});
    report_lacking_page(call, cta_memory<kConfig>().shared);
  }
  const std::int32_t copied = __reduce_add_sync(ptx::kAllLanes, lacks ? 0 : bytes);
  if (lane() == 0) ptx::barrier_arrive_expect(runs.full, static_cast<std::uint32_t>(copied));
  __syncwarp();
  if (bytes > 0 && !lacks) {
    ptx::bulk_copy(to, rows.first + runs.page_id * rows.page_bytes + (begin - page_begin) * rows.token_bytes,
                   static_cast<std::uint32_t>(bytes), runs.full);
  }
}

/// Whether the lanes of a row that copy_whole_run() has copy all of it, keys and values alike.
template <KernelConfig kConfig>
inline constexpr bool kCopiesWholeRuns =
    kConfig.wide() ? !kConfig.few_values() && kConfig.head_dim * bytes_of(kConfig.dtype) % kConfig.column_bytes() == 0
                   : kConfig.step();

/// A run of rows from row `first` of a stage on, all of them in pages that exist: nothing is asked on the way. `place`: of this
/// lane's row. A row is copied by few lanes, each some pieces of it, since what costs is to tell them where it begins.
template <KernelConfig kConfig>
__device__ __forceinline__ void copy_whole_run(const DeviceCall& call, bool keys, const std::byte* place, std::uint32_t stage,
                                               std::int32_t first) {
  constexpr std::int32_t kRowBytes = kConfig.head_dim * bytes_of(kConfig.dtype);
  constexpr std::int32_t kLanes = min_of(8, kRowBytes / kPieceBytes);  // a row's; their pieces fill whole sectors of memory
  constexpr std::int32_t kRowsAtOnce = kWarpThreads / kLanes;
  static_assert(kRowBytes % (kLanes * kPieceBytes) == 0 && LanePages<kConfig>::kRunRows % kRowsAtOnce == 0);
  static_assert(!kConfig.in_columns() || (kLanes * kPieceBytes == kConfig.column_bytes() && LanePages<kConfig>::kRunRows % 8 == 0));
  const std::int32_t own_row = lane() / kLanes;
  const std::int32_t own_piece = lane() % kLanes * kPieceBytes;
  constexpr std::int32_t kOfLane = kRowBytes / (kLanes * kPieceBytes);
  bool has[kOfLane];
#pragma unroll
  for (std::int32_t i = 0; i < kOfLane; ++i) has[i] = has_piece<kConfig>(call, i * kLanes + lane() % kLanes, keys);
  // Where each row of a run and each column lie from here on is known to the compiler.
  const std::uint32_t own = place_in_stage<kConfig>(call, own_row, lane() % kLanes);
  stage += static_cast<std::uint32_t>(first * (kConfig.in_columns() ? kConfig.column_bytes() : kRowBytes));
#pragma unroll
  for (std::int32_t row = 0; row < LanePages<kConfig>::kRunRows; row += kRowsAtOnce) {
    const std::byte* const from = own_piece + reinterpret_cast<const std::byte*>(__shfl_sync(
                                                  ptx::kAllLanes, reinterpret_cast<unsigned long long>(place), row + own_row));
#pragma unroll
    for (std::int32_t i = 0; i < kOfLane; ++i) {
      const std::int32_t at = i * kLanes * kPieceBytes;
      const std::uint32_t to = kConfig.in_columns() ? further_in_columns<kConfig>(own, row, at / kConfig.column_bytes())
                                                    : own + static_cast<std::uint32_t>(row * kRowBytes + at);
      ptx::async_copy_16(stage + to, from + at, has[i]);
    }
  }
}

/// The same of so many rows, of pages some of which may not exist: `place` is null of those.
template <KernelConfig kConfig>
__device__ __forceinline__ void copy_part_of_run(const DeviceCall& call, const HeadRows& rows, const std::byte* place,
                                                 std::uint32_t stage, std::int32_t first, std::int32_t count) {
  const std::int32_t row_pieces = row_pieces_of<kConfig>(call, rows.keys);
  const std::int32_t rows_at_once = max_of(1, kWarpThreads / row_pieces);
  const std::int32_t own_row = lane() / min(row_pieces, kWarpThreads);
  const std::int32_t own_piece = lane() - own_row * row_pieces;
  for (std::int32_t row = 0; row < count; row += rows_at_once) {
    const auto from = reinterpret_cast<const std::byte*>(
        __shfl_sync(ptx::kAllLanes, reinterpret_cast<unsigned long long>(place), (row + own_row) % kWarpThreads));
    if (own_row >= rows_at_once || row + own_row >= count) continue;
    for (std::int32_t piece = own_piece; piece < row_pieces; piece += kWarpThreads) {
      copy_piece<kConfig>(call, stage + place_in_stage<kConfig>(call, first + row + own_row, piece),
                          from != nullptr ? from + piece * piece_bytes<kConfig>(call) : rows.first,
                          from != nullptr && has_piece<kConfig>(call, piece, rows.keys));
    }
  }
}

/// Rows of pages, by all producers: a lane finds out where a row lies, and tells those that copy it.
template <KernelConfig kConfig>
__device__ __forceinline__ void copy_page_rows_inline(const HeadRows& rows, std::uint32_t stage, std::int32_t token,
                                                      std::int32_t tokens, const LanePages<kConfig>& pages) {
  using Pages = LanePages<kConfig>;
  const DeviceCall& call = cta_memory<kConfig>().shared.call;
#pragma unroll
  for (std::int32_t run = 0; run < Pages::kRuns; ++run) {
    const std::int32_t first = Pages::first_row(run);
    const std::int32_t count = min(Pages::kRunRows, tokens - first);
    const std::byte* place = nullptr;
    if (lane() < count) {
      const std::int32_t at = token + first + lane();
      const std::int32_t in_page = at - page_of(call, at) * call.problem.pages.page_tokens;
      if (in_pool(call.problem.pages, pages.ids[run])) {
        place = rows.first + pages.ids[run] * rows.page_bytes + in_page * rows.token_bytes;
      } else {
        report_lacking_page(call, cta_memory<kConfig>().shared);
      }
    }
    if constexpr (kCopiesWholeRuns<kConfig>) {
      if (__all_sync(ptx::kAllLanes, place != nullptr || lane() >= Pages::kRunRows)) {
        copy_whole_run<kConfig>(call, rows.keys, place, stage, first);
        continue;
      }
    }
    copy_part_of_run<kConfig>(call, rows, place, stage, first, count);
  }
}

/// The same by a function that is called, and reads the call from shared memory: inlined, it is a third of the kernel. But who calls it has
/// to wait for page ids that nobody needs yet, so where threads copy all there is it is inlined.
template <KernelConfig kConfig>
__device__ LEAN_CUDA_CALLED void copy_page_rows_called(const HeadRows rows, std::uint32_t stage, std::int32_t token,
                                                       std::int32_t tokens, const LanePages<kConfig> pages) {
  copy_page_rows_inline<kConfig>(rows, stage, token, tokens, pages);
}

template <KernelConfig kConfig>
__device__ __forceinline__ void copy_page_rows(const HeadRows& rows, std::uint32_t stage, std::int32_t token, std::int32_t tokens,
                                               const LanePages<kConfig>& pages) {
  if constexpr (kConfig.copies_by_threads()) {
    copy_page_rows_inline<kConfig>(rows, stage, token, tokens, pages);
  } else {
    copy_page_rows_called<kConfig>(rows, stage, token, tokens, pages);
  }
}

}  // namespace lean::cuda
