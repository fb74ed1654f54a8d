// What a schedule must be, found the plain way: every output listed one by one, every row asked what it sees, every
// segment of every worker written down and compared. Used by the schedule tests.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <sstream>
#include <string>
#include <tuple>
#include <vector>

#include "backends/cpu/call_plan.hpp"
#include "backends/cuda/kernel_rows.hpp"
#include "fixup/workspace_size.hpp"
#include "problem/sequence.hpp"
#include "schedule/plan.hpp"
#include "schedule/segments.hpp"
#include "schedule/work_line.hpp"
#include "support/random.hpp"

namespace lean::schedule::checks {

/// Lengths kept in a list.
struct ListedLengths {
  const SequenceWork* works = nullptr;

  [[nodiscard]] Sequence operator()(std::int64_t sequence) const {
    return {.q_tokens = works[sequence].q_tokens, .kv_end = works[sequence].kv_tokens};
  }
};

using ListedLine = WorkLine<ListedLengths>;

struct Case {
  std::vector<SequenceWork> works;
  LineShape shape;  // batch is filled in by Checker
  CostModel model;
};

/// Sequences of one query token with these key/value tokens.
[[nodiscard]] inline std::vector<SequenceWork> decode_of(const std::vector<std::int32_t>& kv_tokens) {
  std::vector<SequenceWork> works;
  for (const std::int32_t tokens : kv_tokens) works.push_back({.q_tokens = 1, .kv_tokens = tokens});
  return works;
}

/// Windows and causal limits of every kind, and none.
[[nodiscard]] inline Reach random_reach(support::Stream& random) {
  const auto side = [&random] {
    return static_cast<std::int32_t>(random.chance(50) ? random.between(0, 12) : random.between(0, 300));
  };
  return {.left = random.chance(40) ? side() : -1, .right = random.chance(50) ? 0 : (random.chance(20) ? side() : -1)};
}

/// The tiles of an output: from the first that holds a key which one of its rows sees to the last; one if there is none.
[[nodiscard]] inline TileSpan seen_tiles(const LineShape& shape, const SequenceWork& work, std::int64_t row_begin,
                                         std::int64_t row_end) {
  std::int64_t first_key = work.kv_tokens;
  std::int64_t last_key = -1;
  for (std::int64_t row = row_begin; row < row_end; ++row) {
    const std::int64_t position = work.kv_tokens - work.q_tokens + row / shape.group;  // of the query among the keys
    const std::int64_t begin = shape.reach.left < 0 ? 0 : std::max<std::int64_t>(0, position - shape.reach.left);
    const std::int64_t last =
        shape.reach.right < 0 ? work.kv_tokens - 1 : std::min<std::int64_t>(work.kv_tokens - 1, position + shape.reach.right);
    if (begin > last) continue;
    first_key = std::min(first_key, begin);
    last_key = std::max(last_key, last);
  }
  if (last_key < 0) return {};
  const auto first = static_cast<std::int32_t>(first_key / shape.tile_tokens);
  return {.first = first, .count = static_cast<std::int32_t>(last_key / shape.tile_tokens) - first + 1};
}

[[nodiscard]] inline std::vector<Output> expected_outputs(const Case& c, Measure measure) {
  std::vector<Output> outputs;
  std::int64_t begin = 0;
  for (std::size_t b = 0; b < c.works.size(); ++b) {
    const std::int64_t rows = static_cast<std::int64_t>(c.works[b].q_tokens) * c.shape.group;
    for (std::int32_t head = 0; head < c.shape.kv_heads; ++head) {
      std::int32_t block = 0;
      for (std::int64_t row = 0; row < rows; row += c.shape.q_rows, ++block) {
        Output output = {.sequence = static_cast<std::int64_t>(b), .kv_head = head, .row_block = block, .begin = begin};
        const std::int64_t row_end = std::min(rows, row + c.shape.q_rows);
        output.rows = static_cast<std::int32_t>(row_end - row);
        const TileSpan tiles = seen_tiles(c.shape, c.works[b], row, row_end);
        output.first_tile = tiles.first;
        output.tiles = tiles.count;
        const std::int32_t paid_rows = std::max(0, output.rows - c.model.free_rows);
        output.tile_cost = c.model.tile_units + paid_rows * c.model.row_units;
        output.cost = c.model.segment_units + std::int64_t{output.tiles} * output.tile_cost;
        begin += measure == Measure::kCost ? output.cost : 1;
        outputs.push_back(output);
      }
    }
  }
  return outputs;
}

/// Builds the line of a case once and checks plans on it.
class Checker {
 public:
  Checker(Case c, Measure measure)
      : case_(std::move(c)), line_(ListedLengths{case_.works.data()}, with_batch(), case_.model, measure) {
    line_.build();
    outputs_ = expected_outputs(case_, measure);
    std::int64_t output = 0;
    for (const SequenceWork& work : case_.works) {
      first_output_.push_back(output);
      output += static_cast<std::int64_t>(blocks_of(work)) * case_.shape.kv_heads;
    }
  }
  Checker(const Checker&) = delete;
  Checker& operator=(const Checker&) = delete;

