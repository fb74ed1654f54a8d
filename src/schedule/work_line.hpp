// WorkLine: the line of all LeanTiles, measured, and the search for a place on it.
//
// Sequences are grouped in strips; only the strips' sums are kept, so memory does not depend on the batch and a batch
// of 65,536 sequences costs one pass. On a GPU every thread sums one strip; on a CPU the caller sums them in turn.
// Invariant: strip_begin is non-decreasing.
#pragma once

#include <cstdint>
#include <limits>
#include <type_traits>

#include "base/hd.hpp"
#include "base/int_math.hpp"
#include "lean/options.hpp"
#include "schedule/line_shape.hpp"

namespace lean::schedule {

/// In what the line is measured: cost units (shares of equal cost) or outputs (items dealt out one by one).
enum class Measure : std::int32_t { kCost, kOutputs };

/// Whether the row blocks of a causal sequence are summed and found as a stair (TileStair), which changes no number. Not in GPU code
/// but that of many rows, for sm_90a: other kernels have no registers for it, and fewer row blocks where it counts.
#if defined(__CUDA_ARCH__) && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
inline constexpr bool kTakesStairs = false;
#else
inline constexpr bool kTakesStairs = true;
#endif

/// Sums over sequences; adding two is associative, so strips may be summed by any number of threads. TUnits: 64 bits, or 32
/// where a call's capacities bound the whole line (narrow_units()), which is what a GPU computes fast.
template <typename TUnits>
struct BasicLineSums {
  TUnits cost = 0;
  TUnits tiles = 0;
  TUnits outputs = 0;
  std::int32_t max_output_tiles = 0;
  std::int32_t max_tile_cost = 0;  // of outputs that can be cut, their fixed charge spread over their tiles
  TUnits min_output_cost = std::numeric_limits<TUnits>::max();
  TUnits max_output_cost = 0;

  [[nodiscard]] LEAN_HD constexpr BasicLineSums plus(const BasicLineSums& other) const noexcept {
    return {.cost = cost + other.cost,
            .tiles = tiles + other.tiles,
            .outputs = outputs + other.outputs,
            .max_output_tiles = max_of(max_output_tiles, other.max_output_tiles),
            .max_tile_cost = max_of(max_tile_cost, other.max_tile_cost),
            .min_output_cost = min_of(min_output_cost, other.min_output_cost),
            .max_output_cost = max_of(max_output_cost, other.max_output_cost)};
  }

  [[nodiscard]] LEAN_HD constexpr TUnits in(Measure measure) const noexcept { return measure == Measure::kCost ? cost : outputs; }

  [[nodiscard]] LEAN_HD constexpr bool same_costs() const noexcept { return outputs > 0 && min_output_cost == max_output_cost; }
  /// No two outputs' costs differ by more than so many percent of the larger.
  [[nodiscard]] LEAN_HD constexpr bool alike(std::int32_t percent) const noexcept {
    if (percent == 0) return same_costs();
    return outputs > 0 && std::int64_t{max_output_cost - min_output_cost} * 100 <= std::int64_t{max_output_cost} * percent;
  }
  /// All outputs have the same cost and the same tiles: 2 tiles of many rows may cost as much as 8 of few.
  [[nodiscard]] LEAN_HD constexpr bool same_outputs() const noexcept { return same_costs() && tiles == outputs * max_output_tiles; }
};

/// The same of a stair line, and what tells how level it can be dealt out (level_line.hpp).
template <typename TUnits>
struct BasicStairSums : BasicLineSums<TUnits> {
  TUnits key_tiles = 0;      // of K and V, however many row blocks read them
  TUnits max_pair_cost = 0;  // of a head's row blocks of most and of fewest tiles together

