// Who waits for whom in a CTA of a latent tile, as a model on threads: a producer and two consumer warpgroups with the kernel's barriers,
// phases and places (src/backends/cuda/kernel/load/producer.cuh, wide_consumer.cuh). Memory that a barrier would leave open holds
// another tile than the consumer wants, and is a data race for ThreadSanitizer.
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
constexpr std::int32_t kStages = 2;
constexpr std::int32_t kRecords = 2;
constexpr std::int32_t kQueryPlaces =
    config_of(Architecture::kSm90, family_named("bf16_d576"), 64, Scope::kLatentTile).query_places();
static_assert(kQueryPlaces == 1);

struct Cta {
  std::array<PhaseBarrier, kStages> stage_full{PhaseBarrier(1), PhaseBarrier(1)};
  std::array<PhaseBarrier, kStages> stage_free{PhaseBarrier(kGroups), PhaseBarrier(kGroups)};
  std::array<PhaseBarrier, kRecords> record_full{PhaseBarrier(1), PhaseBarrier(1)};
  std::array<PhaseBarrier, kRecords> record_free{PhaseBarrier(kGroups + 1), PhaseBarrier(kGroups + 1)};
  std::array<PhaseBarrier, kRecords> queries_full{PhaseBarrier(1), PhaseBarrier(1)};
  PhaseBarrier queries_free{kGroups};
  std::array<PhaseBarrier, kRecords> contributors_known{PhaseBarrier(1), PhaseBarrier(1)};
  // What lies in shared memory: -1 is the end.
  std::array<std::int32_t, kStages> stage{};
  std::array<std::int32_t, kRecords> segment{};
  std::array<std::int32_t, kRecords> contributors{};
  std::int32_t queries = 0;  // of which segment
};

/// Tiles are numbered over all segments, which have so many each.
std::string produce(Cta& cta, const std::vector<std::int32_t>& tiles) {
  Pipeline ring{kStages};
  Pipeline records{kRecords};
  std::int32_t next = 0;
  for (std::int32_t segment = 0;; ++segment, records.advance()) {
    const auto at = static_cast<std::size_t>(records.index);
    const bool more = segment < static_cast<std::int32_t>(tiles.size());
    if (!cta.record_free[at].wait(records.phase ^ 1U)) return "no place for a record";
    cta.segment[at] = more ? segment : -1;
    cta.record_full[at].arrive();
    if (!more) return "";
    const std::int32_t end = next + tiles[static_cast<std::size_t>(segment)];
    for (std::int32_t copy = 0; copy < 2 || next < end; ++copy) {
      if (next < end) {
        const auto stage = static_cast<std::size_t>(ring.index);
        if (!cta.stage_free[stage].wait(ring.phase ^ 1U)) return "no stage is free";
        cta.stage[stage] = next++;
        cta.stage_full[stage].arrive();
        ring.advance();
      }
      if (copy == 0) {
        if (!cta.queries_free.wait(static_cast<std::uint32_t>(records.index) ^ 1U)) return "queries stay in use";
        cta.queries = segment;
        cta.queries_full[at].arrive();
      } else if (copy == 1) {
        cta.contributors[at] = segment;
        cta.contributors_known[at].arrive();
      }
    }
    cta.record_free[at].arrive();
  }
}

std::string consume(Cta& cta, const std::vector<std::int32_t>& tiles) {
  Pipeline ring{kStages};
  Pipeline records{kRecords};
  std::int32_t next = 0;
  for (std::int32_t segment = 0;; ++segment, records.advance()) {
    const auto at = static_cast<std::size_t>(records.index);
    if (!cta.record_full[at].wait(records.phase)) return "no record comes";
    if (cta.segment[at] == -1) return next == std::accumulate(tiles.begin(), tiles.end(), 0) ? "" : "tiles are left";
    if (cta.segment[at] != segment) return "another record";
    if (!cta.queries_full[at].wait(records.phase)) return "no queries come";
    const std::int32_t end = next + tiles[static_cast<std::size_t>(segment)];
    if (next == end) cta.queries_free.arrive();
    while (next < end) {
      const auto stage = static_cast<std::size_t>(ring.index);
      if (!cta.stage_full[stage].wait(ring.phase)) return "no tile comes";
      if (cta.queries != segment) return "queries of another segment";
      const std::int32_t keys = cta.stage[stage];
      if (next + 1 == end) cta.queries_free.arrive();
      if (keys != next || cta.stage[stage] != next) return "another tile";  // scores, then values
      cta.stage_free[stage].arrive();
      ring.advance();
      ++next;
    }
    if (!cta.contributors_known[at].wait(records.phase)) return "nobody says who shares the output";
    if (cta.contributors[at] != segment) return "contributors of another segment";
    cta.record_free[at].arrive();
  }
}

TEST(LatentProtocol, EverybodyGetsWhatTheyWaitForAndNobodyTooEarly) {
  Stream random(29);
  for (std::int32_t round = 0; round < support::full_or_reduced(300, 30); ++round) {
    std::vector<std::int32_t> tiles(static_cast<std::size_t>(random.between(0, 40)));
    for (std::int32_t& count : tiles) count = static_cast<std::int32_t>(random.chance(30) ? 0 : random.between(1, 7));
    Cta cta;
    std::array<std::string, 1 + kGroups> faults;
    {
      std::vector<std::jthread> threads;
      threads.emplace_back([&] { faults[0] = produce(cta, tiles); });
      for (std::size_t group = 1; group <= kGroups; ++group)
        threads.emplace_back([&, group] { faults[group] = consume(cta, tiles); });
    }
    for (const std::string& fault : faults) ASSERT_EQ(fault, "") << "round " << round;
  }
}

}  // namespace
}  // namespace lean::cuda
