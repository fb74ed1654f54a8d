// Shares: boundaries as exact quotients, and the search among them.
#include "schedule/shares.hpp"

#include <gtest/gtest.h>

#include <cstdlib>
#include <vector>

#include "support/random.hpp"

namespace lean::schedule {
namespace {

using support::Stream;

TEST(Shares, SmallLinesExhaustively) {
  for (std::int32_t parts = 1; parts <= 40; ++parts) {
    for (std::int64_t total = 0; total <= 150; ++total) {
      const Shares shares(total, parts);
      for (std::int32_t g = 0; g <= parts; ++g)
        ASSERT_EQ(shares.begin(g), g * total / parts) << g << " of " << parts << ", " << total;
      for (std::int32_t g = 0; g < parts; ++g) {
        ASSERT_EQ(shares.range(g).begin, shares.begin(g)) << g << " of " << parts << ", " << total;
        ASSERT_EQ(shares.range(g).end, shares.begin(g + 1)) << g << " of " << parts << ", " << total;
      }
      for (std::int64_t place = 0; place <= total; ++place) {
        std::int64_t first = 0;
        while (first * total / parts < place) ++first;
        ASSERT_EQ(shares.first_from(place), first) << place << " of " << total << " in " << parts;
      }
    }
  }
}

TEST(Shares, R04_LargeLinesExactly) {
  __extension__ using Int128 = __int128;
  Stream random(4);
  for (int i = 0; i < 200'000; ++i) {
    const auto parts = static_cast<std::int32_t>(random.between(1, random.one_of<std::int64_t>({132, 4096, INT32_MAX})));
    const std::int64_t total = random.between(0, random.one_of<std::int64_t>({1000, std::int64_t{1} << 40, std::int64_t{1} << 52}));
    const auto g = static_cast<std::int32_t>(random.between(0, parts));
    const Shares shares(total, parts);
    ASSERT_EQ(shares.begin(g), static_cast<std::int64_t>(Int128{g} * total / parts)) << g << " of " << parts << ", " << total;
    if (g < parts) {
      ASSERT_EQ(shares.range(g).end, shares.begin(g + 1)) << g << " of " << parts << ", " << total;
    }
    const std::int64_t place = random.between(0, total);
    const std::int32_t first = shares.first_from(place);
    ASSERT_GE(shares.begin(first), place);
    ASSERT_TRUE(first == 0 || shares.begin(first - 1) < place) << place << " of " << total << " in " << parts;
  }
}

/// Every worker has one place, in order, and any run of neighbouring places has its part of them.
TEST(Shares, R04_WorkersLieEvenlyOverThePlaces) {
  for (std::int32_t places = 1; places <= 140; ++places) {
    for (std::int32_t workers = 1; workers <= places; ++workers) {
      std::vector<std::int32_t> before = {0};  // workers before each place
      for (std::int32_t place = 0; place < places; ++place) {
        const std::int32_t worker = spread_worker(place, workers, places);
        const bool works = worker < workers;
        ASSERT_EQ(worker, works ? before.back() : workers) << "place " << place << " of " << places << ", " << workers;
        before.push_back(before.back() + (works ? 1 : 0));
      }
      ASSERT_EQ(before.back(), workers);
      for (std::int32_t begin = 0; begin < places; begin += 3) {
        for (std::int32_t end = begin + 1; end <= places; end += 5) {
          const std::int32_t held = before[static_cast<std::size_t>(end)] - before[static_cast<std::size_t>(begin)];
          ASSERT_LT(std::abs(held * places - (end - begin) * workers), places)
              << begin << " to " << end << " of " << places << ", " << workers;
        }
      }
    }
  }
  EXPECT_EQ(spread_worker(4095, 4096, 4096), 4095);
  EXPECT_EQ(spread_worker(4095, 4095, 4096), 4094);
  EXPECT_EQ(spread_worker(0, 4095, 4096), 4095);
}

}  // namespace
}  // namespace lean::schedule
