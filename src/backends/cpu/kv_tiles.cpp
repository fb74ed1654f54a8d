#include "backends/cpu/kv_tiles.hpp"

#include "backends/cpu/elements.hpp"
#include "problem/preconditions.hpp"

namespace lean::cpu {
namespace {

constexpr std::int64_t kMaxRowBytes = 256 * 4;

/// What hidden tokens hold.
alignas(64) constexpr std::byte kZeroRow[kMaxRowBytes] = {};

/// The same rows through a table.
void spread(TokenRows& rows, const std::byte** table) noexcept {
  if (rows.table != nullptr) return;
  for (std::int32_t t = 0; t < rows.tokens; ++t) table[t] = rows.row(t);
  rows.table = table;
}

}  // namespace

void KvTiles::begin(const Sequence& lengths, HeadPosition kv_head, KeySpan seen) noexcept {
  const bool cumulative = problem_.cu_kv_tokens != nullptr;
  k_base_ = kv_offset(problem_.k.strides, lengths, kv_head, cumulative);
  v_base_ = kv_offset(problem_.v.strides, lengths, kv_head, cumulative);
  seen_ = seen;
}

KvTile KvTiles::locate(std::int64_t token, std::int32_t tokens) noexcept {
  set_ = (set_ + 1) % kTileSets;
  const TileTables& tables = memory_.tile_tables[set_];
  KvTile tile{.token = token,
              .tokens = tokens,
              .k = evenly_spaced(problem_.k, k_base_, token, tokens, problem_.head_dim),
              .v = evenly_spaced(problem_.v, v_base_, token, tokens, value_dim_of(problem_)),
              .tables = &tables};
  if (token < seen_.begin) {  // the first tile of a window
    const auto unseen = static_cast<std::int32_t>(min_of(tokens, seen_.begin - token));
    spread(tile.k, tables.k);
    spread(tile.v, tables.v);
    for (std::int32_t t = 0; t < unseen; ++t) tables.k[t] = tables.v[t] = kZeroRow;
  }
  return tile;
}

bool KvTiles::is_hidden(const std::byte* row) noexcept { return row == kZeroRow; }

void KvTiles::hide_values(KvTile& tile) noexcept {
  spread(tile.v, tile.tables->v);
  for (std::int32_t t = 0; t < tile.tokens; ++t) {
    if (tile.tables->hidden[t] != 0) tile.tables->v[t] = kZeroRow;
  }
}

TokenRows KvTiles::evenly_spaced(const TensorView& tensor, std::int64_t base, std::int64_t token, std::int32_t tokens,
                                 std::int32_t dims) const noexcept {
  return {.data = element(tensor, base + token * tensor.strides.token),
          .token_stride_bytes = tensor.strides.token * bytes_of(tensor.dtype),
          .tokens = tokens,
          .dims = dims};
}

}  // namespace lean::cpu
