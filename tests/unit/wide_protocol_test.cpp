// Who waits for whom in a CTA of many rows, or of a latent tile, as a model on threads: a producer and two consumer warpgroups with the
// kernel's barriers, phases and places (src/backends/cuda/kernel/load/producer.cuh, wide_consumer.cuh), where queries have one place
// or two. Memory that a barrier would leave open holds another tile than the consumer wants, and is a data race for ThreadSanitizer.
#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "backends/cuda/kernel_rows.hpp"
#include "support/random.hpp"
#include "support/reduced.hpp"

namespace lean::cuda {
namespace {

using support::Stream;

/// An mbarrier of so many arrivals: wait() passes once the phase of that parity has ended.
class PhaseBarrier {
 public:
  explicit PhaseBarrier(std::int32_t arrivals) : arrivals_(arrivals) {}

  void arrive() {
    const std::lock_guard lock(mutex_);
    if (++arrived_ < arrivals_) return;
    arrived_ = 0;
    parity_ ^= 1U;
    changed_.notify_all();
  }
  /// False: nobody came for a long time.
  [[nodiscard]] bool wait(std::uint32_t parity) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, std::chrono::seconds(20), [&] { return parity_ != parity; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::int32_t arrivals_;
  std::int32_t arrived_ = 0;
  std::uint32_t parity_ = 0;  // of the phase that runs
};

/// PipelineState of kernel/load/ring.cuh.
struct Pipeline {
  std::int32_t count;
  std::int32_t index = 0;
  std::uint32_t phase = 0;

  void advance() {
    if (++index == count) index = 0, phase ^= 1U;
  }
};

constexpr std::int32_t kGroups = 2;
constexpr std::int32_t kMostStages = 4;
constexpr std::int32_t kRecords = 2;

/// Of a variant.
struct Kind {
  bool latent = false;
  std::int32_t stages = 0;
  std::int32_t query_places = 0;
};

struct Cta {
  Kind kind;
  std::array<PhaseBarrier, kMostStages> stage_full{PhaseBarrier(1), PhaseBarrier(1), PhaseBarrier(1), PhaseBarrier(1)};
  std::array<PhaseBarrier, kMostStages> stage_free{PhaseBarrier(kGroups), PhaseBarrier(kGroups), PhaseBarrier(kGroups),
                                                   PhaseBarrier(kGroups)};
  std::array<PhaseBarrier, kRecords> record_full{PhaseBarrier(1), PhaseBarrier(1)};
  std::array<PhaseBarrier, kRecords> record_free{PhaseBarrier(kGroups + 1), PhaseBarrier(kGroups + 1)};
  std::array<PhaseBarrier, kRecords> queries_full{PhaseBarrier(1), PhaseBarrier(1)};
  PhaseBarrier queries_free{kGroups};
  std::array<PhaseBarrier, kRecords> contributors_known{PhaseBarrier(1), PhaseBarrier(1)};
  // What lies in shared memory: -1 is the end. Of a tile, keys are 2 x its number and values one more; a latent tile is keys.
  std::array<std::int32_t, kMostStages> stage{};
  std::array<std::int32_t, kRecords> segment{};
  std::array<std::int32_t, kRecords> contributors{};
  std::array<std::int32_t, kRecords> queries{};  // of which segment
  // Of a latent tile: the barriers that both warpgroups come to; what each gives the other in the last column of a stage's keys; and
  // what it has of its rows.
  PhaseBarrier scored{kGroups};
  PhaseBarrier given{kGroups};
  std::array<std::array<std::int32_t, kGroups>, kMostStages> last_column{};
  std::array<std::int32_t, kGroups> kept{};

  std::int32_t& queries_of(std::int32_t record) { return queries[static_cast<std::size_t>(kind.query_places == 1 ? 0 : record)]; }
};

/// Tiles are numbered over all segments, which have so many each.
class Producer {
 public:
  explicit Producer(Cta& cta) : cta_(cta), ring_{cta.kind.stages} {}

  std::string run(const std::vector<std::int32_t>& tiles) {
    Pipeline records{kRecords};
    for (std::int32_t segment = 0;; ++segment, records.advance()) {
      const auto at = static_cast<std::size_t>(records.index);
      const bool more = segment < static_cast<std::int32_t>(tiles.size());
      if (!cta_.record_free[at].wait(records.phase ^ 1U)) return "no place for a record";
      cta_.segment[at] = more ? segment : -1;
      cta_.record_full[at].arrive();
      if (!more) return "";
      const std::string fault = copy_segment(segment, next_ + tiles[static_cast<std::size_t>(segment)], records);
      if (!fault.empty()) return fault;
      cta_.record_free[at].arrive();
    }
  }

