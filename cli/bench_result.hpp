// BenchLine: one measured, failed or skipped (row, implementation, thread count), as a line of a result file and as a line
// for people; BenchSummary: what a whole run comes to.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cli/measure.hpp"
#include "cli/oracle.hpp"
#include "cli/problem_json.hpp"
#include "cli/problem_spec.hpp"
#include "cli/suites/suite.hpp"

namespace lean::cli {

/// What all lines of a run share.
struct BenchContext {
  std::string device;
  std::string isa;
  std::string executor;
  std::string commit;
  std::int64_t last_level_cache_bytes = 0;
};

struct BenchLine {
  std::string row{};
  Suite suite = Suite::kCpu;
  std::string impl{};
  ProblemSpec spec{};
  std::string isa{};  // of this call; empty: the run's
  std::int32_t threads = 0;
  Samples call{};           // empty: not measured, `note` says why
  Samples ceiling{};        // a pure read of the same bytes
  double compute_us = 0.0;  // the call's multiply-adds at the measured peak of these threads
  Verdict verdict{};
  std::string note{};

  [[nodiscard]] bool measured() const { return !call.us.empty(); }
  /// What shows that something else ran on the machine meanwhile, in words; empty when nothing does.
  [[nodiscard]] std::string noise() const;
  [[nodiscard]] bool failed() const { return measured() && !verdict.passes(); }
  [[nodiscard]] bool compute_bound() const { return compute_us > ceiling.median(); }
  [[nodiscard]] double roofline_us() const { return std::max(compute_us, ceiling.median()); }
  [[nodiscard]] double read_fraction() const { return ceiling.median() / call.median(); }
  [[nodiscard]] double roofline_fraction() const { return roofline_us() / call.median(); }
};

[[nodiscard]] Json to_json(const BenchLine& line, const BenchContext& context);

[[nodiscard]] std::string text_header();
[[nodiscard]] std::string to_text(const BenchLine& line);

/// Geometric mean and worst row of `lean` where reads bound and where arithmetic does, noisy rows left out and counted, and the
/// rows it lost to its rivals.
[[nodiscard]] std::string summary_text(const std::vector<BenchLine>& lines);

}  // namespace lean::cli
