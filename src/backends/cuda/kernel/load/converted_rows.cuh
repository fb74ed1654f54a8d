// Rows of fp8 that become fp16 on their way to a stage, by the producer's threads: no copy does that. Threads have too few registers
// for a tile, which is what has to be under way for the memory to be busy: 37 KB of 576 dims a multiprocessor, at 1 us 37 GB/s of each. So
// the next tile is sent for into the L2, and a thread's pieces of a row come from there while those of the row before are converted.
#pragma once

#include <cstdint>

#include "backends/cuda/kernel/cta_memory.cuh"
#include "backends/cuda/kernel/kv_rows.cuh"
#include "backends/cuda/kernel/load/lacking_pages.cuh"
#include "backends/cuda/kernel/load/stage_columns.cuh"
#include "backends/cuda/ptx/copy.cuh"
#include "backends/cuda/ptx/fp8.cuh"
#include "backends/cuda/ptx/shared.cuh"
#include "problem/pages.hpp"

namespace lean::cuda {

/// A segment's tiles, as one of the producer's threads converts its pieces of them: four threads have a row, and each of them 16 bytes of
/// every 64, which are a column of the stage. To be called for each tile in turn: send_for() the one behind it, then put() it.
template <KernelConfig kConfig>
class ConvertedRows {
 public:
  __device__ __forceinline__ ConvertedRows(const DeviceCall& call, CtaShared<kConfig>& shared, const HeadRows& rows,
                                           const SegmentRecord& record, std::int32_t thread)
      : call_(call),
        shared_(shared),
        rows_(rows.from(thread % kLanes * kPieceBytes)),
        ids_(page_ids(call.problem.pages, record.lengths, record.sequence)),
        end_(record.token_end),
        row_(thread / kLanes),
        place_(place_in_columns<kConfig>(thread / kLanes, thread % kLanes * 2)) {
    look_up(record.token_begin);
  }

  /// Finds the rows of a tile of so many tokens, the first of the segment or the one behind that which is put next, and has the L2 fetch
  /// them.
  __device__ __forceinline__ void send_for(std::int32_t token, std::int32_t tokens) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      next_[i] = find(i, token, tokens);
      if (next_[i] == nullptr) continue;
      // A row's first line and every other 128 bytes on, by a lane each, then its last two.
      constexpr std::int32_t kBytes = kConfig.head_dim;
      const std::byte* const row = next_[i] - lane_of_row() * kPieceBytes;
      static_assert(kBytes > kLanes * ptx::kLineBytes && kBytes <= (kLanes + 1) * ptx::kLineBytes);
      ptx::prefetch_l2_line(row + lane_of_row() * ptx::kLineBytes);
      if (lane_of_row() < 2) ptx::prefetch_l2_line(row + (lane_of_row() == 0 ? kLanes * ptx::kLineBytes : kBytes - 1));
    }
    look_up(token + tokens);
  }

  /// Asks for the thread's first pieces of the tile that was sent for, the segment's first.
  __device__ __forceinline__ void begin() {
#pragma unroll
    for (int i = 0; i < kRows; ++i) here_[i] = next_[i];
#pragma unroll
    for (int step = 0; step < kAhead; ++step) pieces_[step] = ask(here_, step);
  }

  /// Puts the tile into a stage, row by row, and asks for as many pieces further on, in the end of the tile behind it. Rows that do not
  /// exist are 0.
  template <DType kType>
  __device__ __forceinline__ void put(std::uint32_t stage) {
    const std::uint32_t first = stage + place_;
    const std::uint32_t second = stage + (place_ ^ kPieceBytes);  // the piece behind it: the first is an even one
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const std::uint32_t further =
          row_of(step) * kRowsAtOnce * kConfig.column_bytes() + column_of(step) * column_stage_bytes<kConfig>;
      const uint4 codes = pieces_[step % kAhead];
      pieces_[step % kAhead] = step + kAhead < kSteps ? ask(here_, step + kAhead) : ask(next_, step + kAhead - kSteps);
      ptx::store_shared(first + further, ptx::eight_to_half<kType>(codes.x, codes.y));
      ptx::store_shared(second + further, ptx::eight_to_half<kType>(codes.z, codes.w));
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) here_[i] = next_[i];
  }

 private:
  static constexpr std::int32_t kColumns = kConfig.columns();
  static constexpr std::int32_t kLanes = kConfig.column_bytes() / 2 / kPieceBytes;  // threads of a row
  static constexpr std::int32_t kRowsAtOnce = kConfig.producer_threads() / kLanes;
  static constexpr std::int32_t kRows = kConfig.tile_tokens / kRowsAtOnce;  // of a tile that a thread has pieces of
  static constexpr int kSteps = kRows * kColumns;                           // pieces of a tile, row by row
  static constexpr int kAhead = kSteps / 2;                                 // under way
  static_assert(kRows * kRowsAtOnce == kConfig.tile_tokens && kRowsAtOnce % wide::kAtomRows == 0 && kSteps % kAhead == 0 &&
                kConfig.dtype == DType::kFloat16 && kConfig.stage_parts() == 1);

  [[nodiscard]] static constexpr int row_of(int step) { return step / kColumns; }
  [[nodiscard]] static constexpr int column_of(int step) { return step % kColumns; }

  [[nodiscard]] __device__ __forceinline__ static std::int32_t lane_of_row() { return lane() % kLanes; }

  /// Finds out on which pages the rows of the tile from `token` on lie, ahead of asking for them.
  __device__ __forceinline__ void look_up(std::int32_t token) {
    if (!is_paged(call_.problem.pages)) return;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {  // in 32 bits: 31 need not count what lies behind the last token
      const std::uint32_t at = static_cast<std::uint32_t>(token) + static_cast<std::uint32_t>(row_ + i * kRowsAtOnce);
      if (at < static_cast<std::uint32_t>(end_)) page_[i] = ids_[page_of(call_, static_cast<std::int32_t>(at))];
    }
  }

  /// Where the thread's pieces of one of its rows begin; null where the tile does not have it, or its page lies outside the pool.
  [[nodiscard]] __device__ __forceinline__ const std::byte* find(int i, std::int32_t token, std::int32_t tokens) {
    const std::int32_t row = row_ + i * kRowsAtOnce;
    if (row >= tokens) return nullptr;
    const PagedKv& pages = call_.problem.pages;
    std::int32_t at = token + row;
    const std::byte* from = rows_.first;
    if (is_paged(pages)) {
      if (!in_pool(pages, page_[i])) {
        report_lacking_page(call_, shared_);
        return nullptr;
      }
      at -= page_of(call_, at) * pages.page_tokens;
      from += page_[i] * rows_.page_bytes;
    }
    return from + at * rows_.token_bytes;
  }

  [[nodiscard]] __device__ __forceinline__ static uint4 ask(const std::byte* const (&rows)[kRows], int step) {
    const std::byte* const row = rows[row_of(step)];
    return ptx::load_past_l1_16(row + column_of(step) * kLanes * kPieceBytes, row != nullptr);
  }

  const DeviceCall& call_;
  CtaShared<kConfig>& shared_;
  HeadRows rows_;
  const std::int32_t* ids_;
  std::int32_t end_;
  std::int32_t row_;     // the thread's first of a tile
  std::uint32_t place_;  // of its first piece in a stage
  std::int32_t page_[kRows] = {};
  const std::byte* here_[kRows];  // the thread's rows of the tile that is put, and of the one behind it
  const std::byte* next_[kRows];
  uint4 pieces_[kAhead];  // under way
};

}  // namespace lean::cuda
