// DeviceRun: a Case with its tensors and lengths in device memory, in allocations of exactly their size, with a workspace and
// options: what GPU tests call again and again. The host's copy (built()) feeds the oracle.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <map>
#include <vector>

#include "backends/cuda/scope.hpp"
#include "backends/reference/reference.hpp"
#include "gpu/device_memory.hpp"
#include "lean/lean.hpp"
#include "support/case.hpp"
#include "support/test_problem.hpp"
#include "support/test_workspace.hpp"

namespace lean::gpu {

using support::Case;
using support::Fill;

/// The case's options, on the GPU.
[[nodiscard]] Options options_of(const Case& c, cudaStream_t stream = nullptr);

/// The case with its sequences again and again, until it has as many outputs as calls with two workers on a multiprocessor have
/// (kPairedRule). Expects that a kernel of this scope, one of theirs, serves it where the device has room for two.
[[nodiscard]] Case of_many_outputs(Case c, cuda::Scope scope);

class DeviceRun {
 public:
  explicit DeviceRun(const Case& c);

  [[nodiscard]] support::TestProblem& built() { return built_; }
  [[nodiscard]] const Problem& problem() const { return problem_; }
  [[nodiscard]] Problem& problem() { return problem_; }
  [[nodiscard]] const Options& options() const { return options_; }
  [[nodiscard]] Options& options() { return options_; }
  [[nodiscard]] Workspace workspace() const { return workspace_.get(); }
  /// The device's length array, writable.
  [[nodiscard]] std::int32_t* kv_lengths() const { return const_cast<std::int32_t*>(problem_.kv_lengths); }

  void poison_outputs(cudaStream_t stream) const;
  /// decode() on the stream; throws when it is refused.
  void enqueue(cudaStream_t stream) const;
  /// The bytes of o and of lse as they lie in memory, gaps included. Waits for the stream.
  [[nodiscard]] std::vector<std::uint8_t> output_bytes(cudaStream_t stream) const;
  /// Poison, call, wait.
  [[nodiscard]] std::vector<std::uint8_t> bits(cudaStream_t stream) const;

  /// Whether what lies in the outputs is the oracle's answer to built(), which must have the device's lengths.
  [[nodiscard]] testing::AssertionResult matches();
  [[nodiscard]] testing::AssertionResult matches(const reference::Answer& answer);
  /// Canaries beside the workspace stand and the state is all zero.
  [[nodiscard]] testing::AssertionResult clean() const;

 private:
  support::TestProblem built_;
  std::map<const support::GuardedBuffer*, DeviceBuffer> copies_;
  Problem problem_;
  Options options_;
  support::TestWorkspace workspace_;
};

}  // namespace lean::gpu
