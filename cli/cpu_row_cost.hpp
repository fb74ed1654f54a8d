// What measuring a row on the CPU takes of memory and time, before anything of it is made: rows of suites that were declared for
// GPUs may be too large.
#pragma once

#include <cstdint>
#include <vector>

#include "cli/ceilings.hpp"
#include "cli/problem_spec.hpp"

namespace lean::cli {

/// Multiply-adds of a row that the oracle is given, unless one output has more.
inline constexpr std::int64_t kMaxCheckedProducts = 50'000'000;

/// K and V, queries, outputs, and fp64 answers to every row.
[[nodiscard]] std::int64_t bytes_to_measure(const ProblemSpec& spec);

struct RowRuns {
  std::vector<std::int32_t> threads;  // one run each
  int implementations = 1;
  int rounds = 1;
};

/// An estimate that is meant to be too long rather than too short.
[[nodiscard]] double seconds_to_measure(const ProblemSpec& spec, const RowRuns& runs, ComputePeak& peak);

}  // namespace lean::cli
