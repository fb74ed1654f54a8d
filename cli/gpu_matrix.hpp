// The benchmark's matrix for a GPU. Tier A: the rows that other libraries were measured on, by the same names. Tier B: the
// rest; rows that need what this version does not have are declared too, and say so.
#pragma once

#include <string>
#include <vector>

#include "cli/problem_spec.hpp"

namespace lean::cli {

struct GpuRow {
  std::string id;
  char tier = 'a';
  ProblemSpec spec{};
  std::string missing{};  // empty: can be measured
};

/// `tier` is a, b or all. `trace`, unless empty: a file whose requests make more rows of tier B. Throws BadArgument.
[[nodiscard]] std::vector<GpuRow> gpu_matrix(const std::string& tier, const std::string& trace);

/// Rows of one size that differ in the number of outputs only: their ids begin with this.
inline constexpr const char* kFlatnessPrefix = "flat ";

}  // namespace lean::cli
