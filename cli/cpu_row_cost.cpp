#include "cli/cpu_row_cost.hpp"

#include <algorithm>

namespace lean::cli {
namespace {

// What every machine measured so far does at least (bench/results/cpu-*.jsonl).
constexpr double kReadBytesPerUs = 10'000.0;  // of memory, one thread
constexpr double kShareOfPeak = 0.25;         // of the multiply-adds that the threads could make, by a call
constexpr double kFilledPerUs = 200.0;        // N(0, 1) elements
constexpr double kCheckedPerUs = 100.0;       // multiply-adds of the oracle

constexpr int kReadKernelPasses = 18;   // to choose among six loops
constexpr int kCallsBeside = 4;         // checked, warmed up
constexpr double kLeastRoundUs = 2000;  // Rounds::min_round_us

}  // namespace

std::int64_t bytes_to_measure(const ProblemSpec& spec) {
  constexpr std::int64_t kAnswerBytes = 3 * static_cast<std::int64_t>(sizeof(double));
  return 2 * spec.stored_elements() * bytes_of(spec.kv_type()) + spec.query_elements() * (2 * bytes_of(spec.dtype) + kAnswerBytes);
}

double seconds_to_measure(const ProblemSpec& spec, const RowRuns& runs, ComputePeak& peak) {
  const auto products = static_cast<double>(spec.products());
  const double outputs = static_cast<double>(spec.batch()) * spec.q_heads;
  const double checked = std::min(products, std::max(static_cast<double>(kMaxCheckedProducts), products / outputs));
  const double read_us = static_cast<double>(spec.kv_bytes()) / kReadBytesPerUs;
  const ProblemShape shape(spec);
  const Arithmetic arithmetic = arithmetic_of(Options{}, shape.problem());
  double us = 2.0 * static_cast<double>(spec.stored_elements()) / kFilledPerUs + checked / kCheckedPerUs;
  for (const std::int32_t threads : runs.threads) {
    const double call_us = std::max(read_us, products / (kShareOfPeak * peak.products_per_us(arithmetic, threads)));
    us += runs.implementations * (kCallsBeside * call_us + runs.rounds * std::max(call_us, kLeastRoundUs));
    us += kReadKernelPasses * read_us + runs.rounds * std::max(read_us, kLeastRoundUs);
  }
  return us / 1e6;
}

}  // namespace lean::cli