  [[nodiscard]] LEAN_HD constexpr BasicStairSums plus(const BasicStairSums& other) const noexcept {
    return {BasicLineSums<TUnits>::plus(other), key_tiles + other.key_tiles, max_of(max_pair_cost, other.max_pair_cost)};
  }
};

/// One output and where it lies on the line.
template <typename TUnits>
struct BasicOutput {
  std::int64_t sequence = 0;
  std::int32_t kv_head = 0;
  std::int32_t row_block = 0;
  std::int32_t rows = 0;        // packed rows of this row block
  std::int32_t first_tile = 0;  // number of its first tile: tiles before it are seen by none of its rows
  std::int32_t tiles = 0;       // >= 1
  std::int32_t tile_cost = 0;   // units of one of its tiles
  TUnits cost = 0;              // units of the whole output
  TUnits begin = 0;             // place on the line, in the line's measure
  TUnits sequence_begin = 0;    // place where its sequence begins
};

using LineSums = BasicLineSums<std::int64_t>;
using Output = BasicOutput<std::int64_t>;

/// Whether every number of the schedule of a call with these capacities and this many workers fits 31 bits.
[[nodiscard]] constexpr bool narrow_units(std::int64_t outputs, std::int64_t kv_capacity, const LineShape& shape,
                                          const CostModel& model, std::int32_t workers) noexcept {
  const std::int64_t tiles = ceil_div(kv_capacity, shape.tile_tokens) + 1;
  const std::int64_t output = model.segment_units + tiles * model.tile_cost(shape.q_rows);
  const std::int64_t room = INT32_MAX - std::int64_t{workers} * workers;
  return room > 0 && output <= room / (model.segment_units + 1) && outputs <= room / max_of(output, Policy::kMaxSplits);
}

/// What lies on the line: the work of every sequence, and its measure. A small value, without the strips.
/// `TLengths` is callable: sequence index -> Sequence (problem/sequence.hpp) or anything with q_tokens and kv_tokens().
template <typename TLengths, typename TUnits = std::int64_t, typename TShape = LineShape>
class LineRules {
 public:
  using Lengths = TLengths;
  using Units = TUnits;
  using Sums = std::conditional_t<TShape::kStair, BasicStairSums<TUnits>, BasicLineSums<TUnits>>;
  using Output = BasicOutput<TUnits>;

  LEAN_HD constexpr LineRules(const TLengths& lengths, const TShape& shape, const CostModel& cost_model, Measure measure) noexcept
      : lengths_(lengths), shape_(shape), cost_model_(cost_model), measure_(measure) {}

  /// Sums of the sequences [begin, end), as far as they exist.
  [[nodiscard]] LEAN_HD constexpr Sums sum_sequences(std::int64_t begin, std::int64_t end) const noexcept {
    Sums sums;
    for (std::int64_t b = begin; b < min_of(end, shape_.batch); ++b) sums = sums.plus(sum_sequence(work_of(b)));
    return sums;
  }

  [[nodiscard]] LEAN_HD constexpr Sums sum_sequence(const SequenceWork& work) const noexcept {
    Sums sums = sum_head(work);
    sums.cost *= shape_.kv_heads;
    sums.tiles *= shape_.kv_heads;
    sums.outputs *= shape_.kv_heads;
    if constexpr (TShape::kStair) sums.key_tiles *= shape_.kv_heads;
    return sums;
  }

  [[nodiscard]] LEAN_HD constexpr const TLengths& lengths() const noexcept { return lengths_; }
  [[nodiscard]] LEAN_HD constexpr const TShape& shape() const noexcept { return shape_; }
  [[nodiscard]] LEAN_HD constexpr const CostModel& cost_model() const noexcept { return cost_model_; }

  [[nodiscard]] LEAN_HD constexpr Output make_output(Output output, const SequenceWork& work) const noexcept {
    output.rows = shape_.rows_in(work, output.row_block);
    const TileSpan tiles = shape_.tiles_of(work, output.row_block);
    output.first_tile = tiles.first;
    output.tiles = tiles.count;
    output.tile_cost = cost_model_.tile_cost(output.rows);
    output.cost = cost_model_.segment_units + TUnits{output.tiles} * output.tile_cost;
    return output;
  }

