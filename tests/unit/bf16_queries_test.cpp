// bf16 queries beside fp8 keys on the CUDA backend: the power of two that a row is multiplied by.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>

#include "backends/cuda/kernel/tile/bf16_queries.hpp"
#include "lean/float_types.hpp"

namespace lean::cuda {
namespace {

float power_of(std::uint32_t exponent_field) { return std::bit_cast<float>(exponent_field << 23); }

TEST(Bf16Queries, PowersAreEachOthersInverseAndBringTheLargestToTheTopOfFp16) {
  for (std::uint32_t largest = 0; largest < 0x7F80U; ++largest) {
    const QueryPower power = query_power(largest);
    ASSERT_EQ(power_of(power.up) * power_of(power.down), 1.0F) << largest;
    const float scaled = to_float(BFloat16{static_cast<std::uint16_t>(largest)}) * power_of(power.up);
    ASSERT_LT(scaled, 0x1p15F) << largest;
    if (largest >= (15U << 7)) {
      ASSERT_GE(scaled, 0x1p14F) << largest;
    }
  }
}

TEST(Bf16Queries, NoElementLosesMoreThanTheStatedPartOfTheLargest) {
  for (std::uint32_t largest = 0; largest < 0x7F80U; largest += 37) {
    const QueryPower power = query_power(largest);
    const double unit = to_float(BFloat16{static_cast<std::uint16_t>(largest)});
    for (std::uint32_t bits = largest % 3; bits <= largest; bits += 3) {
      const float x = to_float(BFloat16{static_cast<std::uint16_t>(bits)});
      const double seen = static_cast<double>(to_float(from_float<Half>(x * power_of(power.up)))) * power_of(power.down);
      ASSERT_LE(std::abs(seen - x), kQueryStep * unit) << largest << " " << bits;
      if (x >= 0x1p-31 * unit) {
        ASSERT_EQ(seen, x) << largest << " " << bits;
      }
    }
  }
}

/// NaN and infinity stay what they are.
TEST(Bf16Queries, R07_WhatIsNotFiniteStaysSo) {
  const QueryPower power = query_power(0x7F80U);
  const float infinity = to_float(BFloat16{0x7F80U});
  EXPECT_EQ(to_float(from_float<Half>(infinity * power_of(power.up))) * power_of(power.down), infinity);
  EXPECT_TRUE(std::isnan(to_float(from_float<Half>(to_float(BFloat16{0x7FFFU}) * power_of(query_power(0x7FFFU).up)))));
}

}  // namespace
}  // namespace lean::cuda
