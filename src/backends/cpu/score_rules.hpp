// ScoreRules: what Scores asks of a row's scores beyond a scale: softcap, ALiBi, masks, the left end of a window. Turned into one
// ScoreRule a row and tile; tokens that no row of the block sees are hidden in V too, so that NaN there reaches nobody.
#pragma once

#include <cstdint>

#include "backends/cpu/kv_tiles.hpp"
#include "backends/cpu/tile_kernels.hpp"
#include "backends/cpu/tile_output.hpp"
#include "backends/cpu/worker_memory.hpp"
#include "lean/problem.hpp"

namespace lean::cpu {

/// True when tokens among those of the sequence may be hidden from all rows of a block.
[[nodiscard]] constexpr bool hides_tokens(const Scores& scores) noexcept {
  return scores.window_left >= 0 || scores.mask != nullptr || scores.tree_mask != nullptr;
}

class ScoreRules {
 public:
  ScoreRules(const Problem& problem, const TileKernels& kernels, const WorkerMemory& memory) noexcept;

  /// Applies the rules to a tile's raw scores; `scale` takes one into the log2 domain. False when there are no rules: the scores
  /// are still to be scaled.
  [[nodiscard]] bool apply(const TileOutput& output, float scale, KvTile& tile, const RowBuffer& scores) const noexcept;

  /// Whether a mask, or a page that is not there, may hide a token of the tile: apply() then wants all rows of the block at once.
  [[nodiscard]] bool masks(const TileOutput& output, const KvTile& tile) const noexcept;

 private:
  void fill_bias(const TileOutput& output, PackedRow at, const KvTile& tile, std::int32_t begin, std::int32_t end) const noexcept;

  const Problem& problem_;
  const TileKernels& kernels_;
  const WorkerMemory& memory_;
  bool any_ = false;
};

}  // namespace lean::cpu
