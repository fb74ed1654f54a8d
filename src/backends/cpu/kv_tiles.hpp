// KvTiles: where the K and V rows of each LeanTile of an output lie. Rows are evenly spaced where they can be, else found one by
// one in a table; a token that no row of the block sees gets a row of zeros, so that what lies there is never read.
#pragma once

#include <cstdint>

#include "backends/cpu/new_tokens.hpp"
#include "backends/cpu/tile_kernels.hpp"
#include "backends/cpu/tile_output.hpp"
#include "backends/cpu/token_rows.hpp"
#include "backends/cpu/worker_memory.hpp"
#include "lean/problem.hpp"
#include "problem/address.hpp"

namespace lean::cpu {

struct KvTile {
  std::int64_t token = 0;  // its first
  std::int32_t tokens = 0;
  TokenRows k;
  TokenRows v;
  const TileTables* tables = nullptr;
  bool has_absent = false;  // a token lies in a page outside the pool: is_hidden(k.row(t)), and no row may see it
};

class KvTiles {
 public:
  KvTiles(const Problem& problem, const TileKernels& kernels, const WorkerMemory& memory) noexcept
      : problem_(problem), memory_(memory), new_tokens_(problem, kernels, memory) {}

  /// True once a page id outside the pool was met.
  [[nodiscard]] bool met_bad_page() const noexcept { return met_bad_page_; }

  /// locate() is about this output until the next call.
  void begin(const TileOutput& output) noexcept;

  /// The tile of the tokens from `token` on; the one located before it stays valid. Called once for each tile of a run: new tokens
  /// are written to the cache here.
  [[nodiscard]] KvTile locate(std::int64_t token, std::int32_t tokens) noexcept;

  /// True for the row of zeros, which has the shape of no tensor.
  [[nodiscard]] static bool is_hidden(const std::byte* row) noexcept;
  /// True for a row made of a new token, whose elements lie side by side.
  [[nodiscard]] bool is_new(const std::byte* row) const noexcept { return new_tokens_.made(row); }

  /// Hides the tokens whose flag in tile.tables->hidden is set, in V; K of such tokens is hidden with its score.
  static void hide_values(KvTile& tile) noexcept;

 private:
  void find_pages(KvTile& tile) noexcept;
  void take_new_tokens(KvTile& tile) const noexcept;
  const Problem& problem_;
  const WorkerMemory& memory_;
  NewTokens new_tokens_;
  KeySpan seen_;
  std::int64_t k_base_ = 0;  // elements
  std::int64_t v_base_ = 0;
  const std::int32_t* page_ids_ = nullptr;  // of the sequence; null: not paged
  std::int32_t head_ = 0;
  bool met_bad_page_ = false;
  std::int32_t set_ = 0;
};

}  // namespace lean::cpu
