// LineShape and CostModel: what the schedule needs to know of a problem and of a machine, as integers.
// The line itself (LeanAttention, "Decomposition and Mapping"): sequence -> kv head -> row block -> tile.
#pragma once

#include <cstdint>

#include "base/hd.hpp"
#include "base/int_math.hpp"
#include "lean/problem.hpp"
#include "problem/reach.hpp"

namespace lean::schedule {

/// What one sequence contributes: its query tokens, and its key/value tokens counted from the first valid one.
struct SequenceWork {
  std::int32_t q_tokens = 0;
  std::int32_t kv_tokens = 0;
};

/// The work in anything with q_tokens and kv_tokens(), such as Sequence (problem/sequence.hpp).
template <typename TSequence>
[[nodiscard]] LEAN_HD constexpr SequenceWork work_of(const TSequence& lengths) noexcept {
  return {lengths.q_tokens, lengths.kv_tokens()};
}

[[nodiscard]] LEAN_HD constexpr SequenceWork work_of(const SequenceWork& work) noexcept { return work; }

/// Tiles of an output, numbered from the sequence's first valid token, whatever the row block.
struct TileSpan {
  std::int32_t first = 0;
  std::int32_t count = 1;
};

struct LineShape {
  static constexpr bool kOneBlock = false;

  std::int64_t batch = 0;
  std::int32_t kv_heads = 0;
  std::int32_t group = 0;        // G, query heads per kv head
  std::int32_t q_rows = 0;       // rows of a row block
  std::int32_t tile_tokens = 0;  // tokens of a LeanTile
  Reach reach{};                 // keys beyond it are on no tile of the line

  /// Row blocks of one kv head of a sequence; 0 when it has no query.
  [[nodiscard]] LEAN_HD constexpr std::int32_t row_blocks(const SequenceWork& work) const noexcept {
    const std::int64_t rows = static_cast<std::int64_t>(work.q_tokens) * group;
    if (rows <= q_rows) return rows > 0 ? 1 : 0;  // decode: no division
    return static_cast<std::int32_t>(quotient(rows + q_rows - 1, std::int64_t{q_rows}));
  }

  [[nodiscard]] LEAN_HD constexpr std::int32_t rows_in(const SequenceWork& work, std::int32_t row_block) const noexcept {
    const std::int64_t rows = static_cast<std::int64_t>(work.q_tokens) * group;
    return static_cast<std::int32_t>(min_of(q_rows, rows - static_cast<std::int64_t>(row_block) * q_rows));
  }

  /// The LeanTiles of one output: from the first that one of its rows can see to the last, at least one, so that an empty output
  /// has an owner too.
  [[nodiscard]] LEAN_HD constexpr TileSpan tiles_of(const SequenceWork& work, std::int32_t row_block) const noexcept {
    KeySpan seen{.begin = 0, .end = work.kv_tokens};
    if (reach.left >= 0 || (reach.right >= 0 && work.q_tokens > 1)) {
      const std::int64_t first_row = static_cast<std::int64_t>(row_block) * q_rows;
      const std::int64_t last_row = first_row + rows_in(work, row_block) - 1;
      seen = keys_seen(reach, work.kv_tokens, work.q_tokens, static_cast<std::int32_t>(quotient(first_row, std::int64_t{group})),
                       static_cast<std::int32_t>(quotient(last_row, std::int64_t{group})));
    }
    // 32 bits: what a GPU divides fast.
    const auto end = static_cast<std::uint32_t>(seen.end);
    const auto tile = static_cast<std::uint32_t>(tile_tokens);
    const auto first = static_cast<std::int32_t>(seen.begin == 0 ? 0U : static_cast<std::uint32_t>(seen.begin) / tile);
    const auto past_last = static_cast<std::int32_t>(end / tile) + (end % tile != 0 ? 1 : 0);
    return {.first = first, .count = max_of<std::int32_t>(1, past_last - first)};
  }

