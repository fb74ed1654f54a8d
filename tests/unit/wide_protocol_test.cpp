// Who waits for whom in a CTA of many rows, or of a latent tile, as a model on threads: a producer and two consumer warpgroups, or
// one, with the kernel's barriers, phases and places (src/backends/cuda/kernel/load/producer.cuh, wide_consumer.cuh), where queries have one
// place or two. Memory that a barrier would leave open holds another tile than the consumer wants, and is a data race for
// ThreadSanitizer. Mistakes are made on purpose, too, each in a process of its own, which has to notice.
#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <cstdlib>
#include <numeric>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "backends/cuda/kernel_rows.hpp"
#include "support/random.hpp"
#include "support/reduced.hpp"
#include "unit/wide_protocol_cta.hpp"

namespace lean::cuda::protocol {
namespace {

using support::Stream;

/// A consumer warpgroup.
class Consumer {
 public:
  Consumer(Cta& cta, std::size_t group) : cta_(cta), group_(group), stage_{cta.kind.stages} {}

  /// What take_latent_tiles() does with a segment's tiles: each warpgroup gives the other the weights of half the tokens, and now
  /// and then what its rows refer to.
  std::string take_latent_tiles(std::int32_t begin, std::int32_t end, std::int32_t queries) {
    for (std::int32_t tile = begin; tile < end; ++tile) {
      if (!await(stage_)) return "no tile comes";
      if (queries != cta_.queries_of(0)) return "queries of another segment";
      const std::int32_t keys = held(stage_);
      auto& column = cta_.at(stage_).last_column;
      if (column[0] != 2 * tile || column[1] != 2 * tile) return "another tile's last column";  // scores of all keys
      if (tile + 1 == end) cta_.queries_free.arrive();
      if (!cta_.scored.sync(group_)) return "the other has no scores";
      if (tile % 3 == 0 && !exchange(tile)) return "rows of another tile";
      column[group_] = -1 - tile;
      if (!cta_.given.sync(group_)) return "the other gives no weights";
      if (column[1 - group_] != -1 - tile) return "another tile's weights";
      if (keys != 2 * tile || held(stage_) != 2 * tile) return "another tile";  // scores, then values
      free(stage_);
      stage_.advance();
    }
    return "";
  }

  /// What finish() of a latent tile does, of a segment with tiles or without.
  bool finish_latent(std::int32_t segment) { return cta_.scored.sync(group_) && exchange(-1 - segment); }

  /// What take_tiles() does: the values of a tile are multiplied beside the scores of the next.
  std::string take_tiles(std::int32_t begin, std::int32_t end, std::int32_t segment, std::int32_t record) {
    Pipeline values = stage_;
    if (!await(stage_)) return "no keys come";
    for (std::int32_t tile = begin;; ++tile) {
      if (held(stage_) != 2 * tile) return "another tile's keys";
      if (cta_.queries_of(record) != segment) return "queries of another segment";
      free(stage_);
      if (cta_.kind.query_places == 1 && tile + 1 == end) cta_.queries_free.arrive();
      const Pipeline multiplied = values;
      values = stage_;
      values.advance();
      stage_ = values;
      stage_.advance();
      if (tile > begin) {
        if (held(multiplied) != 2 * tile - 1) return "another tile's values";
        free(multiplied);
      }
      if (tile + 1 == end) break;
      if (!await(stage_)) return "no keys come";
      if (!await(values)) return "no values come";
    }
    if (!await(values)) return "no values come";
    if (held(values) != 2 * end - 1) return "another tile's values";
    free(values);
    return "";
  }

 private:
  bool await(const Pipeline& stage) { return cta_.full(stage, 0).wait(stage.phase); }
  [[nodiscard]] std::int32_t held(const Pipeline& stage) const { return cta_.at(stage).parts[0].rows; }
  void free(const Pipeline& stage) { cta_.free(stage, 0).arrive(); }