  /// Units of so many full row blocks of so many tiles together, and of the first `blocks` of a stair.
  [[nodiscard]] LEAN_HD constexpr TUnits stair_cost(std::int32_t blocks, TUnits tiles) const noexcept {
    const TUnits tile_cost = cost_model_.tile_cost(shape_.q_rows);
    return TUnits{blocks} * cost_model_.segment_units + tiles * tile_cost;
  }
  template <typename TStair>
  [[nodiscard]] LEAN_HD constexpr TUnits stair_cost(const TStair& stair, std::int32_t blocks) const noexcept {
    return stair_cost(blocks, static_cast<TUnits>(stair.tiles_before(blocks)));
  }

  /// The last of a stair's row blocks that begins at or before a place in its head, found by halving.
  template <typename TStair>
  [[nodiscard]] LEAN_HD constexpr std::int32_t stair_block(const TStair& stair, std::int32_t blocks, TUnits place) const noexcept {
    std::int32_t low = 0;
    for (std::int32_t high = blocks - 1; low < high;) {
      const std::int32_t middle = (low + high + 1) >> 1;
      const TUnits begin = measure_ == Measure::kCost ? stair_cost(stair, middle) : TUnits{middle};
      if (begin <= place) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    return low;
  }

 protected:
  [[nodiscard]] LEAN_HD constexpr SequenceWork work_of(std::int64_t sequence) const noexcept {
    return schedule::work_of(lengths_(sequence));
  }

  [[nodiscard]] LEAN_HD constexpr std::int32_t spread_tile_cost(const Output& output) const noexcept {
    const std::int32_t charge = cost_model_.segment_units;
    if (output.tiles <= 1) return 0;
    if (output.tiles >= charge) return output.tile_cost + (charge > 0 ? 1 : 0);
    return output.tile_cost + quotient(charge + output.tiles - 1, output.tiles);
  }

  /// So many outputs like that of a row block.
  [[nodiscard]] LEAN_HD constexpr Sums sum_block(const SequenceWork& work, std::int32_t block, std::int32_t copies) const noexcept {
    const Output output = make_output({.row_block = block}, work);
    return {.cost = output.cost * copies,
            .tiles = TUnits{output.tiles} * copies,
            .outputs = copies,
            .max_output_tiles = output.tiles,
            .max_tile_cost = spread_tile_cost(output),
            .min_output_cost = output.cost,
            .max_output_cost = output.cost};
  }

  /// One kv head of the sequence: the loop at the end, in fewer instructions where a shape is known to be simple.
  [[nodiscard]] LEAN_HD constexpr Sums sum_head(const SequenceWork& work) const noexcept {
    const std::int32_t blocks = shape_.row_blocks(work);
    if constexpr (TShape::kOneBlock) {
      return blocks == 0 ? Sums{} : sum_block(work, 0, 1);
    } else if constexpr (TShape::kStair) {
      return blocks == 0 ? Sums{} : sum_stair(shape_.stair_of(work), blocks);
    } else {
      if constexpr (kTakesStairs) {
        if (blocks >= kLongStair) {
          if (const TileStair stair = shape_.stair_of(work); stair.width > 0) {
            return sum_stair(stair, blocks - 1).plus(sum_block(work, blocks - 1, 1));
          }
        }
      }
      Sums head;
      for (std::int32_t block = 0; block < blocks; ++block) {
        // Full blocks of a sequence without limits are alike: sum the first, and the last, which may be shorter.
        const bool skip = shape_.same_tiles_in_all_blocks(work) && block > 0 && block < blocks - 1;
        const std::int32_t copies = skip ? blocks - 1 - block : 1;
        head = head.plus(sum_block(work, block, copies));
        block += copies - 1;
      }
      return head;
    }
  }

  /// Blocks of a sequence: fewer are as soon summed one by one.
  static constexpr std::int32_t kLongStair = 4;

  /// What sum_block() says of each of a stair's full row blocks, added up.
  template <typename TStair>
  [[nodiscard]] LEAN_HD constexpr Sums sum_stair(const TStair& stair, std::int32_t blocks) const noexcept {
    const std::int32_t tile_cost = cost_model_.tile_cost(shape_.q_rows);
    const std::int32_t charge = cost_model_.segment_units;
    const auto cost_of = [&](std::int32_t tiles) { return charge + TUnits{tiles} * tile_cost; };
    const std::int32_t fewest = stair.tiles(0);
    const std::int32_t most = stair.tiles(blocks - 1);
    const auto tiles = static_cast<TUnits>(stair.tiles_before(blocks));
    // The fewer tiles an output has, the more of its fixed charge each takes; one of a single tile is not cut.
    const std::int32_t cut = stair.fewest_cut(fewest, most);
    const BasicLineSums<TUnits> sums{.cost = stair_cost(blocks, tiles),
                                     .tiles = tiles,
                                     .outputs = blocks,
                                     .max_output_tiles = most,
                                     .max_tile_cost = spread_tile_cost({.tiles = cut, .tile_cost = tile_cost}),
                                     .min_output_cost = cost_of(fewest),
                                     .max_output_cost = cost_of(most)};
    if constexpr (TShape::kStair) {
      return {sums, most, cost_of(fewest) + cost_of(most)};
    } else {
      return sums;
    }
  }

  TLengths lengths_;
  TShape shape_;
  CostModel cost_model_;
  Measure measure_;
};

template <typename TLengths, typename TUnits = std::int64_t>
class WorkLine : public LineRules<TLengths, TUnits> {
 public:
  using Rules = LineRules<TLengths, TUnits>;
  using Rules::Rules;
  using typename Rules::Output;
  using typename Rules::Sums;
  static constexpr std::int32_t kStrips = 256;

