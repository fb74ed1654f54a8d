// The schedule's first promise: whatever the lengths, the policy, the cost model and the number of workers, every tile of
// every output is owned exactly once, and all contributors of an output agree on who they are and where their slots lie.
#include <gtest/gtest.h>

#include <functional>

#include "schedule/flat_line.hpp"
#include "support/random.hpp"
#include "support/reduced.hpp"
#include "unit/schedule_checks.hpp"

namespace lean::schedule {
namespace {

using checks::all_policies;
using checks::Case;
using checks::charged_models;
using checks::Checker;
using checks::decode_of;
using support::full_or_reduced;
using support::Stream;

constexpr LineShape kOneHead = {.kv_heads = 1, .group = 1, .q_rows = 1, .tile_tokens = 1};

std::vector<CostModel> all_models() {
  std::vector<CostModel> models = charged_models();
  models.push_back(CostModel::plain());
  return models;
}

/// Checks a case under every policy for every grid of [1, tiles + 1] and for 80 workers; returns plans checked.
std::int64_t expect_sound(const Case& c, std::int64_t tiles) {
  std::int64_t plans = 0;
  for (const Measure measure : {Measure::kCost, Measure::kOutputs}) {
    Checker checker(c, measure);
    for (const Policy& policy : all_policies()) {
      if (measure_of(policy.kind) != measure) continue;
      for (std::int32_t grid = 1; grid <= 80; grid = grid <= tiles ? grid + 1 : (grid < 80 ? 80 : 81)) {
        const std::string fault = checker.fault(policy, grid);
        EXPECT_EQ(fault, "");
        if (!fault.empty()) return plans;
        ++plans;
      }
    }
  }
  return plans;
}

/// Calls visit(lengths) for every list of lengths (0 included) that comes to `tiles` tiles of one token.
void for_every_list(std::int32_t tiles, std::vector<std::int32_t>& lengths, const std::function<void()>& visit) {
  if (tiles == 0) return visit();
  for (std::int32_t length = 0; length <= tiles; ++length) {
    lengths.push_back(length);
    for_every_list(tiles - std::max(length, 1), lengths, visit);
    lengths.pop_back();
  }
}

TEST(Schedule, R04_EveryTileIsOwnedExactlyOnceForEverySmallBatch) {
  const std::int32_t largest = full_or_reduced(8, 4);
  std::int64_t plans = 0;
  for (const CostModel& model : all_models()) {
    for (std::int32_t tiles = 1; tiles <= largest && !HasFailure(); ++tiles) {
      std::vector<std::int32_t> lengths;
      for_every_list(tiles, lengths,
                     [&] { plans += expect_sound({.works = decode_of(lengths), .shape = kOneHead, .model = model}, tiles); });
    }
  }
  EXPECT_GT(plans, 10'000);
}

// With a cost model that counts tiles only, the segments of an output depend on nothing but its place on the line: where it
// begins, its tiles, the line's tiles, the workers. So lines of (before, output, after) show every case there is.
TEST(Schedule, R04_EveryTileIsOwnedExactlyOnceForEveryPlaceOnEveryLineOf64Tiles) {
  const std::int32_t longest = full_or_reduced(64, 14);
  std::int64_t plans = 0;
  for (std::int32_t tiles = 1; tiles <= longest; ++tiles) {
    for (std::int32_t before = 0; before < tiles; ++before) {
      for (std::int32_t after = 0; before + after < tiles; ++after) {
        std::vector<std::int32_t> lengths;
        if (before > 0) lengths.push_back(before);
        lengths.push_back(tiles - before - after);
        if (after > 0) lengths.push_back(after);
        Checker checker({.works = decode_of(lengths), .shape = kOneHead, .model = CostModel::plain()}, Measure::kCost);
        for (std::int32_t grid = 1; grid <= tiles; ++grid, ++plans) ASSERT_EQ(checker.fault(Policy::lean(), grid), "");
        ASSERT_EQ(checker.fault(Policy::lean(), 80), "");
        ASSERT_EQ(checker.worker_tiles().size(), static_cast<std::size_t>(tiles)) << "80 workers are as good as one a tile";
      }
    }
  }
  EXPECT_GT(plans, 5'000);
}

TEST(Schedule, R04_EveryTileIsOwnedExactlyOnceForEveryPairOfOutputsAndEverySplit) {
  const std::int32_t longest = full_or_reduced(64, 12);
  for (std::int32_t first = 0; first <= longest; ++first) {
    for (std::int32_t second = 0; first + second <= longest; ++second) {
      Checker checker({.works = decode_of({first, second}), .shape = kOneHead, .model = CostModel::plain()}, Measure::kOutputs);
      for (const std::int32_t splits : {1, 2, 3, 4, 7, 8, 13, 32, 64, 100, 128}) {
        for (const std::int32_t grid : {1, 2, 3, 5, 8, 64, 79, 80}) ASSERT_EQ(checker.fault(Policy::fixed_split(splits), grid), "");
      }
    }
  }
}

TEST(Schedule, R04_EveryTileIsOwnedExactlyOnceForEverySmallShape) {
  std::int64_t plans = 0;
  const std::int32_t longest = full_or_reduced(3, 1);
  std::vector<std::vector<SequenceWork>> batches;
  for (std::int32_t q = 0; q <= 3; ++q) {
    for (std::int32_t kv = 0; kv <= longest; ++kv) {
      batches.push_back({{q, kv}});
      for (std::int32_t q2 = 0; q2 <= 3; ++q2) {
        for (std::int32_t kv2 = 0; kv2 <= longest; ++kv2) batches.push_back({{q, kv}, {q2, kv2}});
      }
    }
  }
  for (const Reach reach :
       {Reach{}, Reach{.right = 0}, Reach{.left = 0, .right = 0}, Reach{.left = 1}, Reach{.left = 0, .right = 1}}) {
    for (const std::int32_t kv_heads : {1, 2}) {
      for (const std::int32_t group : {1, 3}) {
        for (const std::int32_t q_rows : {1, 2, 4}) {
          const LineShape shape = {.kv_heads = kv_heads, .group = group, .q_rows = q_rows, .tile_tokens = 1, .reach = reach};
          for (const CostModel& model : all_models()) {
            for (const auto& works : batches) plans += expect_sound({.works = works, .shape = shape, .model = model}, 5);
            if (HasFailure()) return;
          }
        }
      }
    }
  }
  EXPECT_GT(plans, 100'000);
}

TEST(Schedule, BothNeighboursAgreeOnTheCut) {
  Stream random(11);
  std::int64_t cuts = 0;
  for (std::int32_t round = 0; round < full_or_reduced(300, 30); ++round) {
    std::vector<std::int32_t> lengths(static_cast<std::size_t>(random.between(1, 40)));
    for (std::int32_t& length : lengths) length = static_cast<std::int32_t>(random.between(0, 900));
    const CostModel model = all_models()[static_cast<std::size_t>(round) % all_models().size()];
    Checker checker(
        {.works = decode_of(lengths), .shape = {.kv_heads = 2, .group = 4, .q_rows = 4, .tile_tokens = 16}, .model = model},
        Measure::kCost);
    ASSERT_EQ(checker.fault(Policy::lean(), static_cast<std::int32_t>(random.between(2, 200))), "");
    for (std::size_t i = 1; i < checker.entries().size(); ++i) {
      const auto& left = checker.entries()[i - 1];
      const auto& right = checker.entries()[i];
      if (left.output != right.output) continue;
      ASSERT_EQ(left.tile_end, right.tile_begin);
      ASSERT_EQ(left.worker + 1, right.worker) << "contributors of one output are neighbours";
      ++cuts;
    }
  }
  EXPECT_GT(cuts, 100);
}

TEST(Schedule, EveryTokenIsOwnedExactlyOnce) {
  Stream random(23);
  constexpr std::int32_t kTileTokens = 3;
  for (std::int32_t round = 0; round < full_or_reduced(200, 20); ++round) {
    std::vector<std::int32_t> lengths(static_cast<std::size_t>(random.between(1, 12)));
    for (std::int32_t& length : lengths) length = static_cast<std::int32_t>(random.between(0, 50));
    const LineShape shape = {.kv_heads = 1, .group = 1, .q_rows = 1, .tile_tokens = kTileTokens};
    for (const Policy& policy : all_policies()) {
      Checker checker({.works = decode_of(lengths), .shape = shape, .model = charged_models()[0]}, measure_of(policy.kind));
      ASSERT_EQ(checker.fault(policy, static_cast<std::int32_t>(random.between(1, 80))), "");
      std::vector<std::vector<std::int32_t>> owners(lengths.size());
      for (std::size_t b = 0; b < lengths.size(); ++b) owners[b].assign(static_cast<std::size_t>(lengths[b]), 0);
      for (const auto& entry : checker.entries()) {
        auto& tokens = owners[static_cast<std::size_t>(entry.output)];  // one output a sequence
        for (std::int64_t token = entry.tile_begin * kTileTokens; token < entry.tile_end * kTileTokens; ++token) {
          if (token < static_cast<std::int64_t>(tokens.size())) ++tokens[static_cast<std::size_t>(token)];
        }
      }
      for (const auto& tokens : owners)
        ASSERT_EQ(std::count(tokens.begin(), tokens.end(), 1), static_cast<std::ptrdiff_t>(tokens.size()));
    }
  }
}

/// A random batch of serving: mostly short, a few very long; decode, speculation and prefill mixed.
Case random_case(Stream& random, std::int64_t batch) {
  Case c;
  const bool mixed = random.chance(50);
  c.shape = {.kv_heads = static_cast<std::int32_t>(random.one_of({1, 2, 5})),
             .group = static_cast<std::int32_t>(random.one_of({1, 4, 7})),
             .q_rows = static_cast<std::int32_t>(random.one_of({16, 64})),
             .tile_tokens = static_cast<std::int32_t>(random.one_of({64, 128, 100})),
             .reach = checks::random_reach(random)};
  const std::vector<CostModel> models = all_models();
  c.model = models[static_cast<std::size_t>(random.between(0, static_cast<std::int64_t>(models.size()) - 1))];
  for (std::int64_t b = 0; b < batch; ++b) {
    SequenceWork work = {.q_tokens = 1, .kv_tokens = static_cast<std::int32_t>(random.between(0, 700))};
    if (random.chance(3)) work.kv_tokens = static_cast<std::int32_t>(random.between(0, 256 * 1024));
    if (mixed) work.q_tokens = static_cast<std::int32_t>(random.chance(20) ? 0 : (random.chance(10) ? random.between(1, 90) : 1));
    c.works.push_back(work);
  }
  return c;
}

TEST(Schedule, R05_EveryTileIsOwnedExactlyOnceForLargeRaggedBatches) {
  Stream random(5);
  std::vector<std::int64_t> batches = {1, 255, 256, 257, 511, 513, 1000, 3001};
  if (!support::reduced()) batches.insert(batches.end(), {7919, 65'536});
  std::int64_t shared = 0;
  for (const std::int64_t batch : batches) {
    const Case c = random_case(random, batch);
    for (const Measure measure : {Measure::kCost, Measure::kOutputs}) {
      Checker checker(c, measure);
      for (const Policy& policy : {Policy::lean(), Policy::fixed_chunk(), Policy::data_parallel(), Policy::fixed_split(3)}) {
        if (measure_of(policy.kind) != measure) continue;
        for (const std::int32_t grid : {1, 132, 1057}) {
          if (batch > 10'000 && grid != 132) continue;
          ASSERT_EQ(checker.fault(policy, grid), "");
          for (const auto& entry : checker.entries()) shared += entry.contributors > 1 ? 1 : 0;
        }
      }
    }
  }
  EXPECT_GT(shared, 10'000);
}

TEST(Schedule, R05_SequencesWithoutQueriesHaveNoOutput) {
  const LineShape shape = {.kv_heads = 3, .group = 2, .q_rows = 16, .tile_tokens = 8};
  Case c = {.works = {{0, 500}, {1, 40}, {0, 9}, {0, 0}, {1, 24}, {0, 77}}, .shape = shape, .model = CostModel::plain()};
  Checker checker(c, Measure::kCost);
  EXPECT_EQ(checker.line().sums().outputs, 6);
  EXPECT_EQ(checker.line().sums().tiles, 3 * (5 + 3));
  for (std::int32_t grid = 1; grid <= 80; ++grid) ASSERT_EQ(checker.fault(Policy::lean(), grid), "");
}

TEST(Schedule, R02_EmptySequencesHaveAnOwner) {
  Checker checker({.works = decode_of({0, 0, 0}), .shape = kOneHead, .model = CostModel::plain()}, Measure::kCost);
  ASSERT_EQ(checker.fault(Policy::lean(), 8), "");
  EXPECT_EQ(checker.entries().size(), 3U);
}

TEST(Schedule, R01_NothingToDoGivesNobodyWork) {
  for (const std::vector<SequenceWork>& works : {std::vector<SequenceWork>{}, std::vector<SequenceWork>{{0, 100}, {0, 0}}}) {
    for (const Policy& policy : all_policies()) {
      Checker checker({.works = works, .shape = kOneHead, .model = CostModel::plain()}, measure_of(policy.kind));
      ASSERT_EQ(checker.fault(policy, 7), "");
      EXPECT_TRUE(checker.entries().empty());
      EXPECT_EQ(checker.plan(policy, 7).workers, 1);
    }
  }
}

TEST(Schedule, R04_AnOutputWithOneContributorTakesNoSlot) {
  Checker checker({.works = decode_of({5, 1, 9}), .shape = kOneHead, .model = CostModel::plain()}, Measure::kCost);
  ASSERT_EQ(checker.fault(Policy::lean(), 1), "");
  ASSERT_EQ(checker.entries().size(), 3U);
  for (const auto& entry : checker.entries()) EXPECT_EQ(entry.contributors, 1);
}

TEST(Schedule, TheLineIsFoundByPlaceAsByWalking) {
  Stream random(31);
  for (const std::int64_t batch : {3, 256, 700}) {
    const Case c = random_case(random, batch);
    for (const Measure measure : {Measure::kCost, Measure::kOutputs}) {
      Checker checker(c, measure);
      const auto& line = checker.line();
      Output walked = line.locate(0);
      for (std::size_t i = 0; i < checker.outputs().size(); ++i) {
        const Output& expected = checker.outputs()[i];
        const std::int64_t length = measure == Measure::kCost ? expected.cost : 1;
        for (const std::int64_t place : {expected.begin, expected.begin + length / 2, expected.begin + length - 1}) {
          const Output found = line.locate(place);
          ASSERT_EQ(found.begin, expected.begin);
          ASSERT_EQ(found.sequence, expected.sequence);
          ASSERT_EQ(found.kv_head, expected.kv_head);
          ASSERT_EQ(found.row_block, expected.row_block);
        }
        ASSERT_EQ(walked.begin, expected.begin);
        ASSERT_EQ(line.advance(walked), i + 1 < checker.outputs().size());
      }
    }
  }
}

constexpr std::int32_t kFlatTileTokens = 16;
using FlatRules = LineRules<checks::ListedLengths, std::int32_t, OneBlockShape<kFlatTileTokens>>;

// What a GPU walks on every decode step, in 32 bits: from any sequence before the share, the same segments as the general walk.
TEST(Schedule, TheFlatWalkGivesTheSameSegments) {
  Stream random(41);
  std::int64_t segments = 0;
  std::int64_t shared = 0;
  const std::vector<CostModel> models = checks::every_model();
  for (std::int32_t round = 0; round < full_or_reduced(20000, 2000); ++round) {
    const CostModel& model = models[static_cast<std::size_t>(round) % models.size()];
    Case c = round % 3 == 0 ? checks::mixed_case(random, model, round % 2 == 0) : random_case(random, 12);
    c.model = model;
    c.shape.tile_tokens = kFlatTileTokens;
    c.shape.q_rows = 1;
    for (const SequenceWork& work : c.works) c.shape.q_rows = std::max(c.shape.q_rows, work.q_tokens * c.shape.group);
    const LineShape shape = Checker(c, Measure::kCost).line().shape();
    const checks::ListedLengths lengths{c.works.data()};
    checks::ListedLine line(lengths, shape, c.model, Measure::kCost);
    line.build();
    const FlatRules rules(lengths, OneBlockShape<kFlatTileTokens>(shape), c.model, Measure::kCost);
    const auto batch = static_cast<std::int64_t>(c.works.size());
    const BasicLineSums<std::int32_t> sums = rules.sum_sequences(0, batch);
    ASSERT_EQ(sums.cost, line.sums().cost);
    const auto grid = static_cast<std::int32_t>(random.between(1, 200));
    const auto chunk_tiles = static_cast<std::int32_t>(random.between(0, 5));
    const Policy policy = chunk_tiles == 0 ? Policy::lean() : Policy::fixed_chunk(chunk_tiles * kFlatTileTokens);
    const Plan plan = make_plan(line.sums(), policy, c.model, kFlatTileTokens, grid);
    const auto flat_plan = make_plan(sums, policy, c.model, kFlatTileTokens, grid);
    ASSERT_EQ(flat_plan.workers, plan.workers);
    if (sums.outputs == 0) continue;
    for (std::int32_t worker = 0; worker < plan.workers; ++worker) {
      SegmentCursor a(line, plan, worker);
      SequencePlace<std::int32_t> start;  // a strip may begin anywhere before the share
      for (std::int64_t b = 0, end = random.between(0, batch - 1); b < end; ++b) {
        const std::int32_t next = start.begin + rules.sum_sequences(b, b + 1).cost;
        if (next > flat_plan.shares.begin(worker)) break;
        start = {b + 1, next};
      }
      FlatCursor b(rules, flat_plan, worker, flat_plan.shares.range(worker), start, rules.lengths()(start.sequence));
      bool ended = false;
      std::int64_t behind = 0;  // what a worker did that had nothing to do
      while (a.next()) {
        ASSERT_TRUE(b.next());
        if (ended) behind += b.segment().output.cost;
        ended = b.ends_share();
        ASSERT_TRUE(ended || !a.ends_share());
        ASSERT_NO_FATAL_FAILURE(checks::expect_same_segment(a.segment(), b.segment()));
        ASSERT_EQ(b.lengths().kv_end, c.works[static_cast<std::size_t>(a.segment().output.sequence)].kv_tokens);
        ++segments;
        shared += a.segment().sole() ? 0 : 1;
      }
      ASSERT_FALSE(b.next());
      ASSERT_LE(behind, 2 * std::int64_t{flat_plan.snap_units});
    }
  }
  EXPECT_GT(shared, segments / 4) << "too few outputs are shared for the test to mean much";
}

/// Where the line is even, what a worker knows by arithmetic is what it would walk to. The GPU's own cost models among others.
TEST(Schedule, AnEvenLineHasTheSegmentsOfTheWalk) {
  Stream random(43);
  std::int64_t even_lines = 0;
  std::int64_t shared = 0;
  const std::vector<CostModel> models = checks::backend_models();
  for (std::int32_t round = 0; round < full_or_reduced(40000, 4000); ++round) {
    CostModel model = models[static_cast<std::size_t>(random.between(1, static_cast<std::int64_t>(models.size()) - 1))];
    if (random.chance(30)) model.align_percent = static_cast<std::int32_t>(random.between(0, 20));
    if (random.chance(30)) model.align_units = static_cast<std::int32_t>(random.between(1, 200));
    if (random.chance(30)) model.short_tiles = static_cast<std::int32_t>(random.between(0, 12));
    if (random.chance(30)) model.unshared_tiles = static_cast<std::int32_t>(random.between(0, 5));
    if (random.chance(30)) model.segment_units = static_cast<std::int32_t>(random.between(0, 20));
    if (random.chance(30)) model.sliver_tiles = static_cast<std::int32_t>(random.between(0, 4));
    LineShape shape{.batch = random.chance(50) ? 1 : random.between(1, 9),
                    .kv_heads = static_cast<std::int32_t>(random.between(1, 20)),
                    .group = 1,
                    .q_rows = 1,
                    .tile_tokens = kFlatTileTokens};
    const auto grid = static_cast<std::int32_t>(random.chance(50) ? 132 : random.between(1, 200));
    const auto tokens =
        static_cast<std::int32_t>(random.chance(50) ? random.between(0, 40 * kFlatTileTokens) : random.between(0, 200000));
    const std::vector<SequenceWork> works(static_cast<std::size_t>(shape.batch), {.q_tokens = 1, .kv_tokens = tokens});
    const checks::ListedLengths lengths{works.data()};
    CostModel walked = model;  // on a GPU whose workers are not to be spared, an even line is still one
    if (random.chance(50)) walked.spare_tiles = 0;
    const FlatRules rules(lengths, OneBlockShape<kFlatTileTokens>(shape), walked, Measure::kCost);
    const BasicLineSums<std::int32_t> sums = rules.sum_sequences(0, shape.batch);
    const auto plan = make_plan(sums, Policy::lean(), walked, kFlatTileTokens, grid);
    const auto share_tiles =
        static_cast<std::int32_t>(random.chance(50) ? 1 << 20 : random.between(std::max(1, model.unshared_tiles), 60));
    const EvenLine line = even_line_of(shape.batch * shape.kv_heads, grid, model, share_tiles);
    for (std::int32_t place = 0; place < grid; ++place) {
      const EvenShare share = line.outputs == 0 ? EvenShare{} : even_share(line, sums, model, place);
      if (!share.even) break;
      const std::int32_t worker = spread_worker(place, plan.workers, grid);
      even_lines += place == 0 ? 1 : 0;
      ASSERT_LE(share.tile_end - share.tile_begin, share_tiles);
      const BasicOutput<std::int32_t> output{.sequence = share.output / shape.kv_heads, .kv_head = share.output % shape.kv_heads};
      FlatCursor b(rules, plan, share, output, lengths(std::min(output.sequence, shape.batch - 1)));
      const bool more = b.next();
      ASSERT_EQ(more, worker < plan.workers) << "worker " << worker << " of " << grid << ", " << tokens << " tokens";
      if (!more) continue;
      FlatCursor a(rules, plan, worker, plan.shares.range(worker), SequencePlace<std::int32_t>{}, lengths(0));
      ASSERT_TRUE(a.next());
      ASSERT_NO_FATAL_FAILURE(checks::expect_same_segment(a.segment(), b.segment()));
      ASSERT_EQ(a.segment().contributors, b.segment().contributors);
      ASSERT_TRUE(a.ends_share() && b.ends_share());
      ASSERT_FALSE(a.next());
      ASSERT_FALSE(b.next());
      shared += a.segment().sole() ? 0 : 1;
    }
  }
  EXPECT_GT(even_lines, full_or_reduced(5000, 500));
  EXPECT_GT(shared, full_or_reduced(100000, 10000));
}

TEST(Schedule, StripsSumToTheLineInAnyOrder) {
  Stream random(37);
  const Case c = random_case(random, 777);
  Checker checker(c, Measure::kCost);
  LineSums backwards;
  for (std::int32_t strip = checks::ListedLine::kStrips - 1; strip >= 0; --strip)
    backwards = checker.line().sum_strip(strip).plus(backwards);
  LineSums expected;
  for (const Output& output : checker.outputs()) {
    expected =
        expected.plus({.cost = output.cost,
                       .tiles = output.tiles,
                       .outputs = 1,
                       .max_output_tiles = output.tiles,
                       .max_tile_cost = output.tiles > 1 ? static_cast<std::int32_t>(ceil_div(output.cost, output.tiles)) : 0,
                       .min_output_cost = output.cost,
                       .max_output_cost = output.cost});
  }
  for (const LineSums& sums : {backwards, checker.line().sums()}) {
    EXPECT_EQ(sums.cost, expected.cost);
    EXPECT_EQ(sums.tiles, expected.tiles);
    EXPECT_EQ(sums.outputs, expected.outputs);
    EXPECT_EQ(sums.max_output_tiles, expected.max_output_tiles);
    EXPECT_EQ(sums.max_tile_cost, expected.max_tile_cost);
    EXPECT_EQ(sums.min_output_cost, expected.min_output_cost);
    EXPECT_EQ(sums.max_output_cost, expected.max_output_cost);
  }
}

}  // namespace
}  // namespace lean::schedule
