// RowsAhead: which lines the steps of a tile ask for, of rows side by side, apart, in pages and of several lists.
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "backends/cpu/prefetch.hpp"

namespace lean::cpu {
namespace {

constexpr std::int32_t kDims = 96;  // of two bytes: three lines
constexpr std::int64_t kRowBytes = std::int64_t{2} * kDims;

/// Rows that nobody reads.
class Memory {
 public:
  explicit Memory(std::size_t bytes) : bytes_(bytes) {}

  [[nodiscard]] const std::byte* at(std::int64_t byte) const { return bytes_.data() + byte; }
  /// Rows `stride` bytes apart, from a byte on.
  [[nodiscard]] TokenRows rows(std::int64_t from, std::int64_t stride, std::int32_t tokens) const {
    return {.data = at(from), .token_stride_bytes = stride, .tokens = tokens, .dims = kDims};
  }

 private:
  std::vector<std::byte> bytes_;
};

/// Those of rows one by one.
std::vector<const std::byte*> lines_of(const RowsAhead::Rows& lists) {
  std::vector<const std::byte*> lines;
  for (const TokenRows& rows : lists) {
    for (std::int32_t t = 0; t < rows.tokens; ++t) {
      for (std::int64_t byte = 0; byte < kRowBytes; byte += kLineBytes) lines.push_back(rows.row(t) + byte);
    }
  }
  return lines;
}

/// What the stages of a tile ask for, each in so many steps.
std::vector<const std::byte*> asked(const RowsAhead::Rows& lists, std::int32_t steps) {
  std::vector<const std::byte*> lines;
  RowsAhead ahead;
  ahead.begin(lists, 2);
  for (const std::int32_t eighths : {kScoresEighths, kSoftmaxEighths, kAccumulateEighths}) {
    ahead.share(eighths, steps);
    for (std::int32_t step = 0; step < steps; ++step) {
      ahead.step([&](const std::byte* line) { lines.push_back(line); });
    }
  }
  return lines;
}

TEST(RowsAhead, StagesAskForEveryLineOnceAndInOrder) {
  const Memory memory(1 << 20);
  const TokenRows together = memory.rows(0, kRowBytes, 128);
  const TokenRows apart = memory.rows(1 << 16, 8 * kRowBytes, 64);
  const std::vector<RowsAhead::Rows> cases = {{TokenRows{}, together, apart},
                                              {apart, together, TokenRows{}},
                                              {together, apart, together},
                                              {TokenRows{}, TokenRows{}, apart}};
  for (const RowsAhead::Rows& lists : cases) {
    for (const std::int32_t steps : {1, 7, 32, 5000}) EXPECT_EQ(asked(lists, steps), lines_of(lists)) << steps;
  }
  EXPECT_TRUE(asked({}, 8).empty());
  EXPECT_EQ(kScoresEighths + kSoftmaxEighths + kAccumulateEighths, 8);
}

TEST(RowsAhead, PagesOfAnyLengthAreFoundInATable) {
  const Memory memory(1 << 20);
  for (const std::int32_t page : {1, 16, 24, 64}) {
    std::vector<const std::byte*> table;
    for (std::int32_t t = 0; t < 128; ++t) {
      const std::int32_t place = 7 * (t / page) % (128 / page + 1);  // pages lie in another order
      table.push_back(memory.at((std::int64_t{place} * page + t % page) * kRowBytes));
    }
    TokenRows rows = memory.rows(0, kRowBytes, 128);
    rows.table = table.data();
    const std::vector<const std::byte*> lines = asked({TokenRows{}, rows, TokenRows{}}, 16);
    if (page % 16 == 0 || page == 1) {
      EXPECT_EQ(lines, lines_of({rows})) << page;  // page by page, or row by row
    } else {
      EXPECT_EQ(lines.size(), lines_of({rows}).size()) << page;  // where some rows mislead, as many others
    }
  }
}

TEST(RowsAhead, AStageAsksForItsShare) {
  const Memory memory(1 << 16);
  RowsAhead ahead;
  ahead.begin({memory.rows(0, kRowBytes, 64)}, 2);  // 192 lines
  const auto of_steps = [&](std::int32_t eighths, std::int32_t steps) {
    std::int32_t lines = 0;
    ahead.share(eighths, steps);
    for (std::int32_t step = 0; step < steps; ++step) ahead.step([&](const std::byte*) { ++lines; });
    return lines;
  };
  EXPECT_EQ(of_steps(3, 36), 72);
  EXPECT_EQ(of_steps(1, 5), 25);  // 24, and each step asks for as many
  EXPECT_EQ(of_steps(4, 96), 95);
  EXPECT_EQ(of_steps(4, 96), 0) << "all have been asked for";
}

}  // namespace
}  // namespace lean::cpu
