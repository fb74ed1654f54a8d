// What this machine is: the lines of `lean doctor`, and what every result records about where it was measured.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "lean/options.hpp"

namespace lean::cli {

struct CacheLevel {
  int level = 0;
  std::string type;            // Data, Instruction, Unified
  std::int64_t bytes = 0;      // of one instance
  std::int32_t instances = 0;  // that this process's processors use
};

struct Machine {
  std::string cpu_model;
  std::int32_t logical_cpus = 0;   // online
  std::int32_t usable_cpus = 0;    // this process may run on
  std::vector<CacheLevel> caches;  // empty where the system does not say
  std::string executor;            // OpenMP or std::thread
  std::int32_t threads = 0;        // of the executor

  /// All instances of the highest level together; a common size where the system does not say.
  [[nodiscard]] std::int64_t last_level_cache_bytes() const;
};

[[nodiscard]] Machine inspect_machine();

/// In ascending order; kBest is not among them.
[[nodiscard]] std::vector<CpuIsa> available_isas();

/// "2026-11-21T10:58:01Z".
[[nodiscard]] std::string utc_now();

}  // namespace lean::cli
