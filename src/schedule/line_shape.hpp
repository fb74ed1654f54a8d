// LineShape and CostModel: what the schedule needs to know of a problem and of a machine, as integers.
// The line itself (LeanAttention, "Decomposition and Mapping"): sequence -> kv head -> row block -> tile.
#pragma once

#include <bit>
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

/// The tiles of a sequence's full row blocks where each sees as far to the right as a causal limit lets its last row, and all of
/// what lies before: a stair, of which every sum is known without a walk. Block i has (i + offset) / width tiles, at least 1 and at
/// most `highest`: no more than one more than the block before. In 64 bits, or in 32 with a width whose reciprocal is known (StairShape).
template <typename TInt, typename TWidth>
struct BasicTileStair {
  TInt offset = 0;
  TWidth width{};  // blocks of a step
  TInt highest = 1;

  [[nodiscard]] LEAN_HD constexpr std::int32_t tiles(TInt block) const noexcept {
    const TInt steps = quotient(max_of(TInt{0}, block + offset), width);
    return static_cast<std::int32_t>(max_of(TInt{1}, min_of(steps, highest)));
  }
  /// The first block with so many tiles, if there were no end of blocks.
  [[nodiscard]] LEAN_HD constexpr TInt first_with(TInt tiles) const noexcept {
    return max_of(TInt{0}, tiles * value_of(width) - offset);
  }
  /// Tiles of the first `blocks` together.
  [[nodiscard]] LEAN_HD constexpr TInt tiles_before(TInt blocks) const noexcept {
    const TInt rises = min_of(first_with(1), blocks);
    const TInt flat = min_of(first_with(highest), blocks);
    const TInt between = flat > rises ? below(flat + offset) - below(rises + offset) : 0;
    return rises + between + (blocks - max_of(rises, flat)) * highest;
  }
  /// The fewest tiles of a block that may be cut, of blocks that have from `fewest` to `most`: of one tile none is, if any has more.
  [[nodiscard]] LEAN_HD constexpr std::int32_t fewest_cut(std::int32_t fewest, std::int32_t most) const noexcept {
    return max_of(fewest, min_of(2, most));
  }

 protected:
  [[nodiscard]] LEAN_HD static constexpr TInt value_of(TInt of_width) noexcept { return of_width; }
  [[nodiscard]] LEAN_HD static constexpr TInt value_of(const Divisor& of_width) noexcept { return of_width.value(); }

 private:
  /// Of all j < x, j / width together.
  [[nodiscard]] LEAN_HD constexpr TInt below(TInt x) const noexcept {
    const TInt steps = quotient(x, width);
    return (steps * (steps - 1) >> 1) * value_of(width) + steps * (x - steps * value_of(width));
  }
};

/// The sum of (step * i + offset) / width over all i < count, numbers that are not negative: whole steps are summed at once, and what is
/// left of them is the same sum with step and width changing places, as in Euclid's algorithm.
template <typename TInt>
[[nodiscard]] LEAN_HD constexpr TInt sum_of_quotients(TInt count, TInt step, TInt offset, TInt width) noexcept {
  TInt sum = 0;
  while (count > 0) {
    const TInt whole = quotient(step, width);
    const TInt level = quotient(offset, width);
    if (whole > 0) sum += (count * (count - 1) >> 1) * whole;  // else there may be more than the square of has room
    sum += count * level;
    step -= whole * width;
    offset -= level * width;
    const TInt end = step * count + offset;
    count = quotient(end, width);
    offset = end - count * width;
    const TInt before = width;
    width = step;
    step = before;
  }
  return sum;
}

/// Such a stair of any slope: block i has ((i << rise_log2) + offset) / width tiles.
template <typename TInt, typename TWidth>
struct BasicSteepStair : BasicTileStair<TInt, TWidth> {
  using Base = BasicTileStair<TInt, TWidth>;
  using Base::highest;
  using Base::offset;
  using Base::width;
  std::int32_t rise_log2 = 0;

