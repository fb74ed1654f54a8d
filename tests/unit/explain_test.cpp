// The explanation of a schedule says what the schedule does: its numbers add up, its JSON holds every segment, its
// figure is one self-contained, well-formed SVG.
#include "explain/schedule_map.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <locale>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <tuple>
#include <vector>

#include "support/random.hpp"
#include "support/reduced.hpp"

namespace lean::explain {
namespace {

using support::Stream;

/// A batch of one query token a sequence; keeps the lengths alive.
struct Batch {
  std::vector<std::int32_t> lengths = {};
  std::int32_t kv_heads = 1;
  std::int32_t tile_tokens = 1;
  schedule::CostModel model = schedule::CostModel::plain();

  [[nodiscard]] ScheduleMap map(const Policy& policy, std::int32_t workers) const {
    Problem problem;
    problem.batch = static_cast<std::int64_t>(lengths.size());
    problem.kv_lengths = lengths.data();
    problem.kv_capacity = 1 << 30;
    return build_map({.lengths = LengthSource(problem),
                      .shape = {.batch = problem.batch, .kv_heads = kv_heads, .group = 4, .q_rows = 16, .tile_tokens = tile_tokens},
                      .cost_model = model,
                      .policy = policy,
                      .workers = workers});
  }
};

const std::vector<Policy>& policies() {
  static const std::vector<Policy> kAll = {Policy::lean(), Policy::fixed_split(), Policy::fixed_split(3), Policy::data_parallel(),
                                           Policy::fixed_chunk(64)};
  return kAll;
}

Batch random_batch(Stream& random) {
  Batch batch = {.kv_heads = static_cast<std::int32_t>(random.between(1, 8)), .tile_tokens = 16};
  if (random.chance(50))
    batch.model = {.segment_units = 8, .min_worker_tiles = 2, .sliver_tiles = 2, .align_percent = 5, .whole_percent = 20};
  for (std::int64_t b = random.between(1, 40); b > 0; --b)
    batch.lengths.push_back(static_cast<std::int32_t>(random.between(0, 3000)));
  return batch;
}

/// The paper's first figure: 2 heads of 5 LeanTiles on 5 workers.
const Batch& paper() {
  static const Batch kPaper = {.lengths = {5 * 128}, .kv_heads = 2, .tile_tokens = 128};
  return kPaper;
}

TEST(Explain, ThePapersFirstFigure) {
  const ScheduleMap lean = paper().map(Policy::lean(), 5);
  EXPECT_EQ(lean.tiles.max, 2);
  EXPECT_EQ(lean.tiles.ratio(), 1.0);
  EXPECT_EQ(lean.shared_outputs, 2);
  EXPECT_EQ(lean.max_contributors, 3);
  EXPECT_EQ(lean.segments, 6);
  EXPECT_EQ(lean.workers[2].segments.size(), 2U) << "one range crosses from head 0 to head 1";

  const ScheduleMap decoding = paper().map(Policy::fixed_split(2), 5);
  EXPECT_EQ(decoding.tiles.max, 3);
  EXPECT_EQ(decoding.busy_workers, 4);
  EXPECT_DOUBLE_EQ(decoding.tiles.ratio(), 2.0 / 3.0);

  const ScheduleMap flash2 = paper().map(Policy::data_parallel(), 5);
  EXPECT_EQ(flash2.tiles.max, 5);
  EXPECT_EQ(flash2.busy_workers, 2);
  EXPECT_DOUBLE_EQ(flash2.tiles.ratio(), 0.4);
  EXPECT_EQ(flash2.shared_outputs, 0);
}

/// Sequences of several query tokens each, whose line a GPU's kernels of many rows walk as a stair.
struct Chunks {
  std::vector<std::int32_t> lengths = {};
  std::int32_t q_tokens = 1;
  std::int32_t kv_heads = 1;
  std::int32_t q_rows = 128;
  schedule::CostModel model{.segment_units = 64, .cut_units = 96};
  std::int32_t right = 0;

