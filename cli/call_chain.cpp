#include "cli/call_chain.hpp"

#include <algorithm>
#include <cmath>

#include "base/int_math.hpp"

namespace lean::cli {
namespace {

constexpr std::int64_t kColdBytes = 320'000'000;  // several times any L2 of today
constexpr std::int64_t kMaxCopies = 1024;
constexpr std::int64_t kChainCalls = 20;
constexpr std::int64_t kShortChainCalls = 4;
constexpr std::int64_t kShortChainBytes = 2'000'000'000;  // from here on, and
constexpr double kShortChainUs = 2000.0;                  // for calls slower than this, four calls last long enough
constexpr double kMaxReplays = 10'000.0;

std::int64_t calls_for(const Rotation& rotation, double single_us) {
  if (rotation.kv_bytes > kShortChainBytes || single_us > kShortChainUs)
    return max_of(kShortChainCalls, min_of(rotation.copies, 8));
  return rotation.copies * ceil_div(kChainCalls, rotation.copies);
}

/// Kernels are loaded at their first launch, which must not be captured.
gpu::Graph captured(const GpuCall& call, std::int64_t copy) {
  call(copy, nullptr);
  gpu::synchronize();
  return gpu::Graph([&](void* stream) { call(copy, stream); });
}

double warm_us(const gpu::Graph& graph) {
  (void)graph.timed_us(1);
  return graph.timed_us(1);
}

}  // namespace

std::int64_t copies_for(std::int64_t kv_bytes) { return min_of(kMaxCopies, max_of(1, ceil_div(kColdBytes, max_of(1, kv_bytes)))); }

CallChain::CallChain(const GpuCall& call, const Rotation& rotation)
    : single_(captured(call, rotation.copies - 1)),
      single_us_(warm_us(single_)),
      calls_(calls_for(rotation, single_us_)),
      chain_([&](void* stream) {
        for (std::int64_t i = calls_; i-- > 0;) call(i % rotation.copies, stream);
      }),
      chain_us_(warm_us(chain_)) {}

int CallChain::replays_for(double us) const {
  return static_cast<int>(std::clamp(std::ceil(us / std::max(chain_us_, 0.1)), 1.0, kMaxReplays));
}

double CallChain::us_per_call(double least_us) const {
  const int replays = replays_for(least_us);
  return chain_.timed_us(replays) / static_cast<double>(replays * calls_);
}

std::int64_t CallChain::replay_for(double us) const {
  const int replays = replays_for(us);
  (void)chain_.timed_us(replays);
  return replays * calls_;
}

double CallChain::isolated_us() const { return single_.timed_us_behind(chain_); }

void CallChain::keep_busy(double us) const { chain_.launch(replays_for(us)); }
void CallChain::replay() const { (void)chain_.timed_us(1); }

}  // namespace lean::cli
