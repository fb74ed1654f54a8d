// Workspace: what lies where in state and scratch. Nothing overlaps, everything is aligned and inside, the state stays
// small, and sizes follow the capacities alone.
#include "fixup/workspace_size.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "backends/cpu/worker_memory.hpp"
#include "lean/lean.hpp"
#include "problem/sequence.hpp"
#include "support/guarded_buffer.hpp"
#include "support/test_problem.hpp"

namespace lean::fixup {
namespace {

/// Byte ranges handed out from one piece of memory.
class Ranges {
 public:
  void add(const void* begin, std::int64_t bytes) {
    const auto first = reinterpret_cast<std::uintptr_t>(begin);
    ranges_.emplace_back(first, first + static_cast<std::uintptr_t>(bytes));
  }
  void add(const Partial& partial, const PartialLayout& layout) {
    add(partial.o, layout.q_rows * partial.value_stride * 4);
    add(partial.m, layout.q_rows * 4);
    add(partial.l, layout.q_rows * 4);
  }
  void expect_disjoint_inside(const std::byte* memory, std::int64_t bytes) {
    std::sort(ranges_.begin(), ranges_.end());
    const auto first = reinterpret_cast<std::uintptr_t>(memory);
    ASSERT_GE(ranges_.front().first, first);
    ASSERT_LE(ranges_.back().second, first + static_cast<std::uintptr_t>(bytes));
    for (std::size_t i = 1; i < ranges_.size(); ++i) ASSERT_LE(ranges_[i - 1].second, ranges_[i].first);
  }