  [[nodiscard]] LEAN_HD constexpr std::int32_t tiles(TInt block) const noexcept { return Base::tiles(block << rise_log2); }
  [[nodiscard]] LEAN_HD constexpr TInt first_with(TInt tiles) const noexcept {
    const TInt rise = TInt{1} << rise_log2;
    return max_of(TInt{0}, (tiles * Base::value_of(width) - offset + rise - 1) >> rise_log2);
  }
  [[nodiscard]] LEAN_HD constexpr TInt tiles_before(TInt blocks) const noexcept {
    if (rise_log2 == 0) return Base::tiles_before(blocks);
    const TInt rises = min_of(first_with(1), blocks);
    const TInt flat = min_of(first_with(highest), blocks);
    const TInt between =
        sum_of_quotients(flat - rises, TInt{1} << rise_log2, (rises << rise_log2) + offset, TInt{Base::value_of(width)});
    return rises + between + (blocks - max_of(rises, flat)) * highest;
  }
  [[nodiscard]] LEAN_HD constexpr std::int32_t fewest_cut(std::int32_t fewest, std::int32_t most) const noexcept {
    return rise_log2 > 0 && fewest < 2 && most > 2 ? tiles(first_with(2)) : Base::fewest_cut(fewest, most);
  }
};

/// width 0: the blocks are no such stair.
using TileStair = BasicTileStair<std::int64_t, std::int64_t>;
using SteepStair = BasicSteepStair<std::int64_t, std::int64_t>;

/// How a stair rises: by 1 << rise_log2 tiles in `width` row blocks, numbers without a common divisor. With E what a block's last row
/// sees, it has ceil(E / tile_tokens) tiles, and E grows by q_rows / group from block to block: nested divisions are one, by
/// group * tile_tokens. `q_rows` is a power of two.
struct StairStep {
  std::int64_t width = 1;
  std::int32_t rise_log2 = 0;
};
[[nodiscard]] LEAN_HD constexpr StairStep stair_step_of(std::int64_t group_tokens, std::int32_t q_rows) noexcept {
  StairStep step{.width = group_tokens};
  std::int32_t rows = q_rows;
  for (; rows > 1 && step.width % 2 == 0; rows /= 2) step.width /= 2;
  for (; rows > 1; rows /= 2) ++step.rise_log2;
  return step;
}

struct LineShape {
  static constexpr bool kOneBlock = false;
  static constexpr bool kStair = false;

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

  /// The stair of a sequence's full row blocks, if they are one that is not steep.
  [[nodiscard]] LEAN_HD constexpr TileStair stair_of(const SequenceWork& work) const noexcept {
    const std::int64_t step = std::int64_t{group} * tile_tokens;
    const std::int64_t width = quotient(step, std::int64_t{q_rows});
    const std::int64_t first_end = std::int64_t{work.kv_tokens} - work.q_tokens + reach.right + tile_tokens;
    if (reach.left >= 0 || reach.right < 0 || width * q_rows != step || first_end < 0) return {};
    return {.offset = quotient(first_end * group + q_rows - 1, std::int64_t{q_rows}),
            .width = width,
            .highest = max_of(1, quotient(std::int64_t{work.kv_tokens} + tile_tokens - 1, std::int64_t{tile_tokens}))};
  }

  /// The same, however steep it is, and of all rows that see all keys too: the first block has the most tiles already then. Without a
  /// limit to the left; q_rows is a power of two.
  [[nodiscard]] constexpr SteepStair steep_stair_of(const SequenceWork& work) const noexcept {
    const StairStep step = stair_step_of(std::int64_t{group} * tile_tokens, q_rows);
    const std::int64_t highest = max_of<std::int64_t>(1, ceil_div(work.kv_tokens, tile_tokens));
    std::int64_t offset = highest * step.width;
    if (reach.right >= 0) {
      const std::int64_t first_end = std::int64_t{work.kv_tokens} - work.q_tokens + reach.right + tile_tokens;
      offset = min_of(offset,
                      (first_end * group + q_rows - 1) >> std::countr_zero(static_cast<std::uint32_t>(q_rows >> step.rise_log2)));
    }
    return {{.offset = offset, .width = step.width, .highest = highest}, step.rise_log2};
  }