  bool exchange(std::int32_t number) {
    cta_.kept[group_] = number;
    return cta_.given.sync(group_) && cta_.kept[1 - group_] == number;
  }

  Cta& cta_;
  std::size_t group_;
  Pipeline stage_;  // of the next keys
};

/// A consumer warpgroup of a latent tile in turns: it makes the weights of every other tile of a segment, and multiplies those of
/// all by its own values, which lie in the part of a stage that has its number. Products run from when they are asked for to when
/// they are awaited, so what they read is looked at at both ends.
class TurnsConsumer {
 public:
  TurnsConsumer(Cta& cta, std::size_t group) : cta_(cta), group_(group), random_(31 + group), stage_{cta.kind.stages} {}

  [[nodiscard]] const std::string& fault() const { return fault_; }

  /// Before the first segment: maxima that nobody takes, and sums.
  bool rehearse() {
    cta_.kept[group_] = 0;
    return finish(-1);
  }

  /// What take_latent_tiles_in_turns() does with a segment's tiles.
  bool take(const Tiles& tiles) {
    std::int32_t own = tiles.begin;
    if (own == tiles.end) return free_queries();
    const Pipeline first = stage_;
    if (second()) stage_.advance(), ++own;
    if (own == tiles.end) free_queries();
    if (own < tiles.end && !(ask_for_scores(tiles, own) && await_scores(tiles, own))) return false;
    if (second() && !(ask_for_given_output(tiles.begin, first) && await_given_output(tiles.begin, first))) return false;
    while (own < tiles.end) {
      if (!give_weights(own) || !reads_values(own, stage_)) return false;
      const std::int32_t multiplied = own;
      const std::int32_t others = own + 1;
      own += 2;
      if (own >= tiles.end) free_queries();
      if (!second()) free(stage_, 1);
      if (!await_output(multiplied, stage_)) return false;
      free(stage_, own_part());
      stage_.advance();
      if (others >= tiles.end) break;
      const Pipeline given = stage_;
      if (!ask_for_given_output(others, given)) return false;
      stage_.advance();
      const bool more = own < tiles.end;
      if (more && !ask_for_scores(tiles, own)) return false;
      if (!await_given_output(others, given)) return false;
      if (more && !await_scores(tiles, own)) return false;
    }
    return true;
  }

  /// What finish() does, of a segment with tiles or without: each has the other's sums. They have places of their own, since a
  /// warpgroup gives maxima of the next segment while the other still reads them.
  bool finish(std::int32_t segment) {
    const std::size_t first = is(Mistake::kSumsWhereMaximaAre) ? 0 : kGroups;
    if (!is(Mistake::kOneBarrierAtEnd) && !cta_.here.sync(group_)) return fail("the other does not finish");
    cta_.kept[first + group_] = -1 - segment;
    if (!cta_.here.sync(group_)) return fail("the other has no sums");
    linger(random_);
    return (cta_.kept[first] == -1 - segment && cta_.kept[first + 1] == -1 - segment) || fail("sums of another segment");
  }

 private:
  [[nodiscard]] bool second() const { return group_ == 1; }
  [[nodiscard]] std::int32_t own_part() const { return static_cast<std::int32_t>(group_); }
  [[nodiscard]] bool is(Mistake mistake) const { return cta_.kind.mistake == mistake; }
  [[nodiscard]] bool lets_go_early() const { return second() && is(Mistake::kLetGoBeforeWeightsAreHad); }
  bool fail(const std::string& fault) {
    fault_ = fault;
    return false;
  }
  bool await(const Pipeline& stage, std::int32_t part) { return cta_.full(stage, part).wait(stage.phase) || fail("no tile comes"); }
  void free(const Pipeline& stage, std::int32_t part) { cta_.free(stage, part).arrive(); }
  bool free_queries() {
    cta_.queries_free.arrive();
    return true;
  }

