#include "cli/gpu_timing.hpp"

#include "cli/call_chain.hpp"
#include "cli/gpu_ceiling.hpp"

namespace lean::cli {
namespace {

constexpr double kBusyUs = 20'000.0;  // while NVML is asked

GpuState state_under_load(const CallChain& chain, const Nvml& nvml) {
  chain.keep_busy(kBusyUs);
  const GpuState state = nvml.state();
  gpu::synchronize();
  return state;
}

}  // namespace

GpuTimes time_on_gpu(const DecodeProblem& problem, const std::vector<const PreparedCall*>& calls, const GpuInstruments& instruments,
                     const GpuRounds& rounds) {
  const Rotation rotation{.copies = problem.pool().copies(), .kv_bytes = problem.spec().kv_bytes()};
  const GpuReadCeiling ceiling(problem, instruments.read_kernels);
  std::vector<CallChain> chains;
  for (const PreparedCall* call : calls) {
    chains.emplace_back([call](std::int64_t copy, void* stream) { call->enqueue(copy, stream); }, rotation);
  }
  chains.emplace_back([&ceiling](std::int64_t copy, void* stream) { ceiling.enqueue(copy, stream); }, rotation);

  GpuTimes times{.calls = {}, .ceiling = {}, .ceiling_kernel = ceiling.kernel_name(), .state_before = {}, .state_after = {}};
  times.state_before = state_under_load(chains.back(), instruments.nvml);
  std::vector<GpuCallTimes> subjects(chains.size());
  for (int round = 0; round < rounds.rounds; ++round) {
    for (std::size_t i = 0; i < chains.size(); ++i) {
      subjects[i].chained.us.push_back(chains[i].us_per_call(rounds.round_us));
      subjects[i].isolated.us.push_back(chains[i].isolated_us());
    }
  }
  times.state_after = state_under_load(chains.back(), instruments.nvml);
  for (std::size_t i = 0; i < chains.size(); ++i) subjects[i].chain_calls = chains[i].calls();
  times.ceiling = std::move(subjects.back());
  subjects.pop_back();
  times.calls = std::move(subjects);

  for (std::size_t i = 0; i < calls.size() && rounds.check; ++i) {
    problem.poison_outputs();
    gpu::synchronize();
    chains[i].replay();
    rounds.check(i);
  }
  return times;
}

}  // namespace lean::cli
