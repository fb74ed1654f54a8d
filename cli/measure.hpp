// measure(): rounds in which all subjects take turns, so that a machine that slows down slows all of them. A subject too
// short for the clock is called many times a round.
#pragma once

#include <algorithm>
#include <chrono>
#include <functional>
#include <vector>

namespace lean::cli {

template <typename TCall>
[[nodiscard]] double time_us(TCall&& call) {
  const auto started = std::chrono::steady_clock::now();
  call();
  return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - started).count();
}

/// Microseconds per call, one value a round.
struct Samples {
  std::vector<double> us;

  [[nodiscard]] double median() const;
  [[nodiscard]] double min() const { return *std::min_element(us.begin(), us.end()); }
  [[nodiscard]] double max() const { return *std::max_element(us.begin(), us.end()); }
};

struct Rounds {
  int rounds = 7;      // at least 1
  int min_rounds = 7;  // of them, when max_seconds would cut them short
  double max_seconds = 1e9;
  double min_round_us = 2000.0;  // of one subject in one round
};

/// Calls every subject twice to warm up, then measures. Samples in the order of the subjects.
[[nodiscard]] std::vector<Samples> measure(const std::vector<std::function<void()>>& subjects, const Rounds& rounds);

}  // namespace lean::cli
