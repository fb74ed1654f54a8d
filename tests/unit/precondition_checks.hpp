// What the tests of every precondition table demand of it: one breaker or more for each row, a row for each breaker, and
// messages that say what is wrong.
#pragma once

#include <gtest/gtest.h>

#include <cstdio>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "problem/preconditions.hpp"
#include "support/random.hpp"
#include "support/reduced.hpp"

namespace lean::support {

/// Turns something valid into what breaks the row of `argument` whose words contain `allowed`, and no row before it.
template <typename TSubject>
struct Breaker {
  const char* argument;
  const char* allowed;
  std::function<void(TSubject&)> apply;
};

/// Index of the first broken row; the table's count if none is.
template <typename TSubject>
std::size_t first_broken(const PreconditionTable<TSubject>& table, const TSubject& subject) {
  std::size_t row = 0;
  while (row < table.count && table.rows[row].holds(subject)) ++row;
  return row;
}

template <typename TSubject>
void expect_breakers_and_rows_match(const PreconditionTable<TSubject>& table, const TSubject& valid,
                                    const std::vector<Breaker<TSubject>>& breakers) {
  ASSERT_EQ(first_broken(table, valid), table.count) << table.check(valid).message;
  std::vector<int> breakers_of(table.count, 0);
  for (std::size_t i = 0; i < breakers.size(); ++i) {
    TSubject broken = valid;
    breakers[i].apply(broken);
    const std::size_t row = first_broken(table, broken);
    ASSERT_LT(row, table.count) << "breaker " << i << " (" << breakers[i].argument << ") breaks nothing";
    EXPECT_STREQ(table.rows[row].argument, breakers[i].argument) << "breaker " << i;
    EXPECT_NE(std::strstr(table.rows[row].allowed, breakers[i].allowed), nullptr)
        << "breaker " << i << " met: " << table.rows[row].allowed;
    ++breakers_of[row];
  }
  for (std::size_t row = 0; row < table.count; ++row) {
    EXPECT_GT(breakers_of[row], 0) << "row " << row << " (" << table.rows[row].argument << ": " << table.rows[row].allowed
                                   << ") has no breaker";
  }
}

template <typename TSubject>
void expect_refusals_explain_themselves(const PreconditionTable<TSubject>& table, const TSubject& valid,
                                        const std::vector<Breaker<TSubject>>& breakers) {
  for (const Breaker<TSubject>& breaker : breakers) {
    TSubject broken = valid;
    breaker.apply(broken);
    const std::size_t index = first_broken(table, broken);
    ASSERT_LT(index, table.count);
    const Precondition<TSubject>& row = table.rows[index];
    char seen[64];
    if (row.seen_real != nullptr) {
      std::snprintf(seen, sizeof(seen), "%.9g", row.seen_real(broken));
    } else {
      std::snprintf(seen, sizeof(seen), "%lld", static_cast<long long>(row.seen(broken)));
    }
    const Status status = table.check(broken);
    EXPECT_EQ(status.code, row.code);
    EXPECT_EQ(status.message, std::string(row.argument) + " = " + seen + ": " + row.allowed);
    EXPECT_LT(std::strlen(status.message), sizeof(status.message) - 1) << "cut off: " << status.message;
  }
}

/// Overwrites a few 4-byte words with small, huge or random numbers.
template <typename TSubject>
void scramble(TSubject& subject, std::uint64_t seed) {
  Stream random(seed);
  auto* bytes = reinterpret_cast<unsigned char*>(&subject);
  for (std::int64_t changes = random.between(1, 12); changes > 0; --changes) {
    const auto word = static_cast<std::uint32_t>(random.one_of<std::uint64_t>(
        {random.bits(), 0U, 1U, 2U, 7U, 0x7FFFFFFFU, 0x80000000U, 0xFFFFFFFFU, 0x7F800000U, 0x7FC00000U}));
    const auto place = static_cast<std::size_t>(random.between(0, static_cast<std::int64_t>(sizeof(TSubject) / 4) - 1));
    std::memcpy(bytes + 4 * place, &word, 4);
  }
}

}  // namespace lean::support
