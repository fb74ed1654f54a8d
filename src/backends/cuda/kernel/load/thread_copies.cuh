// Rows of K and V that the producer's threads copy, piece by piece (cp.async): what TMA does not take. The pieces of all rows are
// dealt out over the threads, one after the other.
#pragma once

#include <cstdint>

#include "backends/cuda/kernel/cta_memory.cuh"
#include "backends/cuda/kernel/load/lacking_pages.cuh"
#include "backends/cuda/kernel/load/page_copies.cuh"
#include "backends/cuda/kernel/load/row_pieces.cuh"
#include "backends/cuda/kernel/tuning.hpp"
#include "problem/pages.hpp"

namespace lean::cuda {

/// Tokens, and the row of the stage where the first of them goes.
struct StagedTokens {
  std::int32_t row;
  std::int32_t token;
  std::int32_t tokens;
};

/// Whether they lie on so short pages that rows are looked up one by one. Looked up (ask_for_pages()) are those from a tile's first on.
[[nodiscard]] __device__ __forceinline__ bool lie_on_short_pages(const DeviceCall& call, const StagedTokens& at) {
  return is_paged(call.problem.pages) && call.problem.pages.page_tokens < kMinPageRows && at.row == 0;
}

template <KernelConfig kConfig>
class ThreadCopies {
 public:
  /// For one of the producer's threads.
  __device__ ThreadCopies(const DeviceCall& call, std::int32_t thread) : call_(call), row_bytes_(row_bytes<kConfig>(call)) {
    if (Asked<kConfig>(call).bulk_copies()) return;
    row_pieces_ = row_pieces_of<kConfig>(call, true);
    first_row_ = thread / row_pieces_;
    first_piece_ = thread % row_pieces_;
    row_stride_ = kConfig.producer_threads() / row_pieces_;
    piece_stride_ = kConfig.producer_threads() % row_pieces_;
  }

  /// Copies some tokens of a tile. Called by all producer threads; `pages`: the tile's, where it has any.
  __device__ void copy(CtaShared<kConfig>& shared, std::uint32_t stage, const HeadRows& rows, const SegmentRecord& record,
                       const StagedTokens& at, const LanePages<kConfig>& pages) const {
    if (!is_paged(call_.problem.pages)) {
      copy_rows(stage, at.row, rows.from(at.token * rows.token_bytes), at.tokens, true);
    } else if (lie_on_short_pages(call_, at)) {
      copy_page_rows<kConfig>(rows, stage, at.token, at.tokens, pages);
    } else {
      copy_pages(shared, stage, rows, record, at);
    }
  }

 private:
  [[nodiscard]] __device__ std::int32_t copy_bytes() const { return piece_bytes<kConfig>(call_); }
  [[nodiscard]] __device__ std::int32_t stage_row_bytes() const { return cuda::stage_row_bytes<kConfig>(call_); }

  /// How far on in a stage this thread's next piece of all rows lies.
  [[nodiscard]] __device__ std::uint32_t stage_stride() const {
    if constexpr (kConfig.kv_type().bytes > 1) return kConfig.producer_threads() * kPieceBytes;
    return static_cast<std::uint32_t>(row_stride_ * stage_row_bytes() + piece_stride_ * copy_bytes());
  }
  [[nodiscard]] __device__ std::uint32_t stage_wrap() const { return static_cast<std::uint32_t>(stage_row_bytes() - row_bytes_); }

  /// Rows of long pages, by all threads page by page.
  __device__ void copy_pages(CtaShared<kConfig>& shared, std::uint32_t stage, const HeadRows& rows, const SegmentRecord& record,
                             const StagedTokens& at) const {
    const PagedKv& pages = call_.problem.pages;
    const std::int32_t* ids = page_ids(pages, record.lengths, record.sequence);
    const std::int32_t end = at.token + at.tokens;
    const std::int32_t first_page = page_of(call_, at.token);
    const std::int32_t last_page = page_of(call_, end - 1);
    for (std::int32_t page = first_page; page <= last_page; ++page) {
      const std::int32_t id = ids[page];
      const bool exists = in_pool(pages, id);
      if (!exists) report_lacking_page(call_, shared);
      const std::int32_t page_begin = page * pages.page_tokens;
      const std::int32_t begin = max(page_begin, at.token);
      const std::int32_t page_end = page_begin + min(pages.page_tokens, end - page_begin);
      const HeadRows from = rows.from((exists ? id : 0) * rows.page_bytes + (begin - page_begin) * rows.token_bytes);
      copy_rows(stage, at.row + begin - at.token, from, page_end - begin, exists);
    }
  }

  /// Copies the pieces of all rows, dealt out over the threads one after the other, to row `to_row` of the stage and those behind.
  /// Where whole rows are dealt out, a thread keeps its place in them. Where `exists` is false all of it becomes 0.
  __device__ void copy_rows(std::uint32_t stage, std::int32_t to_row, const HeadRows& rows, std::int32_t tokens,
                            bool exists) const {
    const std::int64_t step = rows.token_bytes;
    const std::byte* from = rows.first + first_row_ * step + first_piece_ * copy_bytes();
    const std::int64_t from_stride = row_stride_ * step + piece_stride_ * copy_bytes();
    if constexpr (kConfig.in_columns()) {
      constexpr std::int32_t kPieces = kConfig.stage_row_bytes(kConfig.head_dim) / kPieceBytes;
      if constexpr (kConfig.producer_threads() % kPieces != 0) {
#pragma unroll 1
        for (std::int32_t i = first_row_ * kPieces + first_piece_; i < tokens * kPieces; i += kConfig.producer_threads()) {
          const std::int32_t row = i / kPieces;
          const std::int32_t piece = i % kPieces;
          if (kConfig.few_values() && piece >= row_pieces_of<kConfig>(call_, rows.keys)) continue;
          ptx::async_copy_16(stage + place_in_columns<kConfig>(to_row + row, piece), rows.first + row * step + piece * kPieceBytes,
                             exists && has_piece<kConfig>(call_, piece, rows.keys));
        }
        return;
      }
      exists = exists && has_piece<kConfig>(call_, first_piece_, rows.keys);
#pragma unroll 8
      for (std::int32_t row = first_row_; row < tokens; row += row_stride_) {
        copy_piece<kConfig>(call_, stage + place_in_columns<kConfig>(to_row + row, first_piece_), from, exists);
        from += from_stride;
      }
      return;
    }
    std::uint32_t to = stage + place_in_stage<kConfig>(call_, to_row + first_row_, first_piece_);
    if (piece_stride_ == 0) {
#pragma unroll 8
      for (std::int32_t row = first_row_; row < tokens; row += row_stride_) {
        copy_piece<kConfig>(call_, to, from, exists);
        to += stage_stride();
        from += from_stride;
      }
      return;
    }
    const std::int64_t from_wrap = step - row_bytes_;
    std::int32_t piece = first_piece_;
    for (std::int32_t row = first_row_; row < tokens; to += stage_stride()) {
      copy_piece<kConfig>(call_, to, from, exists);
      row += row_stride_;
      piece += piece_stride_;
      from += from_stride;
      if (piece >= row_pieces_) {
        piece -= row_pieces_;
        ++row;
        from += from_wrap;
        to += stage_wrap();
      }
    }
  }

  const DeviceCall& call_;
  std::int32_t row_bytes_;
  // Pieces of a row, this thread's first piece, and how far it is to its next.
  std::int32_t row_pieces_ = 0, first_row_ = 0, first_piece_ = 0, row_stride_ = 0, piece_stride_ = 0;
};

}  // namespace lean::cuda