  [[nodiscard]] const ListedLine& line() const { return line_; }
  [[nodiscard]] const std::vector<Output>& outputs() const { return outputs_; }
  [[nodiscard]] Plan plan(const Policy& policy, std::int32_t grid) const {
    return make_plan(line_.sums(), policy, case_.model, case_.shape.tile_tokens, grid);
  }

  /// What is wrong with the schedule of `policy` on `grid` workers: empty when every tile of every output is owned exactly once,
  /// neighbours agree, contributors and slots are as segments.hpp says, slots fit the workspace, and workers beyond the plan have
  /// nothing.
  [[nodiscard]] std::string fault(const Policy& policy, std::int32_t grid) {
    const Plan plan = this->plan(policy, grid);
    if (plan.workers < 1 || plan.workers > grid) return "plan.workers outside [1, grid]" + words(policy, grid);
    if (const char* problem = walk(plan, grid); problem != nullptr) return problem + words(policy, grid);
    if (const char* problem = compare(plan, policy, grid); problem != nullptr) return problem + words(policy, grid);
    return {};
  }

  // What the last fault() call counted, by worker of the plan.
  [[nodiscard]] const std::vector<std::int64_t>& worker_tiles() const { return worker_tiles_; }
  [[nodiscard]] const std::vector<std::int64_t>& worker_cost() const { return worker_cost_; }
  [[nodiscard]] const std::vector<std::int64_t>& worker_segments() const { return worker_segments_; }

  /// A segment as written down; ordered by output and contributor.
  struct Entry {
    std::int64_t output;
    std::int32_t contributor;
    std::int32_t contributors;
    std::int64_t tile_begin;
    std::int64_t tile_end;
    std::int64_t slot;
    std::int64_t first_slot;
    std::int32_t worker;

    [[nodiscard]] bool operator<(const Entry& other) const {
      return std::tie(output, contributor) < std::tie(other.output, other.contributor);
    }
  };
  [[nodiscard]] const std::vector<Entry>& entries() const { return entries_; }

 private:
  [[nodiscard]] LineShape with_batch() {
    case_.shape.batch = static_cast<std::int64_t>(case_.works.size());
    return case_.shape;
  }
  [[nodiscard]] std::int32_t blocks_of(const SequenceWork& work) const {
    return (work.q_tokens * case_.shape.group + case_.shape.q_rows - 1) / case_.shape.q_rows;
  }

  [[nodiscard]] const char* walk(const Plan& plan, std::int32_t grid) {
    entries_.clear();
    worker_tiles_.assign(static_cast<std::size_t>(plan.workers), 0);
    worker_cost_.assign(static_cast<std::size_t>(plan.workers), 0);
    worker_segments_.assign(static_cast<std::size_t>(plan.workers), 0);
    for (std::int32_t worker = 0; worker < plan.workers; ++worker) {
      const auto w = static_cast<std::size_t>(worker);
      for (SegmentCursor cursor(line_, plan, worker); cursor.next();) {
        const Segment& segment = cursor.segment();
        const std::int64_t tiles = segment.tile_end - segment.tile_begin;
        if (tiles <= 0) return "a segment without tiles";
        const std::int64_t output = index_of(segment.output);
        if (output < 0 || !same(segment.output, outputs_[static_cast<std::size_t>(output)]))
          return "an output the problem does not have";
        entries_.push_back({.output = output,
                            .contributor = segment.contributor,
                            .contributors = segment.contributors,
                            .tile_begin = segment.tile_begin,
                            .tile_end = segment.tile_end,
                            .slot = segment.slots.slot(segment.contributor),
                            .first_slot = segment.slots.first,
                            .worker = worker});
        worker_tiles_[w] += tiles;
        worker_cost_[w] += case_.model.segment_units + tiles * segment.output.tile_cost;
        ++worker_segments_[w];
      }
    }
    for (std::int32_t worker = plan.workers; worker < std::min(grid, plan.workers + 3); ++worker) {
      if (SegmentCursor(line_, plan, worker).next()) return "a worker beyond the plan has work";
    }
    return nullptr;
  }

