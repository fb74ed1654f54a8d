// A CTA of many rows, or of a latent tile, as a model on threads: the kernel's barriers, what lies in shared memory, and the
// producer (src/backends/cuda/kernel/load/producer.cuh) with what copies for it. A tile's bytes are its number. Memory is plain,
// so that who reads or writes it with no barrier in between is a data race for ThreadSanitizer. Used by the test of the wide
// protocol.
#pragma once

#include <array>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <stop_token>
#include <string>
#include <thread>
#include <vector>

#include "support/random.hpp"

namespace lean::cuda::protocol {

constexpr std::int32_t kGroups = 2;
constexpr std::int32_t kMostStages = 4;
constexpr std::int32_t kMostParts = 4;
constexpr std::int32_t kRecords = 2;
constexpr std::chrono::seconds kPatience(20);  // after so long nobody comes any more

/// An mbarrier of so many arrivals: wait() passes once the phase of that parity has ended.
class PhaseBarrier {
 public:
  void begin(std::int32_t arrivals) { left_ = arrivals_ = arrivals; }

  void arrive() {
    const std::lock_guard lock(mutex_);
    --left_;
    end_phase();
  }
  /// The phase ends no earlier than what is promised is kept. By who arrives afterwards.
  void promise() {
    const std::lock_guard lock(mutex_);
    ++promised_;
  }
  void keep_promise() {
    const std::lock_guard lock(mutex_);
    --promised_;
    end_phase();
  }
  /// False: nobody came for a long time.
  [[nodiscard]] bool wait(std::uint32_t parity) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, kPatience, [&] { return parity_ != parity; });
  }

 private:
  void end_phase() {
    if (left_ > 0 || promised_ > 0) return;
    left_ = arrivals_;
    parity_ ^= 1U;
    changed_.notify_all();
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::int32_t arrivals_ = 1;
  std::int32_t left_ = 1;
  std::int32_t promised_ = 0;
  std::uint32_t parity_ = 0;  // of the phase that runs
};

/// A named barrier that each warpgroup comes to once, whether it waits for the other or not.
class NamedBarrier {
 public:
  /// False: it has been there, and the other has not yet.
  [[nodiscard]] bool arrive(std::size_t group) {
    const std::lock_guard lock(mutex_);
    return come(group);
  }
  /// False: the same, or the other does not come for a long time.
  [[nodiscard]] bool sync(std::size_t group) {
    std::unique_lock lock(mutex_);
    const std::int32_t round = round_;
    return come(group) && changed_.wait_for(lock, kPatience, [&] { return round_ != round; });
  }

