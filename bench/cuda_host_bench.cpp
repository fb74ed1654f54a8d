// What the host does for a call on a GPU, without one: decode() on the fake runtime of tests/cuda_host, whose calls cost next to
// nothing, so that what is left is the library's own checks, plan and arguments.
#include <benchmark/benchmark.h>

#include <cstdint>

#include "cuda_host/fake_runtime.hpp"
#include "lean/lean.hpp"

namespace lean::bench {
namespace {

/// Where nothing lies: host code looks at pointers, never behind them.
void* address(std::uintptr_t place) { return reinterpret_cast<void*>(place << 36); }

/// A decode step of Llama-8B's heads in bf16.
Problem decode_step() {
  constexpr std::int64_t kDim = 128;
  constexpr std::int64_t kTokens = 8192;
  Problem problem{.batch = 8, .q_heads = 32, .kv_heads = 8, .head_dim = kDim, .kv_capacity = kTokens};
  problem.q = {.data = address(1), .dtype = DType::kBFloat16, .strides = {.sequence = 32 * kDim, .head = kDim, .token = 32 * kDim}};
  problem.k = {.data = address(2), .dtype = DType::kBFloat16};
  problem.k.strides = {.sequence = 8 * kTokens * kDim, .head = kTokens * kDim, .token = kDim};
  problem.v = problem.k;
  problem.v.data = address(3);
  problem.o = {.data = address(4), .dtype = DType::kBFloat16, .strides = problem.q.strides};
  problem.kv_lengths = static_cast<const std::int32_t*>(address(5));
  return problem;
}

/// Token by token, as tensor copies bring it.
Problem rows_with_gaps() {
  Problem problem = decode_step();
  problem.k.strides = {.sequence = 8 * 8192 * 128, .head = 128, .token = 8 * 128};
  problem.v.strides = problem.k.strides;
  return problem;
}

/// Anything but a decode step.
Problem with_softcap() {
  Problem problem = decode_step();
  problem.scores.softcap = 30.0F;
  return problem;
}

/// Two launches.
Problem prefill_and_decode() {
  Problem problem = decode_step();
  problem.q_tokens = 512;
  problem.total_q_tokens = 600;
  problem.scores.causal = true;
  problem.cu_q_tokens = static_cast<const std::int32_t*>(address(6));
  return problem;
}

void on_one_device() {
  cuda_host::runtime().devices.assign(1, {});
  cuda_host::runtime().ordinal = 0;
}

void host_decode(benchmark::State& state, const Problem& problem) {
  on_one_device();
  const Options options{.backend = Backend::kCuda};
  const WorkspaceSize need = workspace_size(problem, options);
  const Workspace workspace{
      .state = address(7), .state_bytes = need.state_bytes, .scratch = address(8), .scratch_bytes = need.scratch_bytes};
  for (auto _ : state) {
    cuda_host::runtime().begin();
    const Status status = decode(problem, options, workspace);
    if (!status.ok()) return state.SkipWithError(status.message);
  }
}

void host_workspace_size(benchmark::State& state, const Problem& problem) {
  on_one_device();
  for (auto _ : state) {
    cuda_host::runtime().begin();
    WorkspaceSize need = workspace_size(problem, {.backend = Backend::kCuda});
    benchmark::DoNotOptimize(need);
  }
}

BENCHMARK_CAPTURE(host_decode, decode_step, decode_step());
BENCHMARK_CAPTURE(host_decode, rows_with_gaps, rows_with_gaps());
BENCHMARK_CAPTURE(host_decode, softcap, with_softcap());
BENCHMARK_CAPTURE(host_decode, prefill_and_decode, prefill_and_decode());
BENCHMARK_CAPTURE(host_workspace_size, decode_step, decode_step());

}  // namespace
}  // namespace lean::bench