  /// Of the tile in stage_, part after part as they come. What one that is not whole lacks is cleared first.
  bool ask_for_scores(const Tiles& tiles, std::int32_t own) {
    if (!await(stage_, 0)) return false;
    if (!tiles.is_whole(own)) {
      if (!await(stage_, 1)) return false;
      for (Part& part : cta_.at(stage_).parts) part.rest = 2 * own;
    }
    if (!reads_keys(tiles, own, 0)) return false;
    if (!is(Mistake::kScoresOfOnePart) && !await(stage_, 1)) return false;
    return reads_keys(tiles, own, 1);
  }
  bool await_scores(const Tiles& tiles, std::int32_t own) {
    linger(random_);
    return reads_keys(tiles, own, 0) && reads_keys(tiles, own, 1);
  }
  bool reads_keys(const Tiles& tiles, std::int32_t own, std::size_t part) {
    if (cta_.queries_of(0) != tiles.segment) return fail("queries of another segment");
    const Stage& stage = cta_.at(stage_);
    const bool column = part == 0 || stage.last_column[0] == 2 * own;
    return (column && stage.parts[part].rows == 2 * own && stage.parts[part].rest == 2 * own) || fail("another tile's keys");
  }

  /// They lie in the stage's last column, and what they refer to lies apart.
  bool give_weights(std::int32_t own) {
    cta_.at(stage_).last_column[0] = -1 - own;
    cta_.kept[group_] = own;
    return cta_.turns[group_].arrive(group_) || fail("the other did not take the weights before");
  }
  /// Once the other gives its weights, which it does once both parts have come.
  bool ask_for_given_output(std::int32_t tile, const Pipeline& stage) {
    if (!await(stage, own_part())) return false;
    if (!cta_.turns[1 - group_].sync(group_)) return fail("the other gives no weights");
    if (lets_go_early()) free(stage, 1);
    linger(random_);
    if (cta_.kept[1 - group_] != tile) return fail("another tile's maxima");
    if (cta_.at(stage).last_column[0] != -1 - tile) return fail("another tile's weights");
    if (!reads_values(tile, stage)) return false;
    if (!second()) free(stage, 1);
    return true;
  }

  bool reads_values(std::int32_t tile, const Pipeline& stage) {
    const Part& held = cta_.at(stage).parts[group_];
    return (held.rows == 2 * tile && held.rest == 2 * tile) || fail("another tile's values");
  }
  bool await_output(std::int32_t tile, const Pipeline& stage) {
    linger(random_);
    return reads_values(tile, stage);
  }
  bool await_given_output(std::int32_t tile, const Pipeline& stage) {
    if (!await_output(tile, stage)) return false;
    if (!lets_go_early()) free(stage, own_part());
    return true;
  }

  Cta& cta_;
  std::size_t group_;
  Stream random_;
  Pipeline stage_;  // of the next tile, or of the one that is made
  std::string fault_;
};

/// The one consumer warpgroup of a swapped tile, whose stages come and go part by part. Products run from when they are asked for to when
/// they are awaited, so what they read is looked at at both ends.
class SwappedConsumer {
 public:
  explicit SwappedConsumer(Cta& cta) : cta_(cta), random_(37), stage_{cta.kind.stages} {}

  /// What take_swapped_tiles() does with a segment's tiles.
  std::string take(const Tiles& tiles, std::int32_t record) {
    if (tiles.begin == tiles.end) free_queries();
    for (std::int32_t tile = tiles.begin; tile < tiles.end; ++tile, stage_.advance()) {
      if (!tiles.is_whole(tile)) {
        if (!await(parts())) return "no tile comes";
        for (Part& part : cta_.at(stage_).parts) part.rest = 2 * tile;
      }
      for (std::int32_t part = 0; part < parts(); ++part) {
        if ((part == 0 || !is(Mistake::kScoresOfOnePart)) && !await(part + 1)) return "no tile comes";
        if (!reads(tile, part)) return "another tile's keys";
      }
      linger(random_);
      for (std::int32_t part = 0; part < parts(); ++part) {
        if (!reads(tile, part)) return "another tile's keys";
      }
      if (cta_.at(stage_).last_column[0] != 2 * tile) return "another tile's last column";
      if (cta_.queries_of(record) != tiles.segment) return "queries of another segment";
      if (tile + 1 == tiles.end) free_queries();
      for (std::int32_t part = 0; part < parts(); ++part) {
        linger(random_);
        if (!reads(tile, part)) return "another tile's values";
        const std::int32_t end = is(Mistake::kLetGoOfAllParts) && part == 0 ? parts() : part + 1;
        if (part > 0 && is(Mistake::kLetGoOfAllParts)) continue;
        for (std::int32_t freed = part; freed < end; ++freed) cta_.free(stage_, freed).arrive();
      }
    }
    return "";
  }