  /// True when every row block of a sequence has the same number of tiles.
  [[nodiscard]] LEAN_HD constexpr bool same_tiles_in_all_blocks(const SequenceWork& work) const noexcept {
    return !reach.limited() || row_blocks(work) <= 1;
  }
};

/// StairStep in 32 bits, with the reciprocal of its width.
struct ShortStairStep {
  Divisor width;
  std::int32_t rise_log2 = 0;
};
[[nodiscard]] constexpr ShortStairStep short_stair_step_of(const LineShape& shape) noexcept {
  const StairStep step = stair_step_of(std::int64_t{shape.group} * shape.tile_tokens, shape.q_rows);
  return {Divisor(static_cast<std::int32_t>(step.width)), step.rise_log2};
}

/// The shape of a line on which every kv head of a sequence is one output: its packed rows fit one row block, whose last row sees
/// the last token. What LineShape finds by divisions is known here, so that a GPU's walk stays short.
template <std::int32_t kTileTokens>
struct OneBlockShape {
  static constexpr bool kOneBlock = true;
  static constexpr bool kStair = false;

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

/// Parts of an output that merge on one level (fixup::kMaxOneLevel).
inline constexpr std::int32_t kOneLevelParts = 32;

/// What work costs a worker, in arbitrary integer units, and the limits of the never-worse rules. Fitted per backend
/// (docs/schedule.md has the measurements); CostModel::plain() counts tiles and nothing else, as the paper does.
struct CostModel {
  std::int32_t tile_units = 16;       // a tile whose time is its read
  std::int32_t free_rows = 128;       // rows a tile carries without getting slower
  std::int32_t row_units = 0;         // each row beyond: units per tile
  std::int32_t segment_units = 0;     // fixed charge of every output a worker touches
  std::int32_t min_worker_tiles = 1;  // a worker gets at least this much, else fewer workers run
  std::int32_t sliver_tiles = 0;      // no cut closer than this to an output's edge
  std::int32_t alike_percent = 0;  // outputs whose costs differ by no more, and that are no more than the workers, count as alike
  std::int32_t align_percent = 0;  // up to this many percent are given up to cut at outputs' edges,
  std::int32_t whole_percent = 0;  // or so many where each worker then has whole outputs, so that none is merged,
  std::int32_t align_units = 1 << 30;  // and up to this much of a worker's time, which must pay for segments and merges saved;
  std::int32_t short_tiles = 0;        // or any number of them, where a worker then has no more tiles than this,
  std::int32_t spare_tiles = 0;        // or a quarter, where a worker then has whole outputs and no more tiles than this
  std::int32_t unshared_tiles = 0;     // outputs alike of no more tiles than this have a worker each, where there are enough
  std::int32_t cut_units =
      0;  // what ends that cuts anywhere give a worker cost more than level ones (level_line.hpp); 0: never level
  std::int32_t whole_units =
      0;  // and what no worker walks or merges of outputs that have a worker each saves beside (level_line.hpp)
  std::int32_t far_tiles = 0;  // K and V of more are worth a sixteenth of the time to be read by several at once (level_line.hpp)
  std::int32_t part_tiles =
      1;  // of more than kOneLevelParts of an output, which merge on two levels, each has so many (level_line.hpp)

  bool operator==(const CostModel&) const = default;

  [[nodiscard]] static constexpr CostModel plain() noexcept { return {.tile_units = 1}; }

  [[nodiscard]] LEAN_HD constexpr std::int32_t tile_cost(std::int32_t rows) const noexcept {
    return tile_units + (rows > free_rows ? rows - free_rows : 0) * row_units;
  }
};

}  // namespace lean::schedule
