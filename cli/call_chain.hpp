// CallChain: one thing to time on the GPU, as a graph of many calls whose inputs go round the copies of K and V, so that no
// call finds its data in the L2; and the same call alone.
#pragma once

#include <cstdint>
#include <functional>

#include "cli/gpu.hpp"

namespace lean::cli {

/// Enqueues one call on one copy of K and V.
using GpuCall = std::function<void(std::int64_t copy, void* stream)>;

/// What calls go round.
struct Rotation {
  std::int64_t copies = 1;
  std::int64_t kv_bytes = 0;  // of one copy
};

/// Copies of K and V to go round: more bytes than any L2 holds.
[[nodiscard]] std::int64_t copies_for(std::int64_t kv_bytes);

class CallChain {
 public:
  CallChain(const GpuCall& call, const Rotation& rotation);

  [[nodiscard]] std::int64_t calls() const { return calls_; }

  /// Replays back to back for `least_us` or longer, at least once; waits.
  [[nodiscard]] double us_per_call(double least_us) const;
  /// One call after other data went through the L2.
  [[nodiscard]] double isolated_us() const;
  /// Replays back to back for about `us` microseconds, at least once; waits. Returns how many calls they made.
  [[nodiscard]] std::int64_t replay_for(double us) const;
  /// Enqueues replays for about `us` microseconds and does not wait.
  void keep_busy(double us) const;
  /// One replay; its last call is on copy 0. Waits.
  void replay() const;

 private:
  [[nodiscard]] int replays_for(double us) const;

  gpu::Graph single_;  // on the copy that a chain leaves coldest
  double single_us_;
  std::int64_t calls_;
  gpu::Graph chain_;
  double chain_us_;
};

}  // namespace lean::cli
