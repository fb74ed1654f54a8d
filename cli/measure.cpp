#include "cli/measure.hpp"

#include <cmath>

namespace lean::cli {
namespace {

constexpr double kMaxCallsPerRound = 1000.0;

int calls_per_round(const std::function<void()>& subject, double min_round_us) {
  subject();
  const double us = std::max(time_us(subject), 0.01);
  return static_cast<int>(std::clamp(std::ceil(min_round_us / us), 1.0, kMaxCallsPerRound));
}

}  // namespace

double Samples::median() const {
  std::vector<double> sorted = us;
  std::sort(sorted.begin(), sorted.end());
  const std::size_t middle = sorted.size() / 2;
  return sorted.size() % 2 == 1 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2.0;
}

std::vector<Samples> measure(const std::vector<std::function<void()>>& subjects, const Rounds& rounds) {
  std::vector<int> calls;
  for (const auto& subject : subjects) calls.push_back(calls_per_round(subject, rounds.min_round_us));
  std::vector<Samples> samples(subjects.size());
  double spent_us = 0.0;
  for (int round = 0; round < rounds.rounds; ++round) {
    if (round >= rounds.min_rounds && spent_us > rounds.max_seconds * 1e6) break;
    for (std::size_t s = 0; s < subjects.size(); ++s) {
      const double us = time_us([&] {
        for (int i = 0; i < calls[s]; ++i) subjects[s]();
      });
      samples[s].us.push_back(us / calls[s]);
      spent_us += us;
    }
  }
  return samples;
}

}  // namespace lean::cli