  [[nodiscard]] const char* compare(const Plan& plan, const Policy& policy, std::int32_t grid) {
    if (!std::is_sorted(entries_.begin(), entries_.end())) std::sort(entries_.begin(), entries_.end());
    const auto outputs = static_cast<std::int64_t>(outputs_.size());
    const std::int64_t slots = std::min(slot_count(plan, outputs), fixup::slot_capacity(policy, outputs, grid));
    slot_used_.assign(static_cast<std::size_t>(slots), false);
    std::size_t entry = 0;
    for (std::size_t o = 0; o < outputs_.size(); ++o) {
      std::int64_t owned_end = 0;
      std::int32_t contributors = 0;
      const std::size_t first = entry;
      for (; entry < entries_.size() && entries_[entry].output == static_cast<std::int64_t>(o); ++entry, ++contributors) {
        const Entry& e = entries_[entry];
        if (e.tile_begin < owned_end) return "a tile owned twice";
        if (e.tile_begin > owned_end) return "a tile owned by nobody";
        if (e.contributor != contributors) return "contributors not numbered in order";
        if (e.contributors != entries_[first].contributors) return "contributors disagree on how many they are";
        if (e.first_slot != entries_[first].first_slot) return "contributors disagree on the output's first slot";
        owned_end = e.tile_end;
        if (e.contributors > 1 && !take_slot(e.slot)) return "a slot out of range or used twice";
      }
      if (owned_end != outputs_[o].tiles) return "an output's last tiles owned by nobody, or too many";
      if (contributors != entries_[first].contributors) return "fewer contributors than announced";
      if (contributors > 1 && entries_[first].slot != entries_[first].first_slot) return "the host's slot is not the first";
    }
    return entry == entries_.size() ? nullptr : "segments of no output";
  }

  [[nodiscard]] bool take_slot(std::int64_t slot) {
    if (slot < 0 || slot >= static_cast<std::int64_t>(slot_used_.size()) || slot_used_[static_cast<std::size_t>(slot)])
      return false;
    slot_used_[static_cast<std::size_t>(slot)] = true;
    return true;
  }

  [[nodiscard]] std::int64_t index_of(const Output& output) const {
    if (output.sequence < 0 || output.sequence >= static_cast<std::int64_t>(case_.works.size())) return -1;
    const std::int32_t blocks = blocks_of(case_.works[static_cast<std::size_t>(output.sequence)]);
    if (output.kv_head < 0 || output.kv_head >= case_.shape.kv_heads || output.row_block < 0 || output.row_block >= blocks)
      return -1;
    return first_output_[static_cast<std::size_t>(output.sequence)] + static_cast<std::int64_t>(output.kv_head) * blocks +
           output.row_block;
  }

  [[nodiscard]] static bool same(const Output& a, const Output& b) {
    return a.rows == b.rows && a.first_tile == b.first_tile && a.tiles == b.tiles && a.tile_cost == b.tile_cost &&
           a.cost == b.cost && a.begin == b.begin;
  }

  [[nodiscard]] std::string words(const Policy& policy, std::int32_t grid) const {
    std::ostringstream out;
    out << ": policy kind " << static_cast<int>(policy.kind) << " splits " << policy.splits << " chunk_tokens "
        << policy.chunk_tokens << ", grid " << grid << ", kv_heads " << case_.shape.kv_heads << " group " << case_.shape.group
        << " q_rows " << case_.shape.q_rows << " tile_tokens " << case_.shape.tile_tokens << " left " << case_.shape.reach.left
        << " right " << case_.shape.reach.right << ", model {" << case_.model.tile_units << ", " << case_.model.free_rows << ", "
        << case_.model.row_units << ", " << case_.model.segment_units << ", " << case_.model.min_worker_tiles << ", "
        << case_.model.sliver_tiles << ", " << case_.model.align_percent << ", " << case_.model.whole_percent << ", "
        << case_.model.short_tiles << ", " << case_.model.spare_tiles << "}, q:kv";
    for (std::size_t b = 0; b < std::min<std::size_t>(case_.works.size(), 64); ++b) {
      out << ' ' << case_.works[b].q_tokens << ':' << case_.works[b].kv_tokens;
    }
    return out.str();
  }

