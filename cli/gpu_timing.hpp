// time_on_gpu(): calls on one problem and a pure read of its bytes take turns, round by round, as chains; then every chain is
// replayed once more over poisoned outputs, so that what was timed can be checked.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "cli/decode_problem.hpp"
#include "cli/gpu.hpp"
#include "cli/measure.hpp"
#include "cli/nvml.hpp"
#include "cli/prepared_call.hpp"

namespace lean::cli {

struct GpuCallTimes {
  Samples chained;   // of a call among others
  Samples isolated;  // of a call alone
  std::int64_t chain_calls = 0;
};

struct GpuTimes {
  std::vector<GpuCallTimes> calls;
  GpuCallTimes ceiling;
  std::string ceiling_kernel;
  GpuState state_before;  // under load, before the first round
  GpuState state_after;   // and after the last
};

struct GpuRounds {
  int rounds = 7;
  double round_us = 10'000.0;  // of one subject in one round, or one chain if that is longer
  /// Called after the replay of call `index`, when o and lse hold its results on copy 0.
  std::function<void(std::size_t index)> check;
};

/// What the machine offers for it, made once a run.
struct GpuInstruments {
  std::vector<gpu::ReadKernel> read_kernels;
  Nvml nvml;

  GpuInstruments() : read_kernels(gpu::read_kernels()), nvml(gpu::devices().at(0).pci_bus_id) {}
};

[[nodiscard]] GpuTimes time_on_gpu(const DecodeProblem& problem, const std::vector<const PreparedCall*>& calls,
                                   const GpuInstruments& instruments, const GpuRounds& rounds);

}  // namespace lean::cli
