// The even stair line: sequences with as many queries and keys each, whose row blocks are no more than the workers and are each cut
// into as many equal parts or left whole, one a worker, so that a worker has one segment and knows it without a walk. That is a chunk of one
// sequence, or of several alike, and what precedes its first copy is a fifth of a short call: on an H100 64 tokens of 8k took 48 us, 12 of
// them until a worker knew its segment (docs/notebook/chunks-prefill-append.md). Plan, cuts and slots are make_stair_plan()'s and
// StairCursor's; a test holds the two against each other.
#pragma once

#include <cstdint>

#include "base/hd.hpp"
#include "base/int_math.hpp"
#include "schedule/level_line.hpp"
#include "schedule/line_shape.hpp"
#include "schedule/segments.hpp"
#include "schedule/work_line.hpp"

namespace lean::schedule {

/// What is known of it before the keys are counted.
struct EvenStair {
  std::int32_t outputs = 0;  // row blocks of all kv heads; 0: no line of the call is taken as even
  std::int32_t workers = 0;  // the grid
  Divisor parts;             // of an output, where it has tiles for them
  Divisor blocks;            // of a kv head
  Divisor kv_heads;
};

/// Parts of an output of such a stair: as many as there are workers for, or one; 0: it is not dealt out so. What holds() asks for, but
/// for long K and V (make_stair_plan()): no part is longer than an equal share and what cuts anywhere cost more, and the shortest output
/// has a tile for each part.
template <typename TStair>
LEAN_HD [[nodiscard]] constexpr std::int32_t even_parts(const EvenStair& line, const TStair& stair,
                                                        const CostModel& model) noexcept {
  const std::int32_t blocks = line.blocks.value();
  const std::int32_t parts = line.parts.value();
  const std::int32_t most_tiles = stair.tiles(blocks - 1);
  const std::int64_t cost = std::int64_t{line.outputs} * model.segment_units +
                            std::int64_t{quotient(line.outputs, line.blocks)} * stair.tiles_before(blocks) * model.tile_units;
  const auto holds = [&](std::int32_t tiles, std::int32_t saved_units) {
    const std::int32_t longest = tiles * model.tile_units + model.segment_units;
    return std::int64_t{longest - model.cut_units - saved_units} * line.workers <= cost;
  };
  const std::int32_t part_tiles = quotient(most_tiles + parts - 1, line.parts);
  const bool whole = (most_tiles - part_tiles) * model.tile_units <= model.whole_units;
  if (!whole && stair.tiles(0) >= parts && holds(part_tiles, 0)) return parts;
  return holds(most_tiles, model.whole_units) ? 1 : 0;
}

/// `work`: of each sequence, of as many keys as there is room for: nothing is known of a line that is not even then. For policy lean.
[[nodiscard]] constexpr EvenStair even_stair_of(const LineShape& shape, const SequenceWork& work, std::int32_t workers,
                                                const CostModel& model) noexcept {
  const std::int64_t blocks = shape.row_blocks(work);
  const std::int64_t outputs = shape.batch * shape.kv_heads * blocks;
  if (outputs < 1 || outputs > workers || model.cut_units == 0 || model.row_units != 0) return {};
  if (model.part_tiles > 1 && workers / outputs > kOneLevelParts) return {};  // parts may be fewer
  const EvenStair line{.outputs = static_cast<std::int32_t>(outputs),
                       .workers = workers,
                       .parts = Divisor(workers / static_cast<std::int32_t>(outputs)),
                       .blocks = Divisor(static_cast<std::int32_t>(blocks)),
                       .kv_heads = Divisor(shape.kv_heads)};
  return even_parts(line, shape.steep_stair_of(work), model) > 0 ? line : EvenStair{};
}

/// Finds a worker's one segment, and who shares its output; of a worker beyond the last one of no tiles. False: the line is not dealt out
/// so, and has to be walked. `work`: of every sequence. Of the output's place on the line nothing is said.
template <typename TRules>
LEAN_HD [[nodiscard]] constexpr bool find_even_segment(const EvenStair& line, const TRules& rules, const SequenceWork& work,
                                                       std::int32_t worker, BasicSegment<std::int32_t>& segment) noexcept {
  const auto stair = rules.shape().stair_of(work);
  const std::int32_t parts = even_parts(line, stair, rules.cost_model());
  if (parts == 0) return false;
  const std::int32_t blocks = line.blocks.value();
  const std::int32_t output = parts == 1 ? worker : quotient(worker, line.parts);
  segment.contributor = worker - output * parts;
  segment.contributors = parts;
  segment.slots = slots_from(output * parts);
  const std::int32_t head = quotient(output, line.blocks);
  segment.output.row_block = level_block(output - head * blocks, blocks);
  segment.output.sequence = quotient(head, line.kv_heads);
  segment.output.kv_head = head - static_cast<std::int32_t>(segment.output.sequence) * line.kv_heads.value();
  segment.output.rows = rules.shape().rows_in(work, segment.output.row_block);
  segment.output.first_tile = 0;
  segment.output.tiles = stair.tiles(segment.output.row_block);
  const auto cut = [&](std::int32_t part) {
    return parts == 1 ? part * segment.output.tiles : quotient(part * segment.output.tiles, line.parts);
  };
  segment.tile_begin = cut(segment.contributor);
  segment.tile_end = cut(segment.contributor + 1);
  if (output >= line.outputs) segment.tile_end = segment.tile_begin;
  return true;
}

}  // namespace lean::schedule
