// The stair line: every sequence's row blocks have as many tiles as a causal limit lets their last rows see, or all of them, and the
// policy cuts the line. That is nearly every call of many rows, so a GPU sums and walks it in 32 bits, by a stair's closed forms and
// divisions whose reciprocals the host worked out, instead of by WorkLine's and SegmentCursor's general code: instructions that run
// once cost a GPU their fetching. The rules, the plan and the cuts are the same; a test walks both.
#pragma once

#include <cstdint>
#include <type_traits>
#include <utility>

#include "base/hd.hpp"
#include "base/int_math.hpp"
#include "schedule/flat_line.hpp"
#include "schedule/level_line.hpp"
#include "schedule/line_shape.hpp"
#include "schedule/plan.hpp"
#include "schedule/segments.hpp"
#include "schedule/work_line.hpp"

namespace lean::schedule {

/// Whether the line of any call within these capacities is a stair that 32 bits count; else it is LineShape's. `outputs`: at most, of
/// the whole call; `q_capacity` and `kv_capacity`: tokens of a sequence.
[[nodiscard]] constexpr bool is_stair(const LineShape& shape, const CostModel& model, std::int64_t outputs, std::int64_t q_capacity,
                                      std::int64_t kv_capacity, std::int32_t workers) noexcept {
  const std::int64_t width = stair_step_of(std::int64_t{shape.group} * shape.tile_tokens, shape.q_rows).width;
  if (shape.reach.left >= 0 || model.row_units != 0) return false;
  const std::int64_t keys = kv_capacity + q_capacity + max_of(0, shape.reach.right) + shape.tile_tokens;
  if (keys > INT32_MAX / shape.group - shape.q_rows) return false;
  const std::int64_t highest = keys / shape.tile_tokens + 1;
  if (highest > INT32_MAX / highest || highest * highest > INT32_MAX / width) return false;
  return narrow_units(outputs, kv_capacity, shape, model, workers);
}

/// A LineShape of which that is true. Of a sequence all row blocks follow from its stair, the last too, since its last row sees as
/// far as any: to the last key.
template <std::int32_t kRows, std::int32_t kTileTokens>
struct StairShape {
  static constexpr bool kOneBlock = false;
  static constexpr bool kStair = true;
  static constexpr std::int32_t q_rows = kRows;
  /// Where rows divide tiles, a block has a tile more than the one before at most, whatever the heads.
  static constexpr bool kSteep = kTileTokens % kRows != 0;
  using Stair = std::conditional_t<kSteep, BasicSteepStair<std::int32_t, Divisor>, BasicTileStair<std::int32_t, Divisor>>;

  std::int64_t batch = 0;
  std::int32_t kv_heads = 0;
  std::int32_t group = 0;
  std::int32_t reach_right = -1;
  ShortStairStep step;

  /// `step_of_shape`: short_stair_step_of() the shape.
  LEAN_HD constexpr StairShape(const LineShape& shape, const ShortStairStep& step_of_shape) noexcept
      : batch(shape.batch), kv_heads(shape.kv_heads), group(shape.group), reach_right(shape.reach.right), step(step_of_shape) {}

  [[nodiscard]] LEAN_HD constexpr std::int32_t row_blocks(const SequenceWork& work) const noexcept {
    return quotient(work.q_tokens * group + kRows - 1, kRows);
  }
  [[nodiscard]] LEAN_HD constexpr std::int32_t rows_in(const SequenceWork& work, std::int32_t row_block) const noexcept {
    return min_of(kRows, work.q_tokens * group - row_block * kRows);
  }
  [[nodiscard]] LEAN_HD constexpr TileSpan tiles_of(const SequenceWork& work, std::int32_t row_block) const noexcept {
    return {.first = 0, .count = stair_of(work).tiles(row_block)};
  }

  /// LineShape::steep_stair_of() has the formula. Where all rows see all keys the first block has the most tiles already.
  [[nodiscard]] LEAN_HD constexpr Stair stair_of(const SequenceWork& work) const noexcept {
    const std::int32_t highest = max_of(1, quotient(work.kv_tokens + kTileTokens - 1, kTileTokens));
    const std::int32_t everything = highest * step.width.value();
    std::int32_t offset = everything;
    if (reach_right >= 0) {
      const std::int32_t first_end = work.kv_tokens - work.q_tokens + reach_right + kTileTokens;
      static_assert((kRows & (kRows - 1)) == 0);
      offset = (first_end * group + kRows - 1) >> (kRowsLog2 - (kSteep ? step.rise_log2 : 0));  // rounded down, below 0 too
      offset = min_of(offset, everything);
    }
    if constexpr (kSteep) {
      return {{.offset = offset, .width = step.width, .highest = highest}, step.rise_log2};
    } else {
      return {.offset = offset, .width = step.width, .highest = highest};
    }
  }

