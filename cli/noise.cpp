#include "cli/noise.hpp"

#include <fmt/format.h>

#include <algorithm>

namespace lean::cli {

std::string noise_in(const Samples& call, const Samples& ceiling) {
  // On machines left alone 99 lines of 100 have a median below 1.05 (bench/results/cpu-xeon6-2t.jsonl) and 1.3 times the best
  // round (cpu-zen4-2t.jsonl), and no call is 1.1 times as fast as the pure read of what it reads.
  constexpr double kMaxSpread = 1.3;
  constexpr double kMaxReadFraction = 1.1;
  const double call_spread = call.median() / call.min();
  const double ceiling_spread = ceiling.median() / ceiling.min();
  if (const double spread = std::max(call_spread, ceiling_spread); spread > kMaxSpread) {
    return fmt::format("noisy: the median round of the {} took {:.2f} times the best", call_spread == spread ? "call" : "pure read",
                       spread);
  }
  return ceiling.median() > kMaxReadFraction * call.median() ? "noisy: faster than the pure read of the same bytes" : "";
}

}  // namespace lean::cli
