// The flat line: every kv head of a sequence is one output (its rows fit a row block), and the policy cuts the line. That is every
// decode step, so a GPU walks it by these few instructions instead of WorkLine's and SegmentCursor's general ones: code that runs
// once costs a GPU its fetching. The rules, the plan and the cuts are the same; a test walks both.
#pragma once

#include <cstdint>
#include <utility>

#include "base/hd.hpp"
#include "base/int_math.hpp"
#include "schedule/even_line.hpp"
#include "schedule/plan.hpp"
#include "schedule/segments.hpp"
#include "schedule/work_line.hpp"

namespace lean::schedule {

/// Where sequence `sequence` begins on the line.
template <typename TUnits>
struct SequencePlace {
  std::int64_t sequence = 0;
  TUnits begin = 0;
};

/// Walks the segments of one worker, as SegmentCursor does. TRules: LineRules with a OneBlockShape, in cost units.
template <typename TRules>
class FlatCursor {
 public:
  using Units = typename TRules::Units;
  using Lengths = decltype(std::declval<const typename TRules::Lengths&>()(std::int64_t{}));
  using Range = typename LineShare<Units>::Range;

  /// `range`: the worker's share; `start`: any sequence that begins at or before it, and its lengths. A worker beyond the plan's
  /// has no segment.
  LEAN_HD constexpr FlatCursor(const TRules& rules, const BasicPlan<Units>& plan, std::int32_t worker, const Range& range,
                               const SequencePlace<Units>& start, const Lengths& lengths) noexcept
      : rules_(rules), share_(rules.cost_model(), plan, worker, range), sequence_end_(start.begin), place_(share_.begin()) {
    enter(start.sequence, lengths);
    if (worker >= plan.workers) place_ = share_.end();
  }

  /// A worker of an even line: its share is its one segment, and `plan` is not read. `output`: its sequence and kv head;
  /// `lengths`: the sequence's.
  LEAN_HD constexpr FlatCursor(const TRules& rules, const BasicPlan<Units>& plan, const EvenShare& share,
                               const BasicOutput<Units>& output, const Lengths& lengths) noexcept
      : rules_(rules), share_(rules.cost_model(), plan, 0, {}), lengths_(lengths), even_(true) {
    segment_.output = rules.make_output(output, work_of(lengths));
    segment_.tile_begin = share.tile_begin;
    segment_.tile_end = share.tile_end;
    segment_.contributor = share.part;
    segment_.contributors = share.parts;
    segment_.slots = slots_from(share.first_worker());
  }

  LEAN_HD constexpr bool next() noexcept {
    if (!next_run()) return false;
    find_contributors();
    return true;
  }

  LEAN_HD constexpr bool next_run() noexcept {
    BasicOutput<Units>& output = segment_.output;
    if (even_ && place_ == share_.begin()) {
      ++place_;
      return segment_.tile_begin < segment_.tile_end;
    }
    while (place_ < share_.end()) {
      while (place_ >= sequence_end_) enter(output.sequence + 1, rules_.lengths()(output.sequence + 1));
      output.kv_head = quotient(static_cast<std::int32_t>(place_ - output.sequence_begin), static_cast<std::int32_t>(output.cost));
      output.begin = output.sequence_begin + output.kv_head * output.cost;
      place_ = output.begin + output.cost;
      if (share_.own_run(segment_)) return true;
    }
    return false;
  }

  LEAN_HD constexpr void find_contributors() noexcept {
    if (!even_) share_.find_contributors(segment_);
  }

  [[nodiscard]] LEAN_HD constexpr const BasicSegment<Units>& segment() const noexcept { return segment_; }
  /// Whether the worker has nothing to do behind the segment, but for outputs that are as short as what a snap takes.
  [[nodiscard]] LEAN_HD constexpr bool ends_share() const noexcept {
    return even_ || share_.end() - place_ <= share_.plan().snap_units;
  }
  /// The lengths of the segment's sequence.
  [[nodiscard]] LEAN_HD constexpr const Lengths& lengths() const noexcept { return lengths_; }

 private:
  LEAN_HD constexpr void enter(std::int64_t sequence, const Lengths& lengths) noexcept {
    BasicOutput<Units>& output = segment_.output;
    output.sequence = sequence;
    lengths_ = lengths;
    output.sequence_begin = sequence_end_;
    const SequenceWork work = work_of(lengths_);
    if (rules_.shape().row_blocks(work) == 0) return;  // no queries, no outputs
    output = rules_.make_output(output, work);
    sequence_end_ += rules_.shape().kv_heads * output.cost;
  }

  const TRules& rules_;
  LineShare<Units> share_;
  Lengths lengths_;
  Units sequence_end_ = 0;  // of the segment's sequence
  Units place_ = 0;         // where the next output begins; before the first segment, the share
  bool even_ = false;       // the one segment is known
  BasicSegment<Units> segment_;
};

}  // namespace lean::schedule