  [[nodiscard]] LEAN_HD constexpr std::int64_t sequences_per_strip() const noexcept { return ceil_div(shape_.batch, kStrips); }

  /// Sums of the sequences of one strip.
  [[nodiscard]] LEAN_HD constexpr Sums sum_strip(std::int32_t strip) const noexcept {
    return this->sum_sequences(strip * sequences_per_strip(), (strip + 1) * sequences_per_strip());
  }

  /// Host form of the build: sums every strip in turn.
  constexpr void build() noexcept {
    sums_ = {};
    for (std::int32_t strip = 0; strip < kStrips; ++strip) {
      strip_begin_[strip] = sums_.in(measure_);
      sums_ = sums_.plus(sum_strip(strip));
    }
  }

  /// Device form: the caller's threads sum the strips, then set where each begins and the whole line's sums.
  LEAN_HD constexpr void set_strip_begin(std::int32_t strip, TUnits begin) noexcept { strip_begin_[strip] = begin; }
  [[nodiscard]] LEAN_HD constexpr TUnits strip_begin(std::int32_t strip) const noexcept { return strip_begin_[strip]; }
  LEAN_HD constexpr void set_sums(const Sums& sums) noexcept { sums_ = sums; }

  [[nodiscard]] LEAN_HD constexpr const Sums& sums() const noexcept { return sums_; }
  [[nodiscard]] LEAN_HD constexpr TUnits total() const noexcept { return sums_.in(measure_); }

  /// The output that covers `place`, for 0 <= place < total().
  [[nodiscard]] LEAN_HD constexpr Output locate(TUnits place) const noexcept { return locate(place, {}); }

