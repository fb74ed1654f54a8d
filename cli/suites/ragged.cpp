// Batches of unequal lengths: one long request among short ones, the paper's ratios of average to longest, and requests of
// traces.
#include <fmt/format.h>

#include <cmath>

#include "cli/suites/declarations.hpp"
#include "cli/trace.hpp"

namespace lean::cli::suites {
namespace {

/// One request of `longest` tokens; the others equal, so that average / longest is `ratio`.
Lengths with_ratio(std::int32_t batch, std::int32_t longest, double ratio) {
  const double others = (ratio * batch - 1.0) * longest / (batch - 1);
  return one_long(longest, batch - 1, static_cast<std::int32_t>(std::lround(others)));
}

void add_ratios(Matrix& matrix) {
  for (const std::int32_t batch : {2, 4, 8, 16}) {
    for (const double ratio : {1.0, 0.75, 0.5, 0.25, 0.1}) {
      if (ratio * batch <= 1.0) continue;  // there is no such batch: the longest alone would be more
      matrix.add(fmt::format("ragged avg/max {} b{}", ratio, batch), decode_of(with_ratio(batch, 64 * k, ratio), kLlama8B));
    }
  }
}

void add_traces(Matrix& matrix, const std::string& trace) {
  matrix.add("ragged azure-conv 16", decode_of(pick_lengths(conv32_lengths(), 16, Pick::kSpread), kLlama8B));
  Lengths lengths = conv32_lengths();
  for (const std::int32_t requests : {32, 64, 128}) {
    while (static_cast<std::int32_t>(lengths.size()) < requests) lengths.insert(lengths.end(), lengths.begin(), lengths.end());
    matrix.add(fmt::format("ragged azure-conv {}", requests), decode_of(lengths, kLlama8B));
  }
  if (trace.empty()) return;
  for (const std::int32_t requests : {16, 64, 128}) {
    matrix.add(fmt::format("ragged trace {}", requests), decode_of(trace_lengths(trace, requests, Pick::kSpread), kLlama8B));
  }
}

}  // namespace

void add_ragged(Matrix& matrix, const std::string& trace) {
  matrix.begin(Suite::kRagged, Tier::kB);
  matrix.add("ragged 128k+15x4k", decode_of(one_long(128 * k, 15, 4 * k), kLlama8B));
  add_ratios(matrix);
  add_traces(matrix, trace);
}

}  // namespace lean::cli::suites
