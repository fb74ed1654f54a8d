// Preconditions: everything a Problem must satisfy before any backend looks at it, one row each.
// A row gives the argument's name, how to read the value seen, the rule, and the words for what is allowed;
// tests/unit/preconditions_test.cpp breaks every row once. Options and backends keep tables of the same form.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/message.hpp"
#include "lean/problem.hpp"
#include "lean/status.hpp"

namespace lean {

template <typename TSubject>
struct Precondition {
  StatusCode code;
  const char* argument;
  const char* allowed;
  std::int64_t (*seen)(const TSubject& subject) noexcept;
  bool (*holds)(const TSubject& subject) noexcept;
  double (*seen_real)(const TSubject& subject) noexcept = nullptr;  // in place of `seen` where the argument is a float
};

/// The rows of one table, in the order they are checked: later rows may rely on earlier ones.
template <typename TSubject>
struct PreconditionTable {
  const Precondition<TSubject>* rows = nullptr;
  std::size_t count = 0;

  /// The first broken row as a Status, or ok.
  [[nodiscard]] Status check(const TSubject& subject) const noexcept {
    for (std::size_t i = 0; i < count; ++i) {
      const Precondition<TSubject>& row = rows[i];
      if (row.holds(subject)) continue;
      if (row.seen_real != nullptr) return refuse_real(row.code, row.argument, row.seen_real(subject), row.allowed);
      return refuse(row.code, row.argument, row.seen(subject), row.allowed);
    }
    return {};
  }
};

/// What every backend demands of a Problem.
[[nodiscard]] PreconditionTable<Problem> problem_preconditions() noexcept;

/// dv: value_dim, or head_dim where that is 0.
[[nodiscard]] constexpr std::int32_t value_dim_of(const Problem& problem) noexcept {
  return problem.value_dim != 0 ? problem.value_dim : problem.head_dim;
}

}  // namespace lean