  Case case_;
  ListedLine line_;
  std::vector<Output> outputs_;
  std::vector<std::int64_t> first_output_;  // by sequence
  std::vector<Entry> entries_;
  std::vector<bool> slot_used_;
  std::vector<std::int64_t> worker_tiles_;
  std::vector<std::int64_t> worker_cost_;
  std::vector<std::int64_t> worker_segments_;
};

/// Cost models from "counts tiles only" to one with every rule switched on.
[[nodiscard]] inline std::vector<CostModel> charged_models() {
  return {
      {.tile_units = 16, .segment_units = 8},
      {.tile_units = 16,
       .segment_units = 40,
       .min_worker_tiles = 2,
       .sliver_tiles = 2,
       .align_percent = 5,
       .whole_percent = 20,
       .short_tiles = 6,
       .spare_tiles = 16},
      {.tile_units = 4,
       .free_rows = 2,
       .row_units = 3,
       .segment_units = 3,
       .sliver_tiles = 4,
       .align_percent = 20,
       .whole_percent = 20},
  };
}

/// Those that the backends compute with: the CPU's, and every one that a variant of the CUDA kernel has.
[[nodiscard]] inline std::vector<CostModel> backend_models() {
  std::vector<CostModel> models = {cpu::cost_model({})};
  const auto add_models = [&models](const cuda::ArchitectureRows& table) {
    for (const cuda::KernelRow& row : table) {
      const DType dtype = row.kv_bytes == 1 ? DType::kFloat8E4M3 : DType::kBFloat16;
      const CostModel model = cuda::cost_model(cuda::config_of(table.architecture, row, dtype));
      if (std::find(models.begin(), models.end(), model) == models.end()) models.push_back(model);
    }
  };
  for (const cuda::ArchitectureRows& table : cuda::kKernelRows) add_models(table);
  add_models(cuda::kWideRows);
  return models;
}

/// Every cost model there is, and some that none is like.
[[nodiscard]] inline std::vector<CostModel> every_model() {
  std::vector<CostModel> models = backend_models();
  const std::vector<CostModel> charged = charged_models();
  models.insert(models.end(), charged.begin(), charged.end());
  models.push_back(CostModel::plain());
  return models;
}

/// A batch of decode steps, drafts and prefill chunks. `same_costs`: as many tiles for each as make its outputs cost the same,
/// where tiles of its rows can: 8 tiles of 8 rows cost the CPU as much as 2 of 32.
[[nodiscard]] inline Case mixed_case(support::Stream& random, const CostModel& model, bool same_costs) {
  Case c{.works = {}, .shape = {.kv_heads = static_cast<std::int32_t>(random.between(1, 3))}, .model = model};
  c.shape.group = static_cast<std::int32_t>(random.one_of({1, 3, 4, 8}));
  c.shape.q_rows = static_cast<std::int32_t>(random.one_of({8, 16, 32, 64, 128}));
  c.shape.tile_tokens = static_cast<std::int32_t>(random.one_of({1, 16}));
  if (!same_costs) c.shape.reach = random_reach(random);
  const std::int64_t output_units = random.between(1, 4) * model.tile_cost(c.shape.q_rows);
  for (std::int64_t b = random.between(1, 6); b > 0; --b) {
    SequenceWork work{.q_tokens = static_cast<std::int32_t>(random.one_of({1, 1, 1, 2, 4, 8, 16, 32}))};
    if (same_costs) work.q_tokens = std::min(work.q_tokens, std::max(1, c.shape.q_rows / c.shape.group));
    if (!same_costs && random.chance(10)) work.q_tokens = 0;
    const std::int64_t tiles = same_costs ? std::max<std::int64_t>(1, output_units / model.tile_cost(work.q_tokens * c.shape.group))
                                          : random.between(0, 12);
    work.kv_tokens = static_cast<std::int32_t>(tiles * c.shape.tile_tokens);
    c.works.push_back(work);
  }
  return c;
}

/// Policies with every kind of parameter; with tiles of one token a chunk of n tokens has n tiles.
[[nodiscard]] inline std::vector<Policy> all_policies() {
  return {Policy::lean(),         Policy::fixed_chunk(2), Policy::fixed_chunk(3), Policy::fixed_chunk(), Policy::data_parallel(),
          Policy::fixed_split(0), Policy::fixed_split(1), Policy::fixed_split(2), Policy::fixed_split(5)};
}

/// Of the general walk and of one in 32 bits, but for where the output lies on the line, which not every walk says.
template <typename TUnits>
void expect_same_segment(const BasicSegment<TUnits>& general, const BasicSegment<std::int32_t>& narrow) {
  ASSERT_EQ(general.output.sequence, narrow.output.sequence);
  ASSERT_EQ(general.output.kv_head, narrow.output.kv_head);
  ASSERT_EQ(general.output.row_block, narrow.output.row_block);
  ASSERT_EQ(general.output.rows, narrow.output.rows);
  ASSERT_EQ(general.tile_begin, narrow.tile_begin);
  ASSERT_EQ(general.tile_end, narrow.tile_end);
  ASSERT_EQ(general.contributor, narrow.contributor);
  ASSERT_EQ(general.contributors, narrow.contributors);
  ASSERT_EQ(general.slots.slot(general.contributor), narrow.slots.slot(narrow.contributor));
}

}  // namespace lean::schedule::checks