  /// True when every row block of a sequence has the same number of tiles.
  [[nodiscard]] LEAN_HD constexpr bool same_tiles_in_all_blocks(const SequenceWork& work) const noexcept {
    return !reach.limited() || row_blocks(work) <= 1;
  }
};

/// The shape of a line on which every kv head of a sequence is one output: its packed rows fit one row block, whose last row sees
/// the last token. What LineShape finds by divisions is known here, so that a GPU's walk stays short.
template <std::int32_t kTileTokens>
struct OneBlockShape {
  static constexpr bool kOneBlock = true;

  std::int64_t batch = 0;
  std::int32_t kv_heads = 0;
  std::int32_t group = 0;
  std::int32_t window_left = -1;

  LEAN_HD explicit constexpr OneBlockShape(const LineShape& shape) noexcept
      : batch(shape.batch), kv_heads(shape.kv_heads), group(shape.group), window_left(shape.reach.left) {}

  [[nodiscard]] LEAN_HD static constexpr std::int32_t row_blocks(const SequenceWork& work) noexcept {
    return work.q_tokens > 0 ? 1 : 0;
  }
  [[nodiscard]] LEAN_HD constexpr std::int32_t rows_in(const SequenceWork& work, std::int32_t) const noexcept {
    return work.q_tokens * group;
  }
  [[nodiscard]] LEAN_HD constexpr TileSpan tiles_of(const SequenceWork& work, std::int32_t) const noexcept {
    TileSpan tiles{.first = 0, .count = work.kv_tokens > 0 ? (work.kv_tokens - 1) / kTileTokens + 1 : 1};
    if (window_left < 0) return tiles;
    const KeySpan seen = keys_seen({.left = window_left}, work.kv_tokens, work.q_tokens, 0, work.q_tokens - 1);
    tiles.first = seen.begin / kTileTokens;
    tiles.count = max_of(1, tiles.count - tiles.first);
    return tiles;
  }
  [[nodiscard]] LEAN_HD static constexpr bool same_tiles_in_all_blocks(const SequenceWork&) noexcept { return true; }
};

[[nodiscard]] constexpr LineShape line_shape_of(const Problem& problem, std::int32_t q_rows, std::int32_t tile_tokens) noexcept {
  return {.batch = problem.batch,
          .kv_heads = problem.kv_heads,
          .group = problem.q_heads / problem.kv_heads,
          .q_rows = q_rows,
          .tile_tokens = tile_tokens,
          .reach = reach_of(problem.scores)};
}

/// The most packed rows of one kv head, and the most outputs of the whole call, for any lengths within the capacities.
[[nodiscard]] constexpr std::int64_t row_capacity(const Problem& problem) noexcept {
  return std::int64_t{problem.q_tokens} * (problem.q_heads / problem.kv_heads);
}
[[nodiscard]] constexpr std::int64_t output_capacity(const Problem& problem, std::int32_t q_rows) noexcept {
  return problem.batch * problem.kv_heads * ceil_div(row_capacity(problem), q_rows);
}

/// What work costs a worker, in arbitrary integer units, and the limits of the never-worse rules. Fitted per backend
/// (docs/schedule.md has the measurements); CostModel::plain() counts tiles and nothing else, as the paper does.
struct CostModel {
  std::int32_t tile_units = 16;        // a tile whose time is its read
  std::int32_t free_rows = 128;        // rows a tile carries without getting slower
  std::int32_t row_units = 0;          // each row beyond: units per tile
  std::int32_t segment_units = 0;      // fixed charge of every output a worker touches
  std::int32_t min_worker_tiles = 1;   // a worker gets at least this much, else fewer workers run
  std::int32_t sliver_tiles = 0;       // no cut closer than this to an output's edge
  std::int32_t align_percent = 0;      // up to this many percent are given up to cut at outputs' edges,
  std::int32_t whole_percent = 0;      // or so many where each worker then has whole outputs, so that none is merged,
  std::int32_t align_units = 1 << 30;  // and up to this much of a worker's time, which must pay for segments and merges saved

  [[nodiscard]] static constexpr CostModel plain() noexcept { return {.tile_units = 1}; }

  [[nodiscard]] LEAN_HD constexpr std::int32_t tile_cost(std::int32_t rows) const noexcept {
    return tile_units + (rows > free_rows ? rows - free_rows : 0) * row_units;
  }
};

}  // namespace lean::schedule