  /// The output that covers `place`; no sequence before that of `from`, which covers an earlier place, is looked at again.
  [[nodiscard]] LEAN_HD LEAN_OUTLINE constexpr Output locate(TUnits place, const Output& from) const noexcept {
    std::int32_t low = 0;
    auto high = static_cast<std::int32_t>(min_of<std::int64_t>(shape_.batch, kStrips)) - 1;  // strips beyond are empty
    while (low < high) {  // the last strip that begins at or before `place`
      const std::int32_t middle = (low + high + 1) / 2;
      if (strip_begin_[middle] <= place) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    const bool onward = from.sequence > low * sequences_per_strip();
    TUnits begin = onward ? from.sequence_begin : strip_begin_[low];
    std::int64_t b = onward ? from.sequence : low * sequences_per_strip();
    SequenceWork work = work_of(b);
    for (TUnits measure = sum_sequence(work).in(measure_); place >= begin + measure; measure = sum_sequence(work).in(measure_)) {
      begin += measure;
      work = work_of(++b);
    }
    return locate_in_sequence(b, work, begin, place);
  }

  /// The output after `output` on the line; false at the line's end.
  LEAN_HD LEAN_OUTLINE constexpr bool advance(Output& output) const noexcept {
    const TUnits next_begin = output.begin + (measure_ == Measure::kCost ? output.cost : 1);
    if (next_begin >= total()) return false;
    SequenceWork work = work_of(output.sequence);
    std::int64_t sequence = output.sequence;
    TUnits sequence_begin = output.sequence_begin;
    std::int32_t kv_head = output.kv_head;
    std::int32_t row_block = output.row_block + 1;
    if (row_block == shape_.row_blocks(work)) {
      row_block = 0;
      ++kv_head;
    }
    if (kv_head == shape_.kv_heads) {
      kv_head = 0;
      sequence_begin = next_begin;
      do work = work_of(++sequence);
      while (work.q_tokens == 0);
    }
    output = make_output(
        {.sequence = sequence, .kv_head = kv_head, .row_block = row_block, .begin = next_begin, .sequence_begin = sequence_begin},
        work);
    return true;
  }

 private:
  /// A row block and where it begins in its head.
  struct Place {
    std::int32_t block = 0;
    TUnits begin = 0;
  };

  /// A block at or before that of a place in a head: of a stair that itself.
  [[nodiscard]] LEAN_HD constexpr Place place_in_head(const SequenceWork& work, TUnits place) const noexcept {
    const std::int32_t blocks = shape_.row_blocks(work);
    if (!kTakesStairs || blocks < Rules::kLongStair) return {};
    const TileStair stair = shape_.stair_of(work);
    if (stair.width == 0) return {};
    const std::int32_t block = this->stair_block(stair, blocks, place);
    return {block, measure_ == Measure::kCost ? this->stair_cost(stair, block) : TUnits{block}};
  }

  using Rules::make_output;
  using Rules::measure_;
  using Rules::shape_;
  using Rules::sum_head;
  using Rules::sum_sequence;
  using Rules::work_of;

  [[nodiscard]] LEAN_HD constexpr Output locate_in_sequence(std::int64_t sequence, const SequenceWork& work, TUnits begin,
                                                            TUnits place) const noexcept {
    const TUnits head_measure = sum_head(work).in(measure_);
    const auto kv_head = static_cast<std::int32_t>(quotient(place - begin, head_measure));
    const TUnits head_begin = begin + kv_head * head_measure;
    const Place first = place_in_head(work, place - head_begin);
    Output output = make_output({.sequence = sequence,
                                 .kv_head = kv_head,
                                 .row_block = first.block,
                                 .begin = head_begin + first.begin,
                                 .sequence_begin = begin},
                                work);
    while (true) {
      const TUnits end = output.begin + (measure_ == Measure::kCost ? output.cost : 1);
      if (place < end) return output;
      output.begin = end;
      ++output.row_block;
      output = make_output(output, work);
    }
  }

  Sums sums_;
  TUnits strip_begin_[kStrips] = {};
};

}  // namespace lean::schedule
