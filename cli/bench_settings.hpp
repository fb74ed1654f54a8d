// What `lean bench` was asked for, and what both of its halves, CPU and GPU, measure in each row.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "lean/options.hpp"

namespace lean::cli {

struct BenchSettings {
  int rounds = 7;
  double max_seconds = 1e9;
  std::string out;
  std::string commit;

  std::vector<std::int32_t> threads;  // CPU; empty: 1 to all
  std::int64_t kv_mib = 0;            // CPU; 0: a multiple of the last-level cache

  std::string tier = "a";  // GPU: a, b, all
  bool resume = false;     // GPU: rows that `out` has are not measured again
  std::string trace;       // GPU: more rows from its requests
  std::string peers;       // GPU: a result file of other libraries
  bool dependent = false;  // GPU: kDependentLaunch is measured too
};

struct Implementation {
  const char* name;
  Policy policy;
  bool dependent_launch = false;
};

inline constexpr Implementation kImplementations[] = {
    {"lean", Policy::lean()}, {"lean/fixed_split", Policy::fixed_split()}, {"lean/data_parallel", Policy::data_parallel()}};
inline constexpr Implementation kDependentLaunch = {"lean/dependent_launch", Policy::lean(), true};

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
