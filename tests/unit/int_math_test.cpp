// Integer arithmetic that must not wrap, against 128 bits.
#include "base/int_math.hpp"

#include <gtest/gtest.h>

#include <type_traits>
#include <vector>

#include "support/random.hpp"

namespace lean {
namespace {

__extension__ using Int128 = __int128;
constexpr std::int64_t kMax = INT64_MAX;

TEST(IntMath, CeilDivRoundsUpAndNeverWraps) {
  for (std::int64_t a = 0; a <= 200; ++a) {
    for (std::int64_t b = 1; b <= 40; ++b) {
      const std::int64_t q = ceil_div(a, b);
      ASSERT_TRUE(q * b >= a && (q - 1) * b < a) << a << " / " << b;
      ASSERT_TRUE(round_up(a, b) == q * b);
    }
  }
  EXPECT_EQ(ceil_div(kMax, 1), kMax);
  EXPECT_EQ(ceil_div(kMax, 2), kMax / 2 + 1);
  EXPECT_EQ(ceil_div(kMax, kMax), 1);
  EXPECT_EQ(ceil_div(kMax - 1, kMax), 1);
  EXPECT_EQ(round_up(kMax - 300, 256), kMax - 255);  // 2^63 - 256, the largest multiple there is
}

TEST(IntMath, MinMaxAndClamp) {
  EXPECT_EQ(min_of(INT64_MIN, kMax), INT64_MIN);
  EXPECT_EQ(max_of(INT64_MIN, kMax), kMax);
  static_assert(std::is_same_v<decltype(min_of(1, 2)), int> && std::is_same_v<decltype(max_of(1, kMax)), std::int64_t>);
  EXPECT_EQ(min_of(-1, kMax), -1);  // of two types: in 64 bits
  EXPECT_EQ(max_of(-1, kMax), kMax);
  EXPECT_EQ(clamp_to(-5, 0, 10), 0);
  EXPECT_EQ(clamp_to(15, 0, 10), 10);
  EXPECT_EQ(clamp_to(7, 0, 10), 7);
  EXPECT_EQ(clamp_to(INT64_MIN, 3, 3), 3);
}

TEST(IntMath, R20_DivisorsDivideExactlyUpToTheLargestNumber) {
  const std::int32_t largest = INT32_MAX;
  std::vector<std::int32_t> divisors = {largest, largest - 1, largest / 2, largest / 2 + 1};
  for (std::int32_t d = 1; d <= 1000; ++d) divisors.push_back(d);
  for (std::int32_t bit = 10; bit < 31; ++bit) {
    for (const std::int32_t near : {-1, 0, 1}) divisors.push_back((1 << bit) + near);
  }
  for (const std::int32_t d : divisors) {
    const Divisor divisor(d);
    ASSERT_EQ(divisor.value(), d);
    const auto check = [&](std::int64_t a) {
      if (a < 0 || a > largest) return;
      ASSERT_EQ(quotient(static_cast<std::int32_t>(a), divisor), a / d) << a << " / " << d;
    };
    for (std::int64_t a = 0; a < 70; ++a) ASSERT_NO_FATAL_FAILURE(check(a));
    for (std::int64_t multiple = 1; multiple <= largest / d; multiple = 2 * multiple + 1) {
      for (const std::int64_t near : {-1, 0, 1}) ASSERT_NO_FATAL_FAILURE(check(multiple * d + near));
    }
    for (const std::int64_t near : {-1, 0}) {  // the last whole multiple, where rounding is worst, and the largest number
      ASSERT_NO_FATAL_FAILURE(check(std::int64_t{largest / d} * d + near));
      ASSERT_NO_FATAL_FAILURE(check(largest + near));
    }
  }
}

TEST(IntMath, R20_ShareBeginIsExactForAnyTotal) {
  support::Stream random(17);
  for (std::int32_t round = 0; round < 200'000; ++round) {
    const std::int64_t total = random.between(0, kMax - 1) >> random.between(0, 62);
    const std::int64_t parts = random.between(1, INT32_MAX) >> random.between(0, 30);
    if (parts == 0) continue;
    const std::int64_t index = random.between(0, parts);
    ASSERT_TRUE(Int128{share_begin(total, index, parts)} == Int128{total} * index / parts)
        << total << " * " << index << " / " << parts;
  }
  EXPECT_EQ(share_begin(kMax, INT32_MAX, INT32_MAX), kMax);
  EXPECT_EQ(share_begin(kMax, 0, INT32_MAX), 0);
}

TEST(IntMath, R20_CheckedProductSaysWhenItWouldWrap) {
  EXPECT_EQ(checked_product(0, kMax), 0);
  EXPECT_EQ(checked_product(kMax, 0), 0);
  EXPECT_EQ(checked_product(kMax, 1), kMax);
  EXPECT_EQ(checked_product(kMax, 2), -1);
  EXPECT_EQ(checked_product(std::int64_t{1} << 32, std::int64_t{1} << 31), -1);
  EXPECT_EQ(checked_product((std::int64_t{1} << 32) - 1, (std::int64_t{1} << 31)), ((std::int64_t{1} << 32) - 1) << 31);
  support::Stream random(19);
  std::int32_t wrapped = 0;
  for (std::int32_t round = 0; round < 100'000; ++round) {
    const std::int64_t a = random.between(0, kMax - 1) >> random.between(0, 62);
    const std::int64_t b = random.between(0, kMax - 1) >> random.between(0, 62);
    const Int128 exact = Int128{a} * b;
    ASSERT_TRUE(Int128{checked_product(a, b)} == (exact > Int128{kMax} ? Int128{-1} : exact)) << a << " * " << b;
    wrapped += exact > Int128{kMax} ? 1 : 0;
  }
  EXPECT_GT(wrapped, 10'000);
}

}  // namespace
}  // namespace lean
