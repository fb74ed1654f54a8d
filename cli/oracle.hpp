// Oracle: the fp64 answers to a problem, or to a sample of its rows where all would take too long, and the comparison of
// a result with them. Answers are computed once and serve every schedule, fix-up and instruction set.
#pragma once

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "backends/reference/error_bound.hpp"
#include "backends/reference/reference.hpp"
#include "cli/decode_problem.hpp"
#include "cli/memory.hpp"
#include "lean/problem.hpp"

namespace lean::cli {

inline constexpr std::int64_t kCheckEverything = std::numeric_limits<std::int64_t>::max();

struct Verdict {
  double error_ratio = 0.0;       // largest error / bound; above 1 fails
  std::int64_t rows_checked = 0;  // (sequence, query head, query token)
  std::int64_t rows = 0;
  std::string worst{};  // where, and how far

  [[nodiscard]] bool passes() const { return error_ratio <= 1.0; }
};

class Oracle {
 public:
  /// On the host: answers for rows worth up to `max_products` multiply-adds, spread over the batch, at least one output's. On
  /// the GPU: for every row. `problem` outlives this.
  explicit Oracle(const DecodeProblem& problem, std::int64_t max_products = kCheckEverything);

  /// Compares what o and lse of the problem hold now.
  [[nodiscard]] Verdict check(const reference::Rounding& rounding) const;

 private:
  /// One sequence's query heads that share a kv head, all or one of them, as a problem of its own.
  struct Item {
    std::int64_t sequence = 0;
    std::int32_t q_head = 0;
    Problem problem;
    reference::Answer answer;
  };

  void answer_on_host(std::int64_t max_products);
  void answer_on_gpu();

  const DecodeProblem& problem_;
  std::int64_t rows_ = 0;
  std::vector<Item> items_;
  // Where check() brings the results of a problem on the GPU.
  Buffer o_;
  Buffer lse_;
};

}  // namespace lean::cli
