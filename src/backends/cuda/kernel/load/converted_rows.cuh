// Rows of fp8 that become fp16 on their way to a stage, by the producer's threads: no copy does that. What fills the next stage is under
// way meanwhile, to shared memory; beside latent tiles there is no room for it, and threads have too few registers for a tile, which is
// what has to be under way for the memory to be busy: 37 KB of 576 dims a multiprocessor, at 1 us 37 GB/s of each. So there the next tile
// is sent for into the L2, and a thread's pieces of a row come from there while those of the row before are converted. What fills a stage
// is a tile's keys, then its values; of latent tiles both are the same.
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
/// every 64, which are a column of the stage. To be called for each stage in turn: send_for() what the next one holds, then put().
template <KernelConfig kConfig>
class ConvertedRows {
 public:
  __device__ __forceinline__ ConvertedRows(const DeviceCall& call, CtaShared<kConfig>& shared, const SegmentRecord& record,
                                           std::int32_t thread)
      : call_(call),
        shared_(shared),
        ids_(page_ids(call.problem.pages, record.lengths, record.sequence)),
        end_(record.token_end),
        row_(thread / kLanes),
        place_(place_in_columns<kConfig>(thread / kLanes, thread % kLanes * 2)),
        unconverted_(ptx::shared_address(shared.wide.unconverted) + static_cast<std::uint32_t>(thread * kPieceBytes)) {
    if (is_paged(call.problem.pages)) look_up(record.token_begin);
  }

  /// Finds the rows of so many tokens, keys or values, those of the segment's first stage or of the one behind that which is put next,
  /// and has the L2 fetch them, unless they go to shared memory. `ends_tile`: what comes after them is the next tile's.
  __device__ __forceinline__ void send_for(const HeadRows& rows, std::int32_t token, std::int32_t tokens, bool ends_tile) {
    if (is_paged(call_.problem.pages)) {
      find_in_pages(rows, tokens);
      if (ends_tile) look_up(token + tokens);
    } else {
      find_end_to_end(rows, token, tokens);
    }
    if constexpr (kInRegisters) prefetch();
  }

  /// Asks for the thread's first pieces of what was sent for, the segment's first keys.
  __device__ __forceinline__ void begin() {
    if constexpr (kInRegisters) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) here_[i] = next_[i];
#pragma unroll
      for (int step = 0; step < kAhead; ++step) pieces_[step] = load(here_, step);
    } else {
#pragma unroll
      for (int half = 0; half < 2; ++half) copy_half(half);
    }
  }

  /// Puts rows into a stage, one by one, and asks for as many pieces further on, in the end of those sent for last. Rows that do not
  /// exist are 0.
  template <DType kType>
  __device__ __forceinline__ void put(std::uint32_t stage) {
    if constexpr (kInRegisters) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const uint4 codes = pieces_[step % kAhead];
        pieces_[step % kAhead] = step + kAhead < kSteps ? load(here_, step + kAhead) : load(next_, step + kAhead - kSteps);
        convert<kType>(stage, step, codes);
      }