 private:
  static constexpr std::int32_t kRowsLog2 = [] {
    std::int32_t log2 = 0;
    while ((1 << log2) < kRows) ++log2;
    return log2;
  }();
};

/// How far a worker got on such a line: all that is kept from one of its segments to the next. A value, wherever it lies.
template <typename TUnits, typename TLengths>
struct StairWalk {
  std::int32_t worker = 0;
  std::int32_t whole_turn = 0;  // of a level line: outputs that the worker has taken whole
  typename BasicShares<TUnits>::Range share;
  TUnits place = 0;    // where the next output begins; before the first segment, the share
  TLengths lengths{};  // of the segment's sequence; before the first, of one that begins at or before the share
  BasicSegment<TUnits> segment;
};

/// Walks the segments of one worker, as SegmentCursor does, and leaves what it knows in a StairWalk. TRules: LineRules with a
/// StairShape, in cost units. One way to every segment, the first among them, and nothing remembered that can be worked out: what is
/// there once is fetched once.
template <typename TRules>
class StairCursor {
 public:
  using Units = typename TRules::Units;
  using Lengths = decltype(std::declval<const typename TRules::Lengths&>()(std::int64_t{}));
  using Walk = StairWalk<Units, Lengths>;

  /// To go on with a walk that has begun.
  LEAN_HD constexpr StairCursor(const TRules& rules, const BasicStairPlan<Units>& plan, Walk& walk) noexcept
      : rules_(rules), plan_(plan), share_(rules.cost_model(), plan, walk.worker, walk.share), walk_(walk) {}

  /// A walk of `worker`, before its first segment. `share`: its range; `start`: any sequence that begins at or before what it begins
  /// with, and its lengths. A worker beyond the plan's has no segment.
  [[nodiscard]] LEAN_HD static constexpr Walk begin(const BasicStairPlan<Units>& plan, std::int32_t worker,
                                                    const typename BasicShares<Units>::Range& share,
                                                    const SequencePlace<Units>& start, const Lengths& lengths) noexcept {
    Walk walk;
    walk.worker = worker;
    walk.share = share;
    walk.place = worker < plan.workers ? plan.begin_of(worker, share) : share.end;
    walk.lengths = lengths;
    walk.segment.output.sequence = start.sequence;
    walk.segment.output.sequence_begin = start.begin;
    return walk;
  }

  LEAN_HD constexpr bool next() noexcept {
    if (!next_run()) return false;
    find_contributors();
    return true;
  }

  LEAN_HD constexpr bool next_run() noexcept {
    BasicOutput<Units>& output = walk_.segment.output;
    while (walk_.place < share_.end()) {
      const SequenceWork work = work_of(walk_.lengths);
      const auto stair = rules_.shape().stair_of(work);
      const std::int32_t blocks = rules_.shape().row_blocks(work);
      const Units parts = plan_.level_parts;  // 0: the line is measured in costs
      const Units head_cost = parts > 0 ? blocks * parts : rules_.stair_cost(stair, blocks);
      const Units in_sequence = walk_.place - output.sequence_begin;
      if (in_sequence >= rules_.shape().kv_heads * head_cost) {  // the next one's, whose lengths are asked for here alone
        output.sequence_begin += rules_.shape().kv_heads * head_cost;
        walk_.lengths = rules_.lengths()(++output.sequence);
        continue;
      }
      output.kv_head = quotient(in_sequence, head_cost);
      const Units head_begin = output.sequence_begin + output.kv_head * head_cost;
      if (parts > 0) {
        const std::int32_t place_in_head = quotient(walk_.place - head_begin, parts);
        output.row_block = level_block(place_in_head, blocks);
        output.begin = head_begin + place_in_head * parts;
      } else {
        output.row_block = rules_.stair_block(stair, blocks, walk_.place - head_begin);
        output.begin = head_begin + rules_.stair_cost(stair, output.row_block);
      }
      output = rules_.make_output(output, work);
      if (parts > 0) output.cost = parts;
      if (walk_.place < 0) {  // dealt out whole
        walk_.segment.tile_begin = 0;
        walk_.segment.tile_end = output.tiles;
        ++walk_.whole_turn;
        walk_.place = walk_.whole_turn < plan_.whole_turns ? plan_.whole_begin(walk_.worker, walk_.whole_turn) : walk_.share.begin;
        return true;
      }
      walk_.place = output.begin + output.cost;
      if (share_.own_run(walk_.segment)) return true;
    }
    return false;
  }

  LEAN_HD constexpr void find_contributors() noexcept { share_.find_contributors(walk_.segment); }

 private:
  const TRules& rules_;
  const BasicStairPlan<Units>& plan_;
  LineShare<Units> share_;
  Walk& walk_;
};

}  // namespace lean::schedule
