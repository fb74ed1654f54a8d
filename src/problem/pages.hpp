// Paged K/V: which page holds a token, and where it lies. A sequence's pages are listed in block_table or, as CSR, in
// page_indices; a page id outside the pool is never turned into an address.
#pragma once

#include <cstdint>

#include "base/hd.hpp"
#include "lean/problem.hpp"
#include "problem/sequence.hpp"

namespace lean {

LEAN_HD [[nodiscard]] constexpr bool is_paged(const PagedKv& pages) noexcept { return pages.page_tokens > 0; }

/// Ids of the sequence's pages, in order; only those that hold a token below the sequence's length may be read.
LEAN_HD [[nodiscard]] constexpr const std::int32_t* page_ids(const PagedKv& pages, const Sequence& lengths,
                                                             std::int64_t sequence) noexcept {
  if (pages.block_table != nullptr) return pages.block_table + sequence * pages.block_table_stride;
  return pages.page_indices + lengths.first_page;
}

LEAN_HD [[nodiscard]] constexpr bool in_pool(const PagedKv& pages, std::int32_t page_id) noexcept {
  return page_id >= 0 && page_id < pages.page_count;
}

/// Offset of the first token of (page, kv head); `page_id` lies in the pool.
LEAN_HD [[nodiscard]] constexpr std::int64_t page_offset(const Strides& strides, std::int32_t page_id, std::int32_t head) noexcept {
  return page_id * strides.sequence + head * strides.head;
}

}  // namespace lean
