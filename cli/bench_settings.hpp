// What `lean bench` was asked for, and what both of its halves, CPU and GPU, measure in each row.
#pragma once

#include <chrono>
#include <cstdint>
#include <regex>
#include <string>
#include <vector>

#include "cli/suites/matrix.hpp"
#include "lean/options.hpp"

namespace lean::cli {

struct BenchSettings {
  int rounds = 7;
  double max_seconds = 1e9;
  std::string out;
  std::string commit;

  bool resume = false;  // rows that `out` has are not measured again

  Selection rows;            // which of the matrix
  std::regex pattern{".*"};  // searched for in their ids

  std::vector<std::int32_t> threads;  // CPU; empty: 1 to all for its own suite, all for the others
  double row_seconds = 60.0;          // CPU: rows that are expected to take longer are skipped

  std::string peers;          // GPU: a result file of other libraries
  bool stream_order = false;  // GPU: kStreamOrder is measured too
};

struct Implementation {
  const char* name;
  Policy policy;
  bool dependent_launch = true;
};

inline constexpr Implementation kImplementations[] = {
    {"lean", Policy::lean()}, {"lean/fixed_split", Policy::fixed_split()}, {"lean/data_parallel", Policy::data_parallel()}};
inline constexpr Implementation kStreamOrder = {"lean/stream_order", Policy::lean(), false};

[[nodiscard]] inline std::vector<std::string> names_of(const std::vector<Implementation>& implementations) {
  std::vector<std::string> names;
  for (const Implementation& implementation : implementations) names.emplace_back(implementation.name);
  return names;
}

inline constexpr std::uint64_t kBenchSeed = 1;

/// --max-seconds, from when it is made.
class TimeLimit {
 public:
  explicit TimeLimit(double seconds) : seconds_(seconds) {}

  [[nodiscard]] bool passed() const {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - started_).count() > seconds_;
  }

 private:
  double seconds_;
  std::chrono::steady_clock::time_point started_ = std::chrono::steady_clock::now();
};

}  // namespace lean::cli
