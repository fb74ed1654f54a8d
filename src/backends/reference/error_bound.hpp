// The acceptance test: how far a result may lie from the oracle's, derived from how it was computed (docs/numerics.md).
// Per element, as root mean square of a row, and for the LSE; NaN and infinities must stand exactly where the oracle
// has them. The constants stand in error_bound.cpp, once, and are never tuned for a test. Called by tests and `lean run`.
#pragma once

#include <cstdint>
#include <string>

#include "backends/reference/reference.hpp"
#include "lean/problem.hpp"

namespace lean::reference {

/// How the computation under test rounds and in how many steps it merges.
struct Rounding {
  double p_roundoff = 0.0;          // u_P: unit roundoff of P's type in P V; 0 where P stays fp32, else unit_roundoff()
  bool p_is_half = false;           // P in fp16 loses tiny probabilities
  double query_step = 0.0;          // what an element of q may lose, of its row's largest: 0 where q is multiplied as it is
  double flushed_below = 0.0;       // values of v smaller than this count as 0: 2^-126 where subnormals are flushed
  std::int32_t tile_tokens = 1;     // tokens of a LeanTile
  std::int32_t tile_depth = 1;      // roundings of a tile's own sum, at most one for each token
  std::int32_t tile_roundings = 1;  // of what tiles are added to, for each tile
  std::int32_t contributors = 1;    // most segments that one output may be cut into: the number of workers
};

/// 2^-24, 2^-11, 2^-8 for fp32, fp16, bf16.
[[nodiscard]] double unit_roundoff(DType dtype);

enum class Quantity : std::int32_t { kOutput, kOutputRms, kLse };

struct ErrorReport {
  double error_ratio = 0.0;  // largest error / allowed error over elements, rows and LSE; above 1 fails
  double max_error = 0.0;    // |O' - O| over all finite elements
  double mean_error = 0.0;
  double rms_error = 0.0;
  std::int64_t class_mismatches = 0;  // NaN, +inf, -inf or finite where the oracle has another of these
  struct Worst {                      // where error_ratio was seen
    Quantity quantity = Quantity::kOutput;
    std::int64_t sequence = -1;
    std::int64_t token = -1;
    std::int64_t head = -1;
    std::int64_t dim = -1;  // kOutput only
    double measured = 0.0;
    double expected = 0.0;
    double allowed = 0.0;  // absolute error
  } worst;

  [[nodiscard]] bool passes() const { return error_ratio <= 1.0 && class_mismatches == 0; }
};

/// Compares problem.o, and problem.lse if asked for, with the oracle's answer to the same problem.
[[nodiscard]] ErrorReport compare(const Problem& problem, const Answer& answer, const Rounding& rounding);

/// One line: ratio, max, mean, rms, and the coordinate of the worst with its values.
[[nodiscard]] std::string describe(const ErrorReport& report);

}  // namespace lean::reference