 private:
  [[nodiscard]] std::int32_t parts() const { return cta_.kind.parts(); }
  [[nodiscard]] bool is(Mistake mistake) const { return cta_.kind.mistake == mistake; }
  bool await(std::int32_t end) {
    for (std::int32_t part = 0; part < end; ++part) {
      if (!cta_.full(stage_, part).wait(stage_.phase)) return false;
    }
    return true;
  }
  bool reads(std::int32_t tile, std::int32_t part) const {
    const Part& held = cta_.at(stage_).parts[static_cast<std::size_t>(part)];
    return held.rows == 2 * tile && held.rest == 2 * tile;
  }
  void free_queries() {
    if (cta_.kind.query_places == 1) cta_.queries_free.arrive();
  }

  Cta& cta_;
  Stream random_;
  Pipeline stage_;
};

/// What a segment's tiles become, and its end.
std::string take_segment(Cta& cta, Consumer& consumer, const Tiles& tiles, std::int32_t record) {
  if (tiles.begin == tiles.end) {
    if (cta.kind.query_places == 1) cta.queries_free.arrive();
  } else {
    const std::string fault = cta.kind.latent ? consumer.take_latent_tiles(tiles.begin, tiles.end, tiles.segment)
                                              : consumer.take_tiles(tiles.begin, tiles.end, tiles.segment, record);
    if (!fault.empty()) return fault;
  }
  return cta.kind.latent && !consumer.finish_latent(tiles.segment) ? "sums of another segment" : "";
}

std::string consume(Cta& cta, std::size_t group, const std::vector<std::int32_t>& counts) {
  Consumer consumer(cta, group);
  TurnsConsumer in_turns(cta, group);
  SwappedConsumer swapped(cta);
  if (cta.kind.in_turns && !in_turns.rehearse()) return in_turns.fault();
  Pipeline records{kRecords};
  std::int32_t next = 0;
  for (std::int32_t segment = 0;; ++segment, records.advance()) {
    const auto at = static_cast<std::size_t>(records.index);
    if (!cta.record_full[at].wait(records.phase)) return "no record comes";
    if (cta.segment[at] == -1) return next == std::accumulate(counts.begin(), counts.end(), 0) ? "" : "tiles are left";
    if (cta.segment[at] != segment) return "another record";
    if (!cta.queries_full[at].wait(records.phase)) return "no queries come";
    const Tiles tiles{segment, next, next + counts[static_cast<std::size_t>(segment)]};
    if (cta.kind.swapped) {
      const std::string fault = swapped.take(tiles, records.index);
      if (!fault.empty()) return fault;
    } else if (cta.kind.in_turns) {
      if (!in_turns.take(tiles) || !in_turns.finish(segment)) return in_turns.fault();
    } else {
      const std::string fault = take_segment(cta, consumer, tiles, records.index);
      if (!fault.empty()) return fault;
    }
    next = tiles.end;
    if (!cta.contributors_known[at].wait(records.phase)) return "nobody says who shares the output";
    if (cta.contributors[at] != segment) return "contributors of another segment";
    cta.record_free[at].arrive();
  }
}

constexpr int kNoticed = 7;

/// What everybody says, the producer first. Whoever notices a mistake made on purpose ends the process: the others may wait for
/// long.
std::array<std::string, 1 + kGroups> run_cta(const Kind& kind, const std::vector<std::int32_t>& tiles) {
  Cta cta(kind);
  std::array<std::string, 1 + kGroups> faults;
  const auto note = [&](std::size_t who, std::string fault) {
    if (kind.mistake != Mistake::kNone && !fault.empty()) std::_Exit(kNoticed);
    faults[who] = std::move(fault);
  };
  Producer producer(cta);
  std::vector<std::jthread> threads;
  threads.emplace_back([&] { note(0, producer.run(tiles)); });
  for (std::size_t group = 1; group <= static_cast<std::size_t>(kind.groups()); ++group)
    threads.emplace_back([&, group] { note(group, consume(cta, group - 1, tiles)); });
  for (std::jthread& thread : threads) thread.join();
  return faults;
}

void run_rounds(const Kind& kind, std::int32_t rounds) {
  Stream random(29);
  for (std::int32_t round = 0; round < rounds; ++round) {
    std::vector<std::int32_t> tiles(static_cast<std::size_t>(random.between(0, 40)));
    for (std::int32_t& count : tiles) count = static_cast<std::int32_t>(random.chance(30) ? 0 : random.between(1, 7));
    for (const std::string& fault : run_cta(kind, tiles))
      ASSERT_EQ(fault, "") << "round " << round << ", " << kind.stages << " stages";
  }
}

TEST(WideProtocol, EverybodyGetsWhatTheyWaitForAndNobodyTooEarly) {
  bool one_place = false;
  for (const KernelRow& row : kWideRows) {
    const KernelConfig config = config_of(kWideRows.architecture, row, DType::kBFloat16);
    for (std::int32_t stages = 2; stages <= (config.latent() ? 2 : kMostStages); ++stages) {
      const Kind kind{.latent = config.latent(),
                      .in_turns = config.in_turns(),
                      .swapped = config.swaps_ab(),
                      .swapped_parts = config.swaps_ab() ? config.stage_parts() : 1,
                      .stages = stages,
                      .query_places = config.query_places()};
      EXPECT_EQ(kind.parts(), config.stage_parts());
      run_rounds(kind, support::full_or_reduced(100, 10));
    }
    one_place = one_place || (!config.latent() && config.query_places() == 1);
    EXPECT_TRUE(!config.latent() || config.swaps_ab() || config.query_places() == 1);
  }
  EXPECT_TRUE(one_place) << "of two kinds of tiles";
}

/// By a warpgroup that gets something else than it wants, or by ThreadSanitizer.
bool is_noticed(int status) {
  constexpr int kDataRace = 66;
  return testing::ExitedWithCode(kNoticed)(status) || testing::ExitedWithCode(kDataRace)(status);
}

TEST(WideProtocol, MistakesOfASwappedTileAreNoticed) {
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  for (const Mistake mistake : {Mistake::kScoresOfOnePart, Mistake::kLetGoOfAllParts}) {
    const Kind kind{.latent = true, .swapped = true, .swapped_parts = 4, .stages = 2, .query_places = 2, .mistake = mistake};
    EXPECT_EXIT((run_rounds(kind, 100), std::_Exit(0)), is_noticed, "") << static_cast<int>(mistake);
  }
}

TEST(WideProtocol, MistakesInTurnsAreNoticed) {
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  for (const Mistake mistake :
       {Mistake::kSumsWhereMaximaAre, Mistake::kOneBarrierAtEnd, Mistake::kScoresOfOnePart, Mistake::kLetGoBeforeWeightsAreHad}) {
    const Kind kind{.latent = true, .in_turns = true, .stages = 2, .query_places = 1, .mistake = mistake};
    EXPECT_EXIT((run_rounds(kind, 100), std::_Exit(0)), is_noticed, "") << static_cast<int>(mistake);
  }
}

}  // namespace
}  // namespace lean::cuda::protocol
