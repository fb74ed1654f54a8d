// fp16 and bf16 against their definition in double arithmetic: all 65,536 patterns one way, random and boundary
// values the other.
#include "lean/float_types.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "support/random.hpp"
#include "support/reduced.hpp"

namespace lean {
namespace {

struct Format {
  int exponent_bits;
  int mantissa_bits;

  [[nodiscard]] int bias() const { return (1 << (exponent_bits - 1)) - 1; }
  [[nodiscard]] int top_exponent() const { return (1 << exponent_bits) - 1; }
};
template <typename T>
constexpr Format kFormat = {};
template <>
constexpr Format kFormat<Half> = {5, 10};
template <>
constexpr Format kFormat<BFloat16> = {8, 7};

/// The value a bit pattern stands for by IEEE 754.
double value_of(std::uint32_t bits, const Format& format) {
  const int exponent = static_cast<int>(bits >> format.mantissa_bits) & format.top_exponent();
  const int mantissa = static_cast<int>(bits) & ((1 << format.mantissa_bits) - 1);
  const double sign = (bits & 0x8000U) != 0 ? -1.0 : 1.0;
  if (exponent == format.top_exponent()) {
    return mantissa != 0 ? std::numeric_limits<double>::quiet_NaN() : sign * std::numeric_limits<double>::infinity();
  }
  if (exponent == 0) return sign * std::ldexp(mantissa, 1 - format.bias() - format.mantissa_bits);
  return sign * std::ldexp(mantissa + (1 << format.mantissa_bits), exponent - format.bias() - format.mantissa_bits);
}

/// Round-to-nearest-even in double: x to the nearest multiple of its unit, infinity beyond the largest finite value.
double rounded(double x, const Format& format) {
  if (x == 0.0 || !std::isfinite(x)) return x;
  const int exponent = std::max(std::ilogb(x), 1 - format.bias());
  const double unit = std::ldexp(1.0, exponent - format.mantissa_bits);
  const double nearest = std::nearbyint(x / unit) * unit;  // exact: x has 24 bits, ties to even by default
  const double limit = std::ldexp(2.0, format.bias());
  return std::fabs(nearest) >= limit ? std::copysign(std::numeric_limits<double>::infinity(), x) : nearest;
}

template <typename T>
class FloatTypes : public testing::Test {};
using Types = testing::Types<Half, BFloat16>;
TYPED_TEST_SUITE(FloatTypes, Types);

TYPED_TEST(FloatTypes, EveryPatternStandsForItsValue) {
  for (std::uint32_t bits = 0; bits <= 0xFFFFU; ++bits) {
    const auto found = static_cast<double>(to_float(TypeParam{static_cast<std::uint16_t>(bits)}));
    const double expected = value_of(bits, kFormat<TypeParam>);
    ASSERT_EQ(std::isnan(found), std::isnan(expected)) << bits;
    if (std::isnan(expected)) continue;
    ASSERT_EQ(found, expected) << bits;
    ASSERT_EQ(std::signbit(found), std::signbit(expected)) << bits;
  }
}

TYPED_TEST(FloatTypes, EveryPatternSurvivesTheRoundTrip) {
  for (std::uint32_t bits = 0; bits <= 0xFFFFU; ++bits) {
    const TypeParam x{static_cast<std::uint16_t>(bits)};
    const auto back = from_float<TypeParam>(to_float(x));
    if (std::isnan(value_of(bits, kFormat<TypeParam>))) {
      ASSERT_EQ(back.bits | 1U << (kFormat<TypeParam>.mantissa_bits - 1), back.bits) << "a NaN comes back quiet";
      ASSERT_EQ(back.bits & 0x8000U, bits & 0x8000U);
    } else {
      ASSERT_EQ(back.bits, bits);
    }
  }
}

template <typename T>
void expect_nearest_even(float x) {
  const T found = from_float<T>(x);
  const double expected = rounded(static_cast<double>(x), kFormat<T>);
  ASSERT_EQ(value_of(found.bits, kFormat<T>), expected) << std::hexfloat << x;
  ASSERT_EQ((found.bits & 0x8000U) != 0, std::signbit(x)) << std::hexfloat << x;
}

// Between neighbouring values lie a tie and its two fp32 neighbours: where a rounding can go wrong.
TYPED_TEST(FloatTypes, TiesAndTheirNeighboursRoundToNearestEven) {
  for (std::uint32_t bits = 0; bits < 0x7FFFU; ++bits) {
    const double low = value_of(bits, kFormat<TypeParam>);
    double high = value_of(bits + 1, kFormat<TypeParam>);
    if (!std::isfinite(low)) break;
    if (!std::isfinite(high)) high = std::ldexp(2.0, kFormat<TypeParam>.bias());  // the value that is rounded to infinity
    const double middle = low + (high - low) / 2.0;
    const auto tie = static_cast<float>(middle);
    if (static_cast<double>(tie) != middle) continue;  // half a bf16 subnormal below fp32's smallest
    for (const float x : {tie, std::nextafter(tie, 0.0F), std::nextafter(tie, std::numeric_limits<float>::infinity())}) {
      expect_nearest_even<TypeParam>(x);
      expect_nearest_even<TypeParam>(-x);
      if (testing::Test::HasFatalFailure()) return;
    }
  }
}

TYPED_TEST(FloatTypes, RandomValuesRoundToNearestEven) {
  support::Stream random(41);
  for (std::int32_t round = 0; round < support::full_or_reduced(1'000'000, 100'000); ++round) {
    const auto x = std::bit_cast<float>(static_cast<std::uint32_t>(random.bits()));
    if (std::isnan(x)) continue;
    expect_nearest_even<TypeParam>(x);
    if (testing::Test::HasFatalFailure()) return;
  }
}

TYPED_TEST(FloatTypes, R12_DenormalsZerosAndInfinitiesKeepTheirSign) {
  const float inf = std::numeric_limits<float>::infinity();
  for (const float x :
       {0.0F, std::numeric_limits<float>::denorm_min(), std::numeric_limits<float>::min(), 0x1p-25F, 0x1.000002p-25F, 0x1p-24F,
        0x1p-14F, 65504.0F, 65519.9F, 65520.0F, std::numeric_limits<float>::max(), inf}) {
    expect_nearest_even<TypeParam>(x);
    expect_nearest_even<TypeParam>(-x);
  }
}

TYPED_TEST(FloatTypes, R08_EveryNanStaysANan) {
  support::Stream random(43);
  for (std::int32_t round = 0; round < 100'000; ++round) {
    const std::uint32_t payload = static_cast<std::uint32_t>(random.bits()) >> random.between(9, 31);
    const std::uint32_t sign = random.chance(50) ? 0x80000000U : 0U;
    const float nan = std::bit_cast<float>(sign | 0x7F800000U | std::max(payload & 0x7FFFFFU, 1U));
    ASSERT_TRUE(std::isnan(value_of(from_float<TypeParam>(nan).bits, kFormat<TypeParam>)));
  }
}

TEST(Float32, IsLeftAlone) {
  for (const std::uint32_t bits : {0U, 0x80000000U, 1U, 0x7F800000U, 0x7FC01234U, 0x3F800001U}) {
    EXPECT_EQ(std::bit_cast<std::uint32_t>(to_float(std::bit_cast<float>(bits))), bits);
    EXPECT_EQ(std::bit_cast<std::uint32_t>(from_float<float>(std::bit_cast<float>(bits))), bits);
  }
}

static_assert(to_float(from_float<Half>(1.0009766F)) == 1.0009765625F, "converts at compile time");
static_assert(from_float<BFloat16>(1.0F).bits == 0x3F80U);

}  // namespace
}  // namespace lean