 private:
  bool come(std::size_t group) {
    if (came_[group]) return false;
    came_[group] = true;
    if (!came_[1 - group]) return true;
    came_ = {};
    ++round_;
    changed_.notify_all();
    return true;
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::array<bool, kGroups> came_{};
  std::int32_t round_ = 0;
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

/// What somebody does worse than the kernel, which has to be noticed.
enum class Mistake : std::uint8_t {
  kNone,
  kSumsWhereMaximaAre,        // that are exchanged at a segment's end
  kOneBarrierAtEnd,           // of a segment, where there are two
  kScoresOfOnePart,           // made once it has come, whatever has become of the other
  kLetGoBeforeWeightsAreHad,  // of where they are given
  kLetGoOfAllParts,           // of a stage, where the first is multiplied
};

/// Of a variant.
struct Kind {
  bool latent = false;
  bool in_turns = false;
  bool swapped = false;
  std::int32_t swapped_parts = 1;
  std::int32_t stages = 0;
  std::int32_t query_places = 0;
  Mistake mistake = Mistake::kNone;

  [[nodiscard]] std::int32_t parts() const { return in_turns ? 2 : swapped_parts; }
  /// Consumer warpgroups.
  [[nodiscard]] std::int32_t groups() const { return swapped ? 1 : kGroups; }
};

/// Those of a segment: tiles are numbered over all segments, which have so many each. Of every other segment the last is not a
/// whole one, of every third the first.
struct Tiles {
  std::int32_t segment;
  std::int32_t begin;
  std::int32_t end;

  [[nodiscard]] bool is_whole(std::int32_t tile) const {
    return (tile + 1 < end || segment % 2 == 0) && (tile > begin || segment % 3 != 0);
  }
};

/// What lies in a part of a stage. Of a tile, keys are 2 x its number and values one more; a latent tile is keys.
struct Part {
  std::int32_t rows = 0;  // of tokens that there are
  std::int32_t rest = 0;  // behind them: of a whole tile the same, else what lay there, until it is cleared
};

/// One of one part has the first. A part's numbers lie together: from an array of each, g++ 12 made (-O3, -fpredictive-commoning)
/// a copy into the first part that reads the second's rows and writes them again, over what another thread copies there.
struct Stage {
  std::array<Part, kMostParts> parts{};
  std::array<std::int32_t, kGroups> last_column{};
};

struct Cta {
  explicit Cta(const Kind& of) : kind(of) {
    for (auto& parts : stage_free) {
      for (PhaseBarrier& part : parts) part.begin(kind.groups());
      if (kind.in_turns) parts[0].begin(1);
    }
    for (PhaseBarrier& record : record_free) record.begin(kind.groups() + 1);
    queries_free.begin(kind.groups());
  }

  Kind kind;
  std::array<std::array<PhaseBarrier, kMostParts>, kMostStages> stage_full;
  std::array<std::array<PhaseBarrier, kMostParts>, kMostStages> stage_free;
  std::array<PhaseBarrier, kRecords> record_full;
  std::array<PhaseBarrier, kRecords> record_free;
  std::array<PhaseBarrier, kRecords> queries_full;
  PhaseBarrier queries_free;
  std::array<PhaseBarrier, kRecords> contributors_known;
  // Of a latent tile. In halves: both have scores, or weights; in turns: a warpgroup's weights are there; and both are here.
  NamedBarrier scored;
  NamedBarrier given;
  std::array<NamedBarrier, kGroups> turns;
  NamedBarrier here;
  // What lies in shared memory: -1 is the end.
  std::array<Stage, kMostStages> stages{};
  std::array<std::int32_t, kRecords> segment{};
  std::array<std::int32_t, kRecords> contributors{};
  std::array<std::int32_t, kRecords> queries{};  // of which segment
  std::array<std::int32_t, 2 * kGroups> kept{};  // what a warpgroup has of its rows, in turns in two places each: maxima, then sums

  std::int32_t& queries_of(std::int32_t record) { return queries[static_cast<std::size_t>(kind.query_places == 1 ? 0 : record)]; }
  Stage& at(const Pipeline& stage) { return stages[static_cast<std::size_t>(stage.index)]; }
  PhaseBarrier& full(const Pipeline& stage, std::int32_t part) {
    return stage_full[static_cast<std::size_t>(stage.index)][static_cast<std::size_t>(part)];
  }
  PhaseBarrier& free(const Pipeline& stage, std::int32_t part) {
    return stage_free[static_cast<std::size_t>(stage.index)][static_cast<std::size_t>(part)];
  }
};

/// Now and then somebody takes their time.
inline void linger(support::Stream& random, int percent = 10) {
  if (random.chance(percent)) std::this_thread::sleep_for(std::chrono::microseconds(random.between(1, 100)));
}

/// Brings what is asked for, some time; two of them in any order.
class CopyEngine {
 public:
  struct Copy {
    Stage* stage;
    PhaseBarrier* full;  // which this has been promised to
    std::int32_t what;
    std::int32_t first_part;
    std::int32_t end_part;
    bool last;   // of its stage's
    bool whole;  // else the rest is left
  };

  explicit CopyEngine(std::int32_t seed)
      : random_(static_cast<std::uint64_t>(seed)), thread_([this](const std::stop_token& stop) { run(stop); }) {}

  void ask(const Copy& copy) {
    const std::lock_guard lock(mutex_);
    asked_.push_back(copy);
    changed_.notify_all();
  }

 private:
  void run(const std::stop_token& stop) {
    std::unique_lock lock(mutex_);
    while (changed_.wait(lock, stop, [&] { return !asked_.empty(); })) {
      const Copy copy = asked_.front();
      asked_.pop_front();
      lock.unlock();
      linger(random_, 3);
      for (std::int32_t part = copy.first_part; part < copy.end_part; ++part) {
        Part& into = copy.stage->parts[static_cast<std::size_t>(part)];
        into.rows = copy.what;
        if (copy.whole) into.rest = copy.what;
      }
      if (copy.last) copy.stage->last_column = {copy.what / 2 * 2, copy.what / 2 * 2};
      copy.full->keep_promise();
      lock.lock();
    }
  }

  support::Stream random_;
  std::mutex mutex_;
  std::condition_variable_any changed_;
  std::deque<Copy> asked_;
  std::jthread thread_;  // the last, which uses the others
};

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
      const std::string fault = copy_segment({segment, next_, next_ + tiles[static_cast<std::size_t>(segment)]}, records);
      if (!fault.empty()) return fault;
      cta_.record_free[at].arrive();
    }
  }

 private:
  std::string copy_segment(const Tiles& tiles, const Pipeline& records) {
    const auto at = static_cast<std::size_t>(records.index);
    const std::int32_t first = cta_.kind.query_places == 2 && tiles.segment > 0 ? -1 : 0;
    for (std::int32_t copy = first; copy < 2 || next_ < tiles.end; ++copy) {
      const bool keys = cta_.kind.latent || copy % 2 == 0;
      if (copy >= 0 && next_ < tiles.end && !copy_tile(tiles, 2 * next_ + (keys ? 0 : 1))) return "no stage is free";
      if (copy == first) {
        if (cta_.kind.query_places == 1 && !cta_.queries_free.wait(static_cast<std::uint32_t>(records.index) ^ 1U))
          return "queries stay in use";
        cta_.queries_of(records.index) = tiles.segment;
        cta_.queries_full[at].arrive();
      }
      if (copy == 1) {
        cta_.contributors[at] = tiles.segment;
        cta_.contributors_known[at].arrive();
      }
      if (copy >= 0 && next_ < tiles.end && (cta_.kind.latent || !keys)) ++next_;
      const bool whole_next = copy > 0 || tiles.segment % 3 != 0;
      if (copy != 0 && whole_next && (cta_.kind.latent || !keys) && !copy_whole_tiles(tiles.end - next_ - tiles.segment % 2))
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
        if (!copy_parts(ring_, 2 * (next_ + tile))) return false;
        if (!cta_.kind.latent) ring_.advance();
      }
      if (cta_.kind.latent || tile == 0) continue;
      if (!copy_parts(values, 2 * (next_ + tile) - 1)) return false;
      values.advance();
    }
    next_ += tiles;
    return true;
  }

  /// A whole tile, part after part as they are let go of.
  bool copy_parts(Pipeline& stage, std::int32_t what) {
    for (std::int32_t part = 0; part < cta_.kind.parts(); ++part) {
      if (!cta_.free(stage, part).wait(stage.phase ^ 1U)) return false;
      copy(stage, what, {.first_part = part, .end_part = part + 1, .whole = true});
      cta_.full(stage, part).arrive();
    }
    stage.advance();
    return true;
  }

  /// A tile with all its parts at once. Threads copy some of its tokens themselves, and arrive on all parts; the others come
  /// later, and are promised on the first part, so that the last has none that it waits for. Some tiles threads copy alone.
  bool copy_tile(const Tiles& tiles, std::int32_t what) {
    const std::int32_t parts = cta_.kind.parts();
    for (std::int32_t part = 0; part < parts; ++part) {
      if (!cta_.free(ring_, part).wait(ring_.phase ^ 1U)) return false;
    }
    Stage& stage = cta_.at(ring_);
    if (tiles.is_whole(what / 2)) {
      for (std::int32_t part = 0; part < parts; ++part) stage.parts[static_cast<std::size_t>(part)].rest = what;
    }
    if (tiles.segment % 4 != 3) {
      copy(ring_, what, {.first_part = 0, .end_part = parts, .whole = false});
    } else {
      for (Part& part : stage.parts) part.rows = what;
      stage.last_column = {what / 2 * 2, what / 2 * 2};
    }
    for (std::int32_t part = 0; part < parts; ++part) cta_.full(ring_, part).arrive();
    ring_.advance();
    return true;
  }

  struct Extent {
    std::int32_t first_part;
    std::int32_t end_part;
    bool whole;
  };
  /// Promised on the first of the parts, and brought later.
  void copy(const Pipeline& stage, std::int32_t what, const Extent& extent) {
    PhaseBarrier& full = cta_.full(stage, extent.first_part);
    full.promise();
    engines_[static_cast<std::size_t>((stage.index + extent.first_part) % 2)].ask({.stage = &cta_.at(stage),
                                                                                   .full = &full,
                                                                                   .what = what,
                                                                                   .first_part = extent.first_part,
                                                                                   .end_part = extent.end_part,
                                                                                   .last = extent.end_part == cta_.kind.parts(),
                                                                                   .whole = extent.whole});
  }

  Cta& cta_;
  Pipeline ring_;
  std::int32_t next_ = 0;  // tile
  std::array<CopyEngine, 2> engines_{CopyEngine(1), CopyEngine(2)};
};

}  // namespace lean::cuda::protocol
