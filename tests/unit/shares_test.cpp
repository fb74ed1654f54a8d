// Shares: boundaries as exact quotients, and the search among them.
#include "schedule/shares.hpp"

#include <gtest/gtest.h>

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

}  // namespace
}  // namespace lean::schedule
