// CallPlan: everything that is decided of a call before a worker runs. Made once a call; whoever refuses the call, measures its
// workspace or runs it only reads the plan.
#pragma once

#include <cstdint>

#include "backends/cpu/worker.hpp"
#include "backends/cpu/worker_memory.hpp"
#include "fixup/workspace.hpp"
#include "fixup/workspace_size.hpp"
#include "lean/lean.hpp"
#include "schedule/line_shape.hpp"
#include "tile/tile_config.hpp"
#include "tile/tiling.hpp"

namespace lean::cpu {

struct CallPlan {
  Options options;
  const Executor* executor = nullptr;
  std::int32_t workers = 1;
  tile::TileConfig config{};
  fixup::WorkspaceLayout workspace{};
  WorkerMemoryLayout memory{};  // of each worker
  std::int64_t batch = 0;

  /// What the call is to be given. Of a plan that nothing is refused of: sizes beyond what is taken may not be multiplied.
  [[nodiscard]] fixup::WorkspaceNeed need() const noexcept;
  [[nodiscard]] tile::Tiling tiling() const noexcept;

  // Scratch: the fix-up's, the lengths, what each worker has done, the memory of each worker.
  [[nodiscard]] std::int64_t lengths_begin() const noexcept { return workspace.scratch_bytes(); }
  [[nodiscard]] std::int64_t done_begin() const noexcept { return lengths_begin() + array_bytes<Sequence>(batch); }
  [[nodiscard]] std::int64_t memory_begin() const noexcept { return done_begin() + array_bytes<Done>(workers); }

 private:
  template <typename T>
  [[nodiscard]] static std::int64_t array_bytes(std::int64_t count) noexcept {
    return round_up(count * static_cast<std::int64_t>(sizeof(T)), fixup::kAlignmentBytes);
  }
};

[[nodiscard]] CallPlan plan_call(const Problem& problem, const Options& options) noexcept;

/// The LeanTile variant for a problem: a function of types, d, dv and the longest n_q alone, never of lengths; its tokens not of n_q in
/// chunks, whose sums are a tile's.
[[nodiscard]] tile::TileConfig select_tile(const Problem& problem, const Options& options) noexcept;

/// The schedule's integers for this backend (docs/schedule.md).
[[nodiscard]] constexpr schedule::CostModel cost_model(const tile::TileConfig& /*config*/) noexcept {
  return {.tile_units = 16,
          .free_rows = 8,
          .row_units = 2,
          .segment_units = 2,
          .min_worker_tiles = 1,
          .sliver_tiles = 2,
          .align_percent = 0,
          .whole_percent = 0};
}

}  // namespace lean::cpu