 private:
  std::string copy_segment(std::int32_t segment, std::int32_t end, const Pipeline& records) {
    const auto at = static_cast<std::size_t>(records.index);
    const std::int32_t first = cta_.kind.query_places == 2 && segment > 0 ? -1 : 0;
    for (std::int32_t copy = first; copy < 2 || next_ < end; ++copy) {
      const bool keys = cta_.kind.latent || copy % 2 == 0;
      if (copy >= 0 && next_ < end && !ask(ring_, 2 * next_ + (keys ? 0 : 1))) return "no stage is free";
      if (copy == first) {
        if (cta_.kind.query_places == 1 && !cta_.queries_free.wait(static_cast<std::uint32_t>(records.index) ^ 1U))
          return "queries stay in use";
        cta_.queries_of(records.index) = segment;
        cta_.queries_full[at].arrive();
      }
      if (copy == 1) {
        cta_.contributors[at] = segment;
        cta_.contributors_known[at].arrive();
      }
      if (copy >= 0 && next_ < end && (cta_.kind.latent || !keys)) ++next_;
      // Of every other segment the last tile is not a whole one, of every third the first.
      const bool whole_next = copy > 0 || segment % 3 != 0;
      if (copy != 0 && whole_next && (cta_.kind.latent || !keys) && !copy_whole_tiles(end - next_ - segment % 2))
        return "no stage is free for a tile";
    }
    return "";
  }

  /// The keys of a tile ahead of the values of the one before.
  bool copy_whole_tiles(std::int32_t tiles) {
    if (tiles <= 0) return true;
    Pipeline values = ring_;
    values.advance();
    for (std::int32_t tile = 0; tile < tiles + (cta_.kind.latent ? 0 : 1); ++tile) {
      if (tile < tiles) {
        if (!ask(ring_, 2 * (next_ + tile))) return false;
        if (!cta_.kind.latent) ring_.advance();
      }
      if (cta_.kind.latent || tile == 0) continue;
      if (!ask(values, 2 * (next_ + tile) - 1)) return false;
      values.advance();
    }
    next_ += tiles;
    return true;
  }

  bool ask(Pipeline& stage, std::int32_t what) {
    const auto at = static_cast<std::size_t>(stage.index);
    if (!cta_.stage_free[at].wait(stage.phase ^ 1U)) return false;
    cta_.stage[at] = what;
    cta_.last_column[at] = {what / 2 * 2, what / 2 * 2};
    cta_.stage_full[at].arrive();
    stage.advance();
    return true;
  }

  Cta& cta_;
  Pipeline ring_;
  std::int32_t next_ = 0;  // tile
};

/// A consumer warpgroup.
class Consumer {
 public:
  Consumer(Cta& cta, std::size_t group) : cta_(cta), group_(group), stage_{cta.kind.stages} {}

  /// What take_latent_tiles() does with a segment's tiles: each warpgroup gives the other the weights of half the tokens, and now and
  /// then what its rows refer to.
  std::string take_latent_tiles(std::int32_t begin, std::int32_t end, std::int32_t queries) {
    for (std::int32_t tile = begin; tile < end; ++tile) {
      if (!await(stage_)) return "no tile comes";
      if (queries != cta_.queries_of(0)) return "queries of another segment";
      const std::int32_t keys = held(stage_);
      auto& column = cta_.last_column[static_cast<std::size_t>(stage_.index)];
      if (column[0] != 2 * tile || column[1] != 2 * tile) return "another tile's last column";  // scores of all keys
      if (tile + 1 == end) cta_.queries_free.arrive();
      if (!meet(cta_.scored, scored_)) return "the other has no scores";
      if (tile % 3 == 0 && !exchange(tile)) return "rows of another tile";
      column[group_] = -tile;
      if (!meet(cta_.given, given_)) return "the other gives no weights";
      if (column[1 - group_] != -tile) return "another tile's weights";
      if (keys != 2 * tile || held(stage_) != 2 * tile) return "another tile";  // scores, then values
      free(stage_);
      stage_.advance();
    }
    return "";
  }

