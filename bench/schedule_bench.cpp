// What the schedule costs a call: building the work line, locating a place on it, walking one worker's segments. On a batch of
// equal lengths and on a ragged one, from 1 to 65,536 sequences.
#include <benchmark/benchmark.h>

#include <cstdint>
#include <random>
#include <vector>

#include "backends/cpu/cpu_backend.hpp"
#include "problem/sequence.hpp"
#include "schedule/line_shape.hpp"
#include "schedule/plan.hpp"
#include "schedule/segments.hpp"
#include "schedule/work_line.hpp"
#include "tile/tile_config.hpp"

namespace lean::bench {
namespace {

constexpr std::int32_t kCapacity = 32768;  // tokens
constexpr std::int32_t kWorkers = 16;
constexpr std::uint32_t kSeed = 1;
constexpr std::size_t kPlaces = 1024;  // a power of two

using Line = schedule::WorkLine<LengthSource>;

/// A batch of Llama-3-8B's heads (32/8, d 128) in bf16. A ragged one has lengths from 1 token to the capacity, most of them short.
class Batch {
 public:
  explicit Batch(const benchmark::State& state) : lengths_(static_cast<std::size_t>(state.range(1)), kCapacity / 2) {
    const bool ragged = state.range(0) != 0;
    std::mt19937 random(kSeed);
    std::uniform_int_distribution<std::int32_t> halvings(0, 14);
    for (std::int32_t& length : lengths_) {
      if (ragged) length = std::uniform_int_distribution<std::int32_t>(1, kCapacity >> halvings(random))(random);
    }
    problem_ = {.batch = state.range(1), .q_heads = 32, .kv_heads = 8, .head_dim = 128, .kv_capacity = kCapacity};
    problem_.k.dtype = DType::kBFloat16;
    problem_.kv_lengths = lengths_.data();
  }
  Batch(const Batch&) = delete;
  Batch& operator=(const Batch&) = delete;

  [[nodiscard]] Line line() const {
    const tile::TileConfig tile = cpu::select_tile(problem_, {});
    const schedule::LineShape shape{.batch = problem_.batch,
                                    .kv_heads = problem_.kv_heads,
                                    .group = problem_.q_heads / problem_.kv_heads,
                                    .q_rows = tile.q_rows,
                                    .tile_tokens = tile.tile_tokens};
    return {LengthSource(problem_), shape, cpu::cost_model(tile), schedule::Measure::kCost};
  }

 private:
  std::vector<std::int32_t> lengths_;
  Problem problem_;
};

void build_line(benchmark::State& state) {
  const Batch batch(state);
  Line line = batch.line();
  for (auto _ : state) {
    line.build();
    benchmark::DoNotOptimize(line);
  }
  state.counters["sequences"] =
      benchmark::Counter(static_cast<double>(state.range(1)), benchmark::Counter::kIsIterationInvariantRate);
}

void locate(benchmark::State& state) {
  const Batch batch(state);
  Line line = batch.line();
  line.build();
  std::mt19937_64 random(kSeed);
  std::uniform_int_distribution<std::int64_t> on_the_line(0, line.total() - 1);
  std::vector<std::int64_t> places(kPlaces);
  for (std::int64_t& place : places) place = on_the_line(random);
  std::size_t next = 0;
  for (auto _ : state) {
    schedule::Output output = line.locate(places[next++ % kPlaces]);
    benchmark::DoNotOptimize(output);
  }
}

/// The workers take turns, one share an iteration: what a worker of a call spends on its schedule, its plan included.
void walk_share(benchmark::State& state) {
  const Batch batch(state);
  Line line = batch.line();
  line.build();
  std::int64_t segments = 0;
  std::int32_t worker = 0;
  for (auto _ : state) {
    const schedule::Plan plan =
        schedule::make_plan(line.sums(), Policy::lean(), line.cost_model(), line.shape().tile_tokens, kWorkers);
    for (schedule::SegmentCursor cursor(line, plan, worker); cursor.next(); ++segments) {
      schedule::Segment segment = cursor.segment();
      benchmark::DoNotOptimize(segment);
    }
    worker = (worker + 1) % kWorkers;
  }
  state.SetItemsProcessed(segments);
}

constexpr auto kBatches = [](auto* benchmark) {
  benchmark->ArgNames({"ragged", "batch"})->ArgsProduct({{0, 1}, benchmark::CreateRange(1, 65536, 16)});
};

BENCHMARK(build_line)->Apply(kBatches);
BENCHMARK(locate)->Apply(kBatches);
BENCHMARK(walk_share)->Apply(kBatches);

}  // namespace
}  // namespace lean::bench
