// Rows of K and V for one tile: evenly spaced where they lie so, else a table of addresses, which pages, hidden tokens and new ones
// need; elements that are not side by side are copied.
#include "backends/cpu/kv_tiles.hpp"

#include "backends/cpu/elements.hpp"
#include "problem/pages.hpp"
#include "problem/preconditions.hpp"

namespace lean::cpu {
namespace {

constexpr std::int64_t kMaxRowBytes = std::int64_t{kMaxHeadDim} * sizeof(float);

/// What hidden tokens hold.
alignas(64) constexpr std::byte kZeroRow[kMaxRowBytes] = {};

/// Gives evenly spaced rows a table of addresses.
void spread(TokenRows& rows, const std::byte** table) noexcept {
  if (rows.table != nullptr) return;
  for (std::int32_t t = 0; t < rows.tokens; ++t) table[t] = rows.row(t);
  rows.table = table;
}

}  // namespace

void KvTiles::begin(const TileOutput& output) noexcept {
  const Sequence& lengths = output.lengths;
  const HeadPosition& kv_head = output.kv_head;
  seen_ = output.seen();
  new_tokens_.begin(output);
  head_ = kv_head.head;
  page_ids_ = is_paged(problem_.pages) ? page_ids(problem_.pages, lengths, kv_head.sequence) : nullptr;
  if (page_ids_ != nullptr) return;
  const bool cumulative = problem_.cu_kv_tokens != nullptr;
  k_base_ = kv_offset(problem_.k.strides, lengths, kv_head, cumulative);
  v_base_ = kv_offset(problem_.v.strides, lengths, kv_head, cumulative);
}

KvTile KvTiles::locate(std::int64_t token, std::int32_t tokens) noexcept {
  set_ = (set_ + 1) % kTileSets;
  const TileTables& tables = memory_.tile_tables[set_];
  KvTile tile{.token = token,
              .tokens = tokens,
              .k = {.token_stride_bytes = problem_.k.strides.token * bytes_of(problem_.k.dtype),
                    .tokens = tokens,
                    .dims = problem_.head_dim},
              .v = {.token_stride_bytes = problem_.v.strides.token * bytes_of(problem_.v.dtype),
                    .tokens = tokens,
                    .dims = value_dim_of(problem_)},
              .tables = &tables};
  if (page_ids_ != nullptr) {
    find_pages(tile);
  } else {
    tile.k.data = element(problem_.k, k_base_ + token * problem_.k.strides.token);
    tile.v.data = element(problem_.v, v_base_ + token * problem_.v.strides.token);
  }
  if (token + tokens > new_tokens_.first()) take_new_tokens(tile);
  if (token < seen_.begin) {  // the first tile of a window
    const auto unseen = static_cast<std::int32_t>(min_of(tokens, seen_.begin - token));
    spread(tile.k, tables.k);
    spread(tile.v, tables.v);
    for (std::int32_t t = 0; t < unseen; ++t) tables.k[t] = tables.v[t] = kZeroRow;
  }
  return tile;
}

bool KvTiles::is_hidden(const std::byte* row) noexcept { return row == kZeroRow; }

/// Puts the rows of every page of the tile into its tables. Pages that end before the first token that is seen are not looked up.
void KvTiles::find_pages(KvTile& tile) noexcept {
  const PagedKv& pages = problem_.pages;
  tile.k.table = tile.tables->k;
  tile.v.table = tile.tables->v;
  std::int64_t page = tile.token / pages.page_tokens;
  std::int64_t in_page = tile.token - page * pages.page_tokens;
  for (std::int32_t t = 0; t < tile.tokens; ++page, in_page = 0) {
    const auto page_end = static_cast<std::int32_t>(min_of(tile.tokens, std::int64_t{t} + pages.page_tokens - in_page));
    const bool seen = tile.token + page_end > seen_.begin;
    const std::int32_t id = seen ? page_ids_[page] : -1;
    if (!in_pool(pages, id)) {
      if (seen) tile.has_absent = met_bad_page_ = true;
      for (; t < page_end; ++t) tile.tables->k[t] = tile.tables->v[t] = kZeroRow;
      continue;
    }
    const std::byte* k = element(problem_.k, page_offset(problem_.k.strides, id, head_) + in_page * problem_.k.strides.token);
    const std::byte* v = element(problem_.v, page_offset(problem_.v.strides, id, head_) + in_page * problem_.v.strides.token);
    for (const std::int32_t first = t; t < page_end; ++t) {
      tile.tables->k[t] = k + (t - first) * tile.k.token_stride_bytes;
      tile.tables->v[t] = v + (t - first) * tile.v.token_stride_bytes;
    }
  }
}

/// New tokens that the call itself writes are attended from the inputs: their rows in the cache are written, never read.
void KvTiles::take_new_tokens(KvTile& tile) const noexcept {
  spread(tile.k, tile.tables->k);
  spread(tile.v, tile.tables->v);
  for (auto t = static_cast<std::int32_t>(max_of(0, new_tokens_.first() - tile.token)); t < tile.tokens; ++t) {
    if (is_hidden(tile.k.row(t))) continue;  // no page to keep it
    const NewTokens::Rows rows = new_tokens_.make(tile.token + t, set_, {tile.k.row(t), tile.v.row(t)});
    tile.tables->k[t] = rows.k;
    tile.tables->v[t] = rows.v;
  }
}

void KvTiles::hide_values(KvTile& tile) noexcept {
  spread(tile.v, tile.tables->v);
  for (std::int32_t t = 0; t < tile.tokens; ++t) {
    if (tile.tables->hidden[t] != 0) tile.tables->v[t] = kZeroRow;
  }
}

}  // namespace lean::cpu