#pragma unroll
      for (int i = 0; i < kRows; ++i) here_[i] = next_[i];
    } else {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        ptx::await_async_groups<1>();  // this thread copied them
#pragma unroll
        for (int i = 0; i < kAhead; ++i) pieces_[i] = ptx::load_shared_16(unconverted(half * kAhead + i));
#pragma unroll
        for (int i = 0; i < kAhead; ++i) convert<kType>(stage, half * kAhead + i, pieces_[i]);
        copy_half(half);
      }
    }
  }

  /// Behind the segment's last stage: nothing is under way.
  __device__ __forceinline__ void end() const {
    if constexpr (!kInRegisters) ptx::await_async_copies();
  }

 private:
  static constexpr std::int32_t kColumns = kConfig.columns();
  static constexpr std::int32_t kLanes = kConfig.column_bytes() / 2 / kPieceBytes;  // threads of a row
  static constexpr std::int32_t kRowsAtOnce = kConfig.producer_threads() / kLanes;
  static constexpr std::int32_t kRows = kConfig.tile_tokens / kRowsAtOnce;  // of a tile that a thread has pieces of
  static constexpr int kSteps = kRows * kColumns;                           // pieces of a tile, row by row
  static constexpr int kAhead = kSteps / 2;                                 // in registers at once
  static constexpr bool kInRegisters = kConfig.unconverted_bytes() == 0;
  static_assert(kRows * kRowsAtOnce == kConfig.tile_tokens && kRowsAtOnce % wide::kAtomRows == 0 && kSteps == 2 * kAhead &&
                kAhead > 0 && kConfig.dtype == DType::kFloat16 && kConfig.stage_parts() == 1);
  static_assert(kInRegisters || kSteps * kConfig.producer_threads() * kPieceBytes == kConfig.unconverted_bytes());

  [[nodiscard]] static constexpr int row_of(int step) { return step / kColumns; }
  [[nodiscard]] static constexpr int column_of(int step) { return step % kColumns; }

  [[nodiscard]] __device__ __forceinline__ static std::int32_t lane_of_row() { return lane() % kLanes; }

  /// Finds out on which pages the rows of the tile from `token` on lie, and where there, ahead of asking for them.
  __device__ __forceinline__ void look_up(std::int32_t token) {
    const PagedKv& pages = call_.problem.pages;
    const auto look = [&](const auto& page_of_token) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) {  // in 32 bits: 31 need not count what lies behind the last token
        const std::uint32_t at = static_cast<std::uint32_t>(token) + static_cast<std::uint32_t>(row_ + i * kRowsAtOnce);
        if (at >= static_cast<std::uint32_t>(end_)) continue;
        const std::int32_t page = page_of_token(static_cast<std::int32_t>(at));
        page_[i] = ids_[page];
        in_page_[i] = static_cast<std::int32_t>(at) - page * pages.page_tokens;
      }
    };
    if (const std::int32_t shift = call_.load.page_shift; shift >= 0) {
      look([shift](std::int32_t at) { return at >> shift; });
    } else {
      look([this](std::int32_t at) { return page_of(call_, at); });
    }
  }

  /// Where the thread's pieces of its rows begin; null where the tile does not have a row, or its page lies outside the pool.
  __device__ __forceinline__ void find_in_pages(const HeadRows& rows, std::int32_t tokens) {
    const std::byte* const first = rows.first + lane_of_row() * kPieceBytes;
    bool lacks = false;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const bool has_row = row_ + i * kRowsAtOnce < tokens;
      const bool exists = has_row && in_pool(call_.problem.pages, page_[i]);
      lacks |= has_row && !exists;
      next_[i] = exists ? first + (page_[i] * rows.page_bytes + in_page_[i] * rows.token_bytes) : nullptr;
    }
    if (lacks) report_lacking_page(call_, shared_);
  }
  __device__ __forceinline__ void find_end_to_end(const HeadRows& rows, std::int32_t token, std::int32_t tokens) {
    const std::byte* row = rows.first + lane_of_row() * kPieceBytes + (std::int64_t{token} + row_) * rows.token_bytes;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      next_[i] = row_ + i * kRowsAtOnce < tokens ? row : nullptr;
      row += kRowsAtOnce * rows.token_bytes;
    }
  }

  /// Has the L2 fetch the rows that were found.
  __device__ __forceinline__ void prefetch() const {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if (next_[i] == nullptr) continue;
      // A row's first line and every other 128 bytes on, by a lane each, and its last byte's, since it may begin anywhere in a line.
      constexpr std::int32_t kBytes = kConfig.head_dim;
      const std::byte* const row = next_[i] - lane_of_row() * kPieceBytes;
#pragma unroll
      for (std::int32_t first = 0; first < kBytes + ptx::kLineBytes; first += kLanes * ptx::kLineBytes) {
        const std::int32_t at = first + lane_of_row() * ptx::kLineBytes;
        if (at < kBytes + ptx::kLineBytes) ptx::prefetch_l2_line(row + min(at, kBytes - 1));
      }
    }
  }

  [[nodiscard]] __device__ __forceinline__ static const std::byte* piece_of(const std::byte* const (&rows)[kRows], int step) {
    return rows[row_of(step)] + column_of(step) * kLanes * kPieceBytes;
  }
  [[nodiscard]] __device__ __forceinline__ static uint4 load(const std::byte* const (&rows)[kRows], int step) {
    return ptx::load_past_l1_16(piece_of(rows, step), rows[row_of(step)] != nullptr);
  }

  /// Where a piece of this thread's waits to be converted.
  [[nodiscard]] __device__ __forceinline__ std::uint32_t unconverted(int step) const {
    return unconverted_ + static_cast<std::uint32_t>(step * kConfig.producer_threads() * kPieceBytes);
  }
  /// Asks for half of the pieces sent for last: a group.
  __device__ __forceinline__ void copy_half(int half) const {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int step = half * kAhead + i;
      ptx::async_copy_16(unconverted(step), piece_of(next_, step), next_[row_of(step)] != nullptr);
    }
    ptx::group_async_copies();
  }

  /// Stores what 16 codes are, which are two neighbouring pieces of a row in the stage, the first of them an even one.
  template <DType kType>
  __device__ __forceinline__ void convert(std::uint32_t stage, int step, const uint4& codes) const {
    const std::uint32_t further =
        row_of(step) * kRowsAtOnce * kConfig.column_bytes() + column_of(step) * column_stage_bytes<kConfig>;
    ptx::store_shared(stage + place_ + further, ptx::eight_to_half<kType>(codes.x, codes.y));
    ptx::store_shared(stage + (place_ ^ kPieceBytes) + further, ptx::eight_to_half<kType>(codes.z, codes.w));
  }

  const DeviceCall& call_;
  CtaShared<kConfig>& shared_;
  const std::int32_t* ids_;
  std::int32_t end_;
  std::int32_t row_;     // the thread's first of a tile
  std::uint32_t place_;  // of its first piece in a stage
  std::uint32_t unconverted_;
  std::int32_t page_[kRows] = {};  // of the tile's rows
  std::int32_t in_page_[kRows] = {};
  const std::byte* here_[kRows];  // in registers: the thread's rows of what is put
  const std::byte* next_[kRows];  // of what is behind it
  uint4 pieces_[kAhead];
};

}  // namespace lean::cuda
