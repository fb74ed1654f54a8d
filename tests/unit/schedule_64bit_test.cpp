// Lines of 2^40 tokens and more, whose lengths are computed when asked for: every place on them is found without a
// product that wraps, checked in 128 bits and, for one line, by the compiler (overflow is an error in a constant).
#include <gtest/gtest.h>

#include <cstdint>

#include "problem/sequence.hpp"
#include "schedule/plan.hpp"
#include "schedule/segments.hpp"
#include "schedule/work_line.hpp"

namespace lean::schedule {
namespace {

__extension__ using Int128 = __int128;

/// Sequence b has kBase - b x 7919 % 10007 tokens.
template <std::int32_t kBase>
struct ComputedLengths {
  [[nodiscard]] constexpr Sequence operator()(std::int64_t sequence) const noexcept {
    return {.q_tokens = 1, .kv_end = kBase - static_cast<std::int32_t>(sequence * 7919 % 10007)};
  }
};

template <typename TLengths>
void expect_exact(const LineShape& shape, const CostModel& model, std::int32_t workers) {
  WorkLine<TLengths> line(TLengths{}, shape, model, Measure::kCost);
  line.build();
  Int128 tokens = 0;
  Int128 tiles = 0;
  Int128 cost = 0;
  for (std::int64_t b = 0; b < shape.batch; ++b) {
    const Int128 n = TLengths{}(b).kv_tokens();
    const Int128 t = (n + shape.tile_tokens - 1) / shape.tile_tokens;
    tokens += n * shape.kv_heads;
    tiles += t * shape.kv_heads;
    cost += (t * model.tile_units + model.segment_units) * shape.kv_heads;
  }
  ASSERT_GE(tokens, Int128{1} << 40);
  ASSERT_TRUE(line.sums().tiles == tiles && line.sums().cost == cost);

  const Plan plan = make_plan(line.sums(), Policy::lean(), model, shape.tile_tokens, workers);
  ASSERT_EQ(plan.workers, workers);
  std::int64_t sequence = 0;  // of the boundary, walked along with it
  Int128 sequence_begin = 0;
  for (std::int64_t step = 0; step < 97; ++step) {
    const auto worker = static_cast<std::int32_t>(step * (workers - 1) / 96);
    const Int128 place = cost * worker / workers;
    const auto head_cost = [&](std::int64_t b) {
      return Int128{(TLengths{}(b).kv_tokens() + static_cast<std::int64_t>(shape.tile_tokens) - 1) / shape.tile_tokens} *
                 model.tile_units +
             model.segment_units;
    };
    while (sequence_begin + head_cost(sequence) * shape.kv_heads <= place) sequence_begin += head_cost(sequence++) * shape.kv_heads;
    const Int128 head = (place - sequence_begin) / head_cost(sequence);
    const Int128 into_head = place - sequence_begin - head * head_cost(sequence);
    const Int128 charge = into_head * model.segment_units / head_cost(sequence);
    const Int128 tile = (into_head - charge) / model.tile_units;

    SegmentCursor cursor(line, plan, worker);
    ASSERT_TRUE(cursor.next());
    ASSERT_EQ(cursor.segment().output.sequence, sequence) << "worker " << worker;
    ASSERT_TRUE(cursor.segment().output.kv_head == head) << "worker " << worker;
    ASSERT_TRUE(cursor.segment().tile_begin == tile) << "worker " << worker;
  }
}

TEST(Schedule64Bit, R20_PlacesAreExactAt2To40Tokens) {
  using Lengths = ComputedLengths<(1 << 24) + 10'007>;
  const LineShape shape = {.batch = 65'536, .kv_heads = 1, .group = 8, .q_rows = 16, .tile_tokens = 1};
  for (const std::int32_t workers : {132, 65'537, 1'000'003}) {
    expect_exact<Lengths>(shape, CostModel::plain(), workers);
    expect_exact<Lengths>(shape, {.tile_units = 16, .segment_units = 24}, workers);
  }
}

TEST(Schedule64Bit, R20_PlacesAreExactForTheLargestLine) {  // 2^54 tokens, 2^58 cost units
  const LineShape shape = {.batch = 65'536, .kv_heads = 128, .group = 1, .q_rows = 16, .tile_tokens = 1};
  for (const std::int32_t workers : {131, 2'147'483'647}) {
    expect_exact<ComputedLengths<INT32_MAX>>(shape, {.tile_units = 16, .segment_units = 24}, workers);
  }
}

TEST(Schedule64Bit, R20_ItemsAreExactFor2To38Outputs) {
  using Lengths = ComputedLengths<(1 << 24) + 10'007>;
  const LineShape shape = {.batch = 65'536, .kv_heads = 1 << 22, .group = 1, .q_rows = 16, .tile_tokens = 1};
  WorkLine<Lengths> line(Lengths{}, shape, CostModel::plain(), Measure::kOutputs);
  line.build();
  ASSERT_EQ(line.total(), std::int64_t{1} << 38);
  const Plan plan = make_plan(line.sums(), Policy::fixed_split(128), CostModel::plain(), shape.tile_tokens, 2'147'483'647);
  SegmentCursor cursor(line, plan, plan.workers - 1);
  ASSERT_TRUE(cursor.next());
  EXPECT_EQ(cursor.segment().output.begin, (std::int64_t{1} << 31) / 128 - 1);
  EXPECT_EQ(slot_count(plan, line.total()), std::int64_t{1} << 45);
}

/// Neighbouring workers meet at the same tile, all along a line of 2^40 tokens.
constexpr bool neighbours_meet() {
  using Lengths = ComputedLengths<INT32_MAX>;
  WorkLine<Lengths> line(Lengths{}, {.batch = 513, .kv_heads = 1, .group = 1, .q_rows = 1, .tile_tokens = 1},
                         {.tile_units = 16, .segment_units = 24}, Measure::kCost);
  line.build();
  if (line.sums().tiles < std::int64_t{1} << 40) return false;
  const Plan plan = make_plan(line.sums(), Policy::lean(), line.cost_model(), 1, 132);
  Segment last;
  for (std::int32_t worker = 0; worker < plan.workers; ++worker) {
    for (SegmentCursor cursor(line, plan, worker); cursor.next(); last = cursor.segment()) {
      const Segment& segment = cursor.segment();
      const bool goes_on = worker > 0 && segment.output.begin == last.output.begin;
      if (segment.tile_begin != (goes_on ? last.tile_end : 0)) return false;
      if (!goes_on && worker > 0 && last.tile_end != last.output.tiles) return false;
    }
  }
  return last.tile_end == last.output.tiles && last.output.sequence == 512;
}
static_assert(neighbours_meet());

TEST(Schedule64Bit, R20_NeighboursMeetOnALineOf2To40TokensAtCompileTime) { EXPECT_TRUE(neighbours_meet()); }

}  // namespace
}  // namespace lean::schedule