  [[nodiscard]] ScheduleMap map(std::int32_t workers, bool stair) const {
    Problem problem{.batch = static_cast<std::int64_t>(lengths.size()), .q_tokens = q_tokens};
    problem.kv_lengths = lengths.data();
    problem.kv_capacity = 1 << 20;
    return build_map({.lengths = LengthSource(problem),
                      .shape = {.batch = problem.batch,
                                .kv_heads = kv_heads,
                                .group = 4,
                                .q_rows = q_rows,
                                .tile_tokens = 128,
                                .reach = {.right = right}},
                      .cost_model = model,
                      .policy = Policy::lean(),
                      .workers = workers,
                      .stair = stair});
  }
};

TEST(Explain, AStairIsShownAsItIsDealtOut) {
  const Chunks chunk{.lengths = {8192}, .q_tokens = 1024, .kv_heads = 8};
  const ScheduleMap map = chunk.map(132, true);
  EXPECT_EQ(map.busy_workers, 128);
  EXPECT_EQ(map.shared_outputs, 0) << "each has two whole row blocks, of most tiles and of fewest";
  EXPECT_EQ(map.segments, 256);
  ASSERT_EQ(map.workers[0].segments.size(), 2U);
  EXPECT_EQ(map.workers[0].segments[0].output.row_block, 0);
  EXPECT_EQ(map.workers[0].segments[1].output.row_block, 31);
  EXPECT_GT(chunk.map(132, false).shared_outputs, 0);
}

/// Where nothing is dealt out level, and where 32 bits do not count the line, a stair's segments are those of any line.
TEST(Explain, AStairThatIsNotLevelIsWalkedAsAnyLine) {
  Stream random(3);
  std::int64_t segments = 0;
  for (std::int32_t round = 0; round < 200; ++round) {
    Chunks chunks{.q_tokens = static_cast<std::int32_t>(random.between(1, 700)),
                  .kv_heads = static_cast<std::int32_t>(random.between(1, 4)),
                  .q_rows = random.chance(50) ? 64 : 128,
                  .model = {.segment_units = 64}};
    chunks.right = random.chance(30) ? -1 : static_cast<std::int32_t>(random.between(0, 300));
    for (std::int64_t b = random.between(1, 9); b > 0; --b)
      chunks.lengths.push_back(static_cast<std::int32_t>(random.between(0, 3000)));
    const auto workers = static_cast<std::int32_t>(random.between(1, 200));
    const std::string as_any_line = to_json(chunks.map(workers, false));
    ASSERT_EQ(to_json(chunks.map(workers, true)), as_any_line) << "round " << round;
    segments += chunks.map(workers, true).segments;
  }
  EXPECT_GT(segments, 10'000);
  Chunks costly{
      .lengths = {1 << 20, 1 << 20}, .q_tokens = 1024, .kv_heads = 8, .model = {.tile_units = 1 << 20, .cut_units = 1 << 20}};
  EXPECT_EQ(to_json(costly.map(132, true)), to_json(costly.map(132, false)));
}

TEST(Explain, TheSummaryAddsUp) {
  Stream random(1);
  for (std::int32_t round = 0; round < 200; ++round) {
    const Batch batch = random_batch(random);
    for (const Policy& policy : policies()) {
      const auto asked = static_cast<std::int32_t>(random.between(1, 150));
      const ScheduleMap map = batch.map(policy, asked);
      std::int64_t tiles = 0;
      std::int64_t expected_tiles = 0;
      std::int64_t max_tiles = 0;
      std::int64_t cost = 0;
      std::int64_t max_cost = 0;
      std::int32_t busy = 0;
      for (const std::int32_t length : batch.lengths) expected_tiles += std::max(1, (length + 15) / 16) * batch.kv_heads;
      for (const WorkerShare& share : map.workers) {
        tiles += share.tiles;
        cost += share.cost_units;
        max_tiles = std::max(max_tiles, share.tiles);
        max_cost = std::max(max_cost, share.cost_units);
        busy += share.segments.empty() ? 0 : 1;
      }
      ASSERT_EQ(tiles, expected_tiles);
      ASSERT_EQ(map.total_tiles, expected_tiles);
      ASSERT_EQ(map.outputs, static_cast<std::int64_t>(batch.lengths.size()) * batch.kv_heads);
      ASSERT_EQ(map.tiles.max, max_tiles);
      ASSERT_EQ(map.cost_units.max, max_cost);
      ASSERT_EQ(map.busy_workers, busy);
      ASSERT_LE(map.workers.size(), static_cast<std::size_t>(asked));
      ASSERT_DOUBLE_EQ(map.tiles.mean * asked, static_cast<double>(tiles)) << "idle workers count";
      ASSERT_DOUBLE_EQ(map.cost_units.mean * asked, static_cast<double>(cost));
      ASSERT_EQ(cost, map.segments * batch.model.segment_units + tiles * batch.model.tile_units);
      ASSERT_EQ(map.slots, slot_count(map.plan, map.outputs));
    }
  }
}

TEST(Explain, TheJsonHoldsEveryTileOfEveryOutputOnce) {
  Stream random(2);
  for (std::int32_t round = 0; round < 20; ++round) {
    const Batch batch = random_batch(random);
    for (const Policy& policy : policies()) {
      const ScheduleMap map = batch.map(policy, static_cast<std::int32_t>(random.between(1, 150)));
      const nlohmann::json json = nlohmann::json::parse(to_json(map));
      ASSERT_EQ(json.at("workers"), map.workers_asked);
      ASSERT_EQ(json.at("summary").at("shared_outputs"), map.shared_outputs);
      ASSERT_EQ(json.at("summary").at("worker_tiles").at("balance"), map.tiles.ratio());
      ASSERT_EQ(json.at("sequences").size(), batch.lengths.size());
      std::map<std::tuple<std::int64_t, std::int64_t>, std::vector<std::int32_t>> owners;
      for (const auto& share : json.at("shares")) {
        for (const auto& segment : share.at("segments")) {
          auto& tiles = owners[{segment.at("sequence"), segment.at("kv_head")}];
          tiles.resize(segment.at("output_tiles"));
          for (std::size_t tile = segment.at("tile_begin"); tile < segment.at("tile_end"); ++tile) ++tiles.at(tile);
          ASSERT_EQ(segment.contains("slot"), segment.at("contributors") > 1);
        }
      }
      ASSERT_EQ(owners.size(), static_cast<std::size_t>(map.outputs));
      for (const auto& [output, tiles] : owners) ASSERT_EQ(std::count(tiles.begin(), tiles.end(), 1), std::ssize(tiles));
    }
  }
}

TEST(Explain, TheTextNamesPolicyBalanceAndEveryWorker) {
  const std::string text = to_text(paper().map(Policy::fixed_split(2), 5));
  EXPECT_NE(text.find("fixed split x 2 (FlashDecoding)"), std::string::npos) << text;
  EXPECT_NE(text.find("balance  66.6 % in tiles (mean 2.0, longest 3)"), std::string::npos) << text;
  EXPECT_NE(text.find("4 of 5 busy"), std::string::npos) << text;
  EXPECT_NE(text.find("2 outputs shared by up to 2, 4 slots"), std::string::npos) << text;
  EXPECT_NE(text.find("0.1[3,5) 2/2"), std::string::npos) << text;
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 8 + 4);
  for (const char c : text) EXPECT_TRUE(c == '\n' || (c >= ' ' && c <= '~'));
}

TEST(Explain, NothingToDoIsExplainedToo) {
  for (const Policy& policy : policies()) {
    const ScheduleMap map = Batch{}.map(policy, 4);
    EXPECT_EQ(map.outputs, 0);
    EXPECT_EQ(map.busy_workers, 0);
    EXPECT_EQ(map.max_contributors, 0);
    EXPECT_EQ(map.tiles.ratio(), 1.0);
    EXPECT_FALSE(to_text(map).empty());
    EXPECT_NO_THROW(EXPECT_EQ(nlohmann::json::parse(to_json(map)).at("summary").at("outputs"), 0));
    EXPECT_NE(to_svg({map}, {}).find("</svg>"), std::string::npos);
  }
  EXPECT_NE(to_svg({}, {.title = "nothing"}).find("</svg>"), std::string::npos);
}

/// Groups digits by ones and writes a decimal semicolon: what a host program's locale may do.
class OddNumbers : public std::numpunct<char> {
  char do_decimal_point() const override { return ';'; }
  char do_thousands_sep() const override { return '_'; }
  std::string do_grouping() const override { return "\1"; }
};

TEST(Explain, TheHostsLocaleChangesNothing) {
  const ScheduleMap map = Batch{.lengths = {70'000, 3}, .kv_heads = 3, .tile_tokens = 16}.map(Policy::lean(), 7);
  const std::string text = to_text(map);
  const std::string json = to_json(map);
  const std::string svg = to_svg({map}, {});
  const std::locale before = std::locale::global(std::locale(std::locale::classic(), new OddNumbers));
  const bool same = to_text(map) == text && to_json(map) == json && to_svg({map}, {}) == svg;
  std::locale::global(before);
  EXPECT_TRUE(same);
}

/// One element of an SVG: its name and attributes.
struct Element {
  std::string name;
  std::map<std::string, std::string> attributes = {};

  [[nodiscard]] double number(const std::string& key) const { return std::strtod(attributes.at(key).c_str(), nullptr); }
};

/// Reads a document whose every tag must be closed and whose attributes must be quoted.
std::vector<Element> elements_of(const std::string& svg) {
  std::vector<Element> elements;
  std::vector<std::string> open;
  for (std::size_t at = svg.find('<'); at != std::string::npos; at = svg.find('<', at)) {
    const std::size_t end = svg.find('>', at);
    EXPECT_NE(end, std::string::npos);
    std::string tag = svg.substr(at + 1, end - at - 1);
    at = end;
    if (tag[0] == '?') continue;
    if (tag[0] == '/') {
      EXPECT_FALSE(open.empty());
      EXPECT_EQ(open.back(), tag.substr(1));
      open.pop_back();
      continue;
    }
    const bool closed = tag.back() == '/';
    if (closed) tag.pop_back();
    Element element = {.name = tag.substr(0, tag.find(' '))};
    for (std::size_t equals = tag.find("=\""); equals != std::string::npos; equals = tag.find("=\"", equals + 1)) {
      const std::size_t key = tag.rfind(' ', equals) + 1;
      element.attributes[tag.substr(key, equals - key)] = tag.substr(equals + 2, tag.find('"', equals + 2) - equals - 2);
    }
    if (!closed) open.push_back(element.name);
    elements.push_back(std::move(element));
  }
  EXPECT_TRUE(open.empty());
  return elements;
}

void expect_drawable(const std::string& svg) {
  const std::vector<Element> elements = elements_of(svg);
  ASSERT_EQ(elements.at(0).name, "svg");
  const double width = elements[0].number("width");
  const double height = elements[0].number("height");
  for (const Element& element : elements) {
    if (element.name != "rect" || !element.attributes.contains("x")) continue;
    ASSERT_GE(element.number("width"), 0.0);
    ASSERT_GE(element.number("height"), 0.0);
    ASSERT_GE(element.number("x"), 0.0);
    ASSERT_LE(element.number("x") + element.number("width"), width + 0.01);
    ASSERT_LE(element.number("y") + element.number("height"), height + 0.01);
  }
  EXPECT_EQ(svg.find("nan"), std::string::npos);
  EXPECT_EQ(svg.find("href"), std::string::npos) << "self-contained";
  EXPECT_EQ(svg.find("inf\""), std::string::npos);
}

TEST(ExplainSvg, IsWellFormedAndStaysInItsFrameForAnyBatchAndAnyWorkers) {
  Stream random(3);
  for (std::int32_t round = 0; round < support::full_or_reduced(30, 6); ++round) {
    const Batch batch = random_batch(random);
    std::vector<ScheduleMap> maps;
    for (const std::int32_t workers : {1, 2, 8, 132}) {
      for (const Policy& policy : policies()) maps.push_back(batch.map(policy, workers));
    }
    expect_drawable(to_svg(maps, {.title = "five & <four>", .columns = static_cast<std::int32_t>(random.between(1, 5))}));
    if (HasFatalFailure()) return;
  }
}

TEST(ExplainSvg, ShowsEveryPolicyItsBalanceAndTheIdlePart) {
  const std::string svg =
      to_svg({paper().map(Policy::lean(), 5), paper().map(Policy::fixed_split(2), 5), paper().map(Policy::data_parallel(), 5)},
             {.title = "Figure 1 & more", .columns = 3});
  for (const char* words :
       {"Figure 1 &amp; more", "lean (stream-K)", "fixed split x 2 (FlashDecoding)", "data parallel (FlashAttention-2)",
        "balance 100.0 %", "balance 66.6 %", "balance 40.0 %", "5 of 5 workers busy", "2 of 5 workers busy"}) {
    EXPECT_NE(svg.find(words), std::string::npos) << words;
  }
  std::int32_t idle = 0;
  for (const Element& element : elements_of(svg)) {
    idle += element.name == "rect" && element.attributes.contains("fill") && element.attributes.at("fill") == "url(#idle)" ? 1 : 0;
  }
  EXPECT_EQ(idle, 0 + 3 + 3 + 1) << "idle rows of the three panels, and the legend";
}

TEST(ExplainSvg, ABarIsAsLongAsItsShare) {
  const ScheduleMap map = Batch{.lengths = {1000, 500}, .tile_tokens = 10}.map(Policy::data_parallel(), 2);
  ASSERT_EQ(map.workers[0].tiles, 2 * map.workers[1].tiles);
  std::vector<double> widths;  // of the two bars; a gap of 1.2 pixels tells neighbours apart
  for (const Element& element : elements_of(to_svg({map}, {}))) {
    if (element.name != "rect" || !element.attributes.contains("x") || std::fabs(element.number("height") - 34.0 * 0.8) > 0.01)
      continue;
    if (element.attributes.at("fill") != "url(#idle)") widths.push_back(element.number("width") + 1.2);
  }
  ASSERT_EQ(widths.size(), 2U);
  EXPECT_NEAR(widths[0], 2.0 * widths[1], 0.05);
}

TEST(ExplainSvg, AHugeBatchStaysAFigureABrowserOpens) {
  Batch batch = {.kv_heads = 8, .tile_tokens = 128};
  Stream random(4);
  for (std::int32_t b = 0; b < 20'000; ++b) batch.lengths.push_back(static_cast<std::int32_t>(random.between(0, 4000)));
  const std::string svg = to_svg({batch.map(Policy::lean(), 132)}, {});
  EXPECT_LT(svg.size(), 8U << 20);
  expect_drawable(svg);
}

}  // namespace
}  // namespace lean::explain