  /// What finish() of a latent tile does, of a segment with tiles or without.
  bool finish_latent(std::int32_t segment) { return meet(cta_.scored, scored_) && exchange(-1 - segment); }

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
  bool await(const Pipeline& stage) { return cta_.stage_full[static_cast<std::size_t>(stage.index)].wait(stage.phase); }
  [[nodiscard]] std::int32_t held(const Pipeline& stage) const { return cta_.stage[static_cast<std::size_t>(stage.index)]; }
  void free(const Pipeline& stage) { cta_.stage_free[static_cast<std::size_t>(stage.index)].arrive(); }

  static bool meet(PhaseBarrier& barrier, std::uint32_t& phase) {
    barrier.arrive();
    const bool met = barrier.wait(phase);
    phase ^= 1U;
    return met;
  }
  bool exchange(std::int32_t number) {
    cta_.kept[group_] = number;
    return meet(cta_.given, given_) && cta_.kept[1 - group_] == number;
  }

  Cta& cta_;
  std::size_t group_;
  std::uint32_t scored_ = 0;  // phases
  std::uint32_t given_ = 0;
  Pipeline stage_;  // of the next keys
};

std::string consume(Cta& cta, std::size_t group, const std::vector<std::int32_t>& tiles) {
  Consumer consumer(cta, group);
  Pipeline records{kRecords};
  std::int32_t next = 0;
  for (std::int32_t segment = 0;; ++segment, records.advance()) {
    const auto at = static_cast<std::size_t>(records.index);
    if (!cta.record_full[at].wait(records.phase)) return "no record comes";
    if (cta.segment[at] == -1) return next == std::accumulate(tiles.begin(), tiles.end(), 0) ? "" : "tiles are left";
    if (cta.segment[at] != segment) return "another record";
    if (!cta.queries_full[at].wait(records.phase)) return "no queries come";
    const std::int32_t end = next + tiles[static_cast<std::size_t>(segment)];
    if (next == end) {
      if (cta.kind.query_places == 1) cta.queries_free.arrive();
    } else {
      const std::string fault =
          cta.kind.latent ? consumer.take_latent_tiles(next, end, segment) : consumer.take_tiles(next, end, segment, records.index);
      if (!fault.empty()) return fault;
    }
    if (cta.kind.latent && !consumer.finish_latent(segment)) return "sums of another segment";
    next = end;
    if (!cta.contributors_known[at].wait(records.phase)) return "nobody says who shares the output";
    if (cta.contributors[at] != segment) return "contributors of another segment";
    cta.record_free[at].arrive();
  }
}

void run_rounds(const Kind& kind) {
  Stream random(29);
  for (std::int32_t round = 0; round < support::full_or_reduced(100, 10); ++round) {
    std::vector<std::int32_t> tiles(static_cast<std::size_t>(random.between(0, 40)));
    for (std::int32_t& count : tiles) count = static_cast<std::int32_t>(random.chance(30) ? 0 : random.between(1, 7));
    Cta cta{.kind = kind};
    std::array<std::string, 1 + kGroups> faults;
    {
      std::vector<std::jthread> threads;
      threads.emplace_back([&] { faults[0] = Producer(cta).run(tiles); });
      for (std::size_t group = 1; group <= kGroups; ++group)
        threads.emplace_back([&, group] { faults[group] = consume(cta, group - 1, tiles); });
    }
    for (const std::string& fault : faults) ASSERT_EQ(fault, "") << "round " << round << ", " << kind.stages << " stages";
  }
}

TEST(WideProtocol, EverybodyGetsWhatTheyWaitForAndNobodyTooEarly) {
  bool one_place = false;
  for (const KernelRow& row : kWideRows) {
    const KernelConfig config = config_of(kWideRows.architecture, row, DType::kBFloat16);
    for (std::int32_t stages = 2; stages <= (config.latent() ? 2 : kMostStages); ++stages) {
      run_rounds({.latent = config.latent(), .stages = stages, .query_places = config.query_places()});
    }
    one_place = one_place || (!config.latent() && config.query_places() == 1);
    EXPECT_TRUE(!config.latent() || config.query_places() == 1);
  }
  EXPECT_TRUE(one_place) << "of two kinds of tiles";
}

}  // namespace
}  // namespace lean::cuda