 private:
  std::vector<std::pair<std::uintptr_t, std::uintptr_t>> ranges_;
};

std::vector<WorkspaceLayout> layouts() {
  std::vector<WorkspaceLayout> all;
  for (const std::int64_t slots : {0, 1, 2, 7, 64, 65}) {
    for (const bool second_bank : {false, true}) {
      for (const std::int32_t nodes : {1, 3, 21}) {
        for (const PartialLayout& partial : {PartialLayout{1, 16}, PartialLayout{16, 48}, PartialLayout{32, 80}}) {
          all.emplace_back(slots, second_bank, nodes, partial);
        }
      }
    }
  }
  return all;
}

TEST(WorkspaceLayout, R17_CountersAreDisjointAndInsideTheState) {
  for (const WorkspaceLayout& layout : layouts()) {
    const support::GuardedBuffer state(static_cast<std::size_t>(layout.state_bytes()));
    const Slots slots{layout, state.data(), nullptr};
    Ranges ranges;
    ranges.add(&slots.header(), sizeof(StateHeader));
    for (std::int64_t s = 0; s < layout.slots; ++s) ranges.add(&slots.counter(s), sizeof(Counter));
    // Level-2 counters belong to outputs, which have two slots or more.
    for (std::int64_t s = 0; layout.second_bank && s < layout.slots; s += 2) ranges.add(&slots.second_counter(s), sizeof(Counter));
    ranges.expect_disjoint_inside(state.data(), layout.state_bytes());
    for (std::int64_t c = 0; c < layout.counters(); ++c) ranges.add(&slots.counters()[c], 0);
    ranges.expect_disjoint_inside(state.data(), layout.state_bytes());
  }
}

TEST(WorkspaceLayout, R17_SlotsAreDisjointAlignedAndInsideTheScratch) {
  for (const WorkspaceLayout& layout : layouts()) {
    if (layout.slots == 0) continue;
    const support::GuardedBuffer scratch(static_cast<std::size_t>(layout.scratch_bytes()));
    const Slots slots{layout, nullptr, scratch.data()};
    Ranges ranges;
    for (std::int64_t s = 0; s < layout.slots; ++s) {
      if (layout.nodes_per_slot > 1) ranges.add(&slots.node_list(s), sizeof(NodeList));
      for (std::int32_t n = 0; n < layout.nodes_per_slot; ++n) ranges.add(slots.partial(s, n), layout.partial);
      if (layout.second_bank) ranges.add(slots.bundle_partial(s), layout.partial);
      ASSERT_EQ(reinterpret_cast<std::uintptr_t>(&slots.node_list(s)) % kAlignmentBytes, 0U);
      ASSERT_EQ(reinterpret_cast<std::uintptr_t>(slots.partial(s).o) % kAlignmentBytes, 0U);
    }
    ranges.expect_disjoint_inside(scratch.data(), layout.scratch_bytes());
  }
}

TEST(WorkspaceLayout, PartsAreMultiplesOfTheAlignment) {
  static_assert(kAlignmentBytes == static_cast<std::int64_t>(kWorkspaceAlignment));
  static_assert(sizeof(StateHeader) <= kStateHeaderBytes);
  for (const WorkspaceLayout& layout : layouts()) {
    EXPECT_EQ(layout.state_bytes() % kAlignmentBytes, 0);
    EXPECT_EQ(layout.scratch_bytes() % kAlignmentBytes, 0);
  }
}

TEST(WorkerMemory, R17_BuffersAreDisjointAndInside) {
  for (const std::int32_t tile_tokens : {16, 112, 256}) {
    for (const auto& [head_dim, value_dim] : {std::pair{16, 16}, {64, 256}, {256, 48}}) {
      for (const std::int32_t q_rows : {16, 128}) {
        for (const bool packs : {false, true}) {
          const cpu::WorkerMemoryLayout layout{
              .config = {.head_dim = head_dim, .value_dim = value_dim, .tile_tokens = tile_tokens, .q_rows = q_rows},
              .accumulators = 5,
              .packs_tiles = packs};
          const support::GuardedBuffer buffer(static_cast<std::size_t>(layout.bytes()));
          const cpu::WorkerMemory memory(layout, buffer.data());
          Ranges ranges;
          ranges.add(memory.query, std::int64_t{q_rows} * head_dim * 4);
          ranges.add(memory.query_bf16, std::int64_t{q_rows} * head_dim * 2);
          ranges.add(memory.scores, std::int64_t{q_rows} * layout.score_stride() * 4);
          ranges.add(memory.rescale, q_rows * 4);
          ranges.add(memory.visible, q_rows * 4);
          for (std::int32_t place = 0; place < layout.accumulators; ++place) ranges.add(memory.partial(place), layout.partial());
          if (packs) ranges.add(memory.packed_k, std::int64_t{tile_tokens} * head_dim * 4);
          if (packs) ranges.add(memory.packed_v, std::int64_t{tile_tokens} * value_dim * 4);
          ranges.expect_disjoint_inside(buffer.data(), layout.bytes());
          // Whole vectors are loaded from the start of every row.
          for (const void* row : {static_cast<const void*>(memory.query), static_cast<const void*>(memory.scores),
                                  static_cast<const void*>(memory.partial(1).o), static_cast<const void*>(memory.packed_k)}) {
            EXPECT_EQ(reinterpret_cast<std::uintptr_t>(row) % (cpu::kLaneMultiple * sizeof(float)), 0U);
          }
          EXPECT_GE(layout.score_stride(), tile_tokens + 3);  // scores are written in fours
        }
      }
    }
  }
}

// ---- workspace_size() -------------------------------------------------------------------------------------------------

Problem decode_problem(std::int64_t batch = 3, std::int32_t capacity = 4000) {
  static float memory[1] = {};
  Problem problem{.batch = batch, .q_heads = 8, .kv_heads = 2, .head_dim = 64};
  problem.q = {.data = memory, .strides = {1, 1, 1, 1}};
  problem.k = problem.v = problem.q;
  static float output[1] = {};
  problem.o = {.data = output, .strides = {8 * 64, 64, 8 * 64, 1}};
  problem.kv_capacity = capacity;
  return problem;
}

WorkspaceSize size_of(const Problem& problem, const Options& options) {
  const WorkspaceSize size = workspace_size(problem, options);
  EXPECT_TRUE(size.status.ok()) << size.status.message;
  return size;
}

TEST(WorkspaceSize, TheStateStaysWithin64KilobytesForEveryWorkerCount) {
  for (const Policy& policy : {Policy::lean(), Policy::fixed_chunk()}) {
    for (const std::int32_t workers : {1, 32, 33, 132, 1024, 4095, 4096}) {
      EXPECT_LE(size_of(decode_problem(), {.policy = policy, .workers = workers}).state_bytes, 64U * 1024U)
          << workers << " workers";
    }
  }
}

TEST(WorkspaceSize, AnExecutorOfManyThreadsGetsNoMoreWorkersThanMayBeAskedFor) {
  Executor many = default_executor();
  many.worker_count = 1000000;
  const WorkspaceSize size = size_of(decode_problem(), {.executor = &many});
  EXPECT_EQ(size.state_bytes, size_of(decode_problem(), {.workers = Options::kMaxWorkers}).state_bytes);
  EXPECT_EQ(size.scratch_bytes, size_of(decode_problem(), {.workers = Options::kMaxWorkers}).scratch_bytes);
}

TEST(WorkspaceSize, NeverShrinksWithWorkersBatchOrCapacity) {
  for (const Policy& policy : {Policy::lean(), Policy::fixed_split(), Policy::fixed_split(7), Policy::fixed_split(50),
                               Policy::data_parallel(), Policy::fixed_chunk(64)}) {
    const auto expect_monotone = [&](auto size_at) {
      WorkspaceSize last;
      for (const std::int32_t n : {1, 2, 3, 16, 32, 33, 64, 100, 500, 4096}) {
        const WorkspaceSize size = size_at(n);
        EXPECT_GE(size.state_bytes, last.state_bytes) << n;
        EXPECT_GE(size.scratch_bytes, last.scratch_bytes) << n;
        last = size;
      }
    };
    expect_monotone([&](std::int32_t n) { return size_of(decode_problem(), {.policy = policy, .workers = n}); });
    expect_monotone([&](std::int32_t n) { return size_of(decode_problem(n), {.policy = policy, .workers = 20}); });
    expect_monotone([&](std::int32_t n) { return size_of(decode_problem(3, 64 * n), {.policy = policy, .workers = 20}); });
  }
}

TEST(WorkspaceSize, DoesNotDependOnLengths) {
  const std::int32_t lengths[] = {0, 1, 4000};
  for (const Policy& policy : {Policy::lean(), Policy::fixed_split(), Policy::data_parallel(), Policy::fixed_chunk(64)}) {
    Problem problem = decode_problem();
    const WorkspaceSize without = size_of(problem, {.policy = policy});
    problem.kv_lengths = lengths;
    const WorkspaceSize with = size_of(problem, {.policy = policy});
    EXPECT_EQ(with.state_bytes, without.state_bytes);
    EXPECT_EQ(with.scratch_bytes, without.scratch_bytes);
  }
}

TEST(WorkspaceSize, LeanGrowsWithTheBatchByItsLengthsAlone) {
  const WorkspaceSize few = size_of(decode_problem(1), {.workers = 64});
  const WorkspaceSize many = size_of(decode_problem(65'536), {.workers = 64});
  EXPECT_EQ(few.state_bytes, many.state_bytes);
  const auto lengths = [](std::int64_t batch) {
    return round_up(batch * static_cast<std::int64_t>(sizeof(Sequence)), kAlignmentBytes);
  };
  EXPECT_EQ(static_cast<std::int64_t>(many.scratch_bytes - few.scratch_bytes), lengths(65'536) - lengths(1));
}

TEST(WorkspaceLayout, R20_AChunkMayBeLongerThanAnySequence) {
  const Problem problem{.batch = 1, .q_heads = 1, .kv_heads = 1, .head_dim = 64, .kv_capacity = 1000};
  const tile::TileConfig config{.head_dim = 64, .value_dim = 64, .tile_tokens = 128, .q_rows = 16};
  const WorkspaceLayout one_chunk = workspace_layout(problem, Policy::fixed_chunk(1024), config, 4);
  const WorkspaceLayout longest = workspace_layout(problem, Policy::fixed_chunk(INT32_MAX), config, 4);
  EXPECT_EQ(longest.nodes_per_slot, one_chunk.nodes_per_slot);
  EXPECT_EQ(longest.scratch_bytes(), one_chunk.scratch_bytes());
}

TEST(WorkspaceSize, R20_NeverWraps) {
  // The largest line the preconditions let through: 2^45 outputs, each cut into as many splits as there may be.
  Problem problem = decode_problem(std::int64_t{1} << 30, 15);
  problem.q_heads = problem.kv_heads = 1 << 15;
  problem.o.strides.sequence = problem.o.strides.token = std::int64_t{64} << 15;
  for (const std::int32_t splits : {0, 1, 2, 128}) {
    const WorkspaceSize size = workspace_size(problem, {.policy = Policy::fixed_split(splits), .workers = 4096});
    if (splits < 2) {
      EXPECT_TRUE(size.status.ok()) << size.status.message;
      EXPECT_LT(size.scratch_bytes, std::size_t{1} << 40);
    } else {
      EXPECT_EQ(size.status.code, StatusCode::kTooLarge);
      EXPECT_EQ(size.scratch_bytes, 0U);
    }
  }
}

}  // namespace
}  // namespace lean::fixup
