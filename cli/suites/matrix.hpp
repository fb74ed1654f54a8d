// The benchmark's matrix: which problems are measured. Every row is declared once, in the file of its suite; rows that need
// what the command does not have are declared too, and say so. The ids are the same on every machine and in every version.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cli/problem_spec.hpp"
#include "cli/suites/suite.hpp"

namespace lean::cli {

/// Tier a: the rows that other libraries were measured on, by the same names. Tier b: what was declared with them. Rows of
/// later suites are of neither.
enum class Tier : char { kNone = 0, kA = 'a', kB = 'b' };

/// Rows of one size that differ in the number of outputs only: their ids begin with this.
inline constexpr const char* kFlatnessPrefix = "flat ";

struct BenchRow {
  std::string id;
  Suite suite = Suite::kPaper;  // of those asked for, the first that has the row
  Tier tier = Tier::kNone;
  ProblemSpec spec{};
  std::string missing{};        // empty: can be measured
  std::vector<Suite> suites{};  // all that have it
};

/// Rows in the making. A problem that is declared again for another suite keeps its id and is counted to both.
class Matrix {
 public:
  /// What is added from here on is of this suite and tier.
  void begin(Suite suite, Tier tier = Tier::kNone);

  /// The id is the name and what else tells rows apart: "NAME 32/8 d128 bf16 bhsd n_q1".
  void add(const std::string& name, ProblemSpec spec, std::string missing = "");
  /// Also where the same problem has an id already.
  void add_again(const std::string& name, ProblemSpec spec, std::string missing = "");
  /// By an id of its own, also where the same problem has one already.
  void add_as(const std::string& id, ProblemSpec spec, std::string missing = "");

  /// The problem of a row that is declared already. Throws std::logic_error.
  [[nodiscard]] ProblemSpec spec_of(const std::string& id) const;

  [[nodiscard]] const std::vector<BenchRow>& rows() const { return rows_; }

 private:
  Suite suite_ = Suite::kPaper;
  Tier tier_ = Tier::kNone;
  std::vector<BenchRow> rows_;
};

/// What to take of the matrix.
struct Selection {
  std::vector<Suite> suites;      // empty: by tier
  std::string tier;               // "a", "b", "all"
  std::string trace;              // unless empty: a file whose requests make more ragged rows of tier b
  std::int64_t cpu_kv_bytes = 0;  // K and V of a row of Suite::kCpu
};

/// In the order of their declaration. Throws BadArgument.
[[nodiscard]] std::vector<BenchRow> select_rows(const Selection& selection);

}  // namespace lean::cli
