// What the fix-up costs: the merge of two softmax states, a partial written to its slot, the ordered merge of an output's
// contributors, and the arrival counter, alone and from all processors at once.
#include <benchmark/benchmark.h>

#include <cstdint>
#include <cstring>

#include "backends/cpu/thread_atomic.hpp"
#include "backends/cpu/tile_kernels.hpp"
#include "bench/aligned_buffer.hpp"
#include "fixup/arrival.hpp"
#include "fixup/ordered_merge.hpp"
#include "fixup/partial.hpp"
#include "fixup/workspace.hpp"
#include "softmax/state.hpp"

namespace lean::bench {
namespace {

using fixup::Partial;

constexpr std::int32_t kValueDim = 128;
constexpr std::int32_t kRowBlock = 16;  // rows a slot has room for

/// The slots of an output with `contributors` contributors; each has its own m, so that every merge re-scales.
class SlotBank {
 public:
  explicit SlotBank(std::int64_t contributors)
      : layout_(contributors, false, 1, {.q_rows = kRowBlock, .value_stride = kValueDim}),
        state_(layout_.state_bytes()),
        scratch_(layout_.scratch_bytes()),
        slots_{layout_, state_.data(), scratch_.data()} {
    for (std::int64_t slot = 0; slot < contributors; ++slot) {
      const Partial partial = slots_.partial(slot);
      for (std::int32_t row = 0; row < kRowBlock; ++row) {
        partial.m[row] = static_cast<float>((slot * 7 + row) % 5);
        partial.l[row] = 1.0F;
        for (std::int32_t i = 0; i < kValueDim; ++i) partial.o_row(row)[i] = static_cast<float>(i % 3);
      }
    }
  }

  [[nodiscard]] const fixup::Slots& slots() const { return slots_; }

 private:
  fixup::WorkspaceLayout layout_;
  AlignedBuffer state_;
  AlignedBuffer scratch_;
  fixup::Slots slots_;
};

/// As the worker loop stores a partial and takes up an output's first one.
void copy(const Partial& from, const Partial& to, std::int32_t rows) {
  for (std::int32_t row = 0; row < rows; ++row) {
    std::memcpy(to.o_row(row), from.o_row(row), kValueDim * sizeof(float));
    to.m[row] = from.m[row];
    to.l[row] = from.l[row];
  }
}

[[nodiscard]] std::int64_t partial_bytes(std::int32_t rows) {
  return fixup::PartialLayout{rows, kValueDim}.floats() * static_cast<std::int64_t>(sizeof(float));
}

void merge_states(benchmark::State& state) {
  softmax::State a{.m = 3.0F, .l = 2.0F};
  softmax::State b{.m = 1.0F, .l = 5.0F};
  for (auto _ : state) {
    benchmark::DoNotOptimize(a);
    benchmark::DoNotOptimize(b);
    softmax::State merged = softmax::merge(a, b);
    benchmark::DoNotOptimize(merged);
  }
}

void store_partial(benchmark::State& state) {
  const auto rows = static_cast<std::int32_t>(state.range(0));
  const SlotBank bank(2);
  for (auto _ : state) {
    copy(bank.slots().partial(0), bank.slots().partial(1), rows);
    benchmark::ClobberMemory();
  }
  state.SetBytesProcessed(state.iterations() * partial_bytes(rows));
}

void merge_contributors(benchmark::State& state) {
  const auto rows = static_cast<std::int32_t>(state.range(0));
  const auto contributors = static_cast<std::int32_t>(state.range(1));
  const SlotBank bank(contributors);
  const SlotBank result(1);
  const cpu::TileKernels& kernels = cpu::kernels_for(CpuIsa::kBest);
  const auto add_row = [&kernels](float* sums, const float* part, float weight) {
    kernels.add_scaled(sums, part, weight, sums, kValueDim);
  };
  const auto part_at = [&bank](std::int32_t i) { return bank.slots().partial(i); };
  const Partial into = result.slots().partial(0);
  for (auto _ : state) {
    fixup::merge_parts(into, rows, contributors, part_at, add_row);
    benchmark::ClobberMemory();
  }
  state.SetBytesProcessed(state.iterations() * contributors * partial_bytes(rows));
}

/// As many contributors as threads. Threads do not wait for each other, so which arrivals complete the count is chance.
void arrive_last(benchmark::State& state) {
  static fixup::Counter counter = 0;
  for (auto _ : state) {
    bool last = fixup::arrive_last<cpu::ThreadAtomic>(counter, state.threads());
    benchmark::DoNotOptimize(last);
  }
}

BENCHMARK(merge_states);
BENCHMARK(store_partial)->ArgName("rows")->Arg(1)->Arg(4)->Arg(8)->Arg(16);
BENCHMARK(merge_contributors)->ArgNames({"rows", "contributors"})->ArgsProduct({{1, 4, 8}, {2, 4, 8, 16, fixup::kMaxOneLevel}});
BENCHMARK(arrive_last);
BENCHMARK(arrive_last)->ThreadPerCpu()->UseRealTime();

}  // namespace
}  // namespace lean::bench
