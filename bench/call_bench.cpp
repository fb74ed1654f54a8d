// What a whole call costs beyond its arithmetic: decode() on sequences of one token, and the two questions asked before it.
#include <benchmark/benchmark.h>

#include <cstdint>
#include <vector>

#include "bench/aligned_buffer.hpp"
#include "lean/lean.hpp"

namespace lean::bench {
namespace {

constexpr std::int32_t kHeads = 8;
constexpr std::int32_t kHeadDim = 16;

/// `batch` sequences of one token, so that a call has kHeads outputs of one tile each for every sequence.
class TinyCall {
 public:
  TinyCall(std::int64_t batch, std::int32_t workers)
      : lengths_(static_cast<std::size_t>(batch), 1),
        input_(lengths_.size() * kHeads * kHeadDim, 1.0F),
        output_(input_.size()),
        problem_{.batch = batch, .q_heads = kHeads, .kv_heads = kHeads, .head_dim = kHeadDim, .kv_capacity = 1},
        options_{.workers = workers},
        need_(workspace_size(with_tensors(), options_)),
        state_(static_cast<std::int64_t>(need_.state_bytes)),
        scratch_(static_cast<std::int64_t>(need_.scratch_bytes)),
        workspace_{state_.data(), need_.state_bytes, scratch_.data(), need_.scratch_bytes} {}
  TinyCall(const TinyCall&) = delete;
  TinyCall& operator=(const TinyCall&) = delete;

  [[nodiscard]] const Problem& problem() const { return problem_; }
  [[nodiscard]] const Options& options() const { return options_; }
  [[nodiscard]] Status run() const { return decode(problem_, options_, workspace_); }

 private:
  const Problem& with_tensors() {
    const Strides strides{.sequence = kHeads * kHeadDim, .head = kHeadDim, .token = kHeadDim};
    problem_.q = {.data = input_.data(), .strides = strides};
    problem_.k = problem_.q;
    problem_.v = problem_.q;
    problem_.o = {.data = output_.data(), .strides = strides};
    problem_.kv_lengths = lengths_.data();
    return problem_;
  }

  std::vector<std::int32_t> lengths_;
  std::vector<float> input_;  // q, k and v
  std::vector<float> output_;
  Problem problem_;
  Options options_;
  WorkspaceSize need_;
  AlignedBuffer state_;
  AlignedBuffer scratch_;
  Workspace workspace_;
};

void decode_tiny(benchmark::State& state) {
  const TinyCall call(state.range(0), static_cast<std::int32_t>(state.range(1)));
  for (auto _ : state) {
    const Status status = call.run();
    if (!status.ok()) return state.SkipWithError(status.message);
  }
}

void supports_tiny(benchmark::State& state) {
  const TinyCall call(1, 0);
  for (auto _ : state) {
    Status status = supports(call.problem(), call.options());
    benchmark::DoNotOptimize(status);
  }
}

void workspace_size_tiny(benchmark::State& state) {
  const TinyCall call(1, 0);
  for (auto _ : state) {
    WorkspaceSize need = workspace_size(call.problem(), call.options());
    benchmark::DoNotOptimize(need);
  }
}

/// One worker, and where there are more, all of the library's own threads.
constexpr auto kBatchesAndWorkers = [](auto* benchmark) {
  benchmark->ArgNames({"batch", "workers"})->UseRealTime();
  for (const std::int64_t batch : {0, 1, 64, 1024}) {
    benchmark->Args({batch, 1});
    if (default_executor().worker_count > 1) benchmark->Args({batch, default_executor().worker_count});
  }
};

BENCHMARK(decode_tiny)->Apply(kBatchesAndWorkers);
BENCHMARK(supports_tiny);
BENCHMARK(workspace_size_tiny);

}  // namespace
}  // namespace lean::bench
