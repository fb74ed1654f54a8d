// fp8 against OCP's definition in double arithmetic: all 256 patterns one way, every tie and its neighbours the other, and
// saturation at both ends.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "lean/float_types.hpp"
#include "support/random.hpp"
#include "support/reduced.hpp"

namespace lean {
namespace {

struct Format {
  int exponent_bits;
  int mantissa_bits;
  std::uint32_t largest;  // magnitude of the largest number
  bool has_infinity;

  [[nodiscard]] int bias() const { return (1 << (exponent_bits - 1)) - 1; }
};
template <typename T>
constexpr Format kFormat = {};
template <>
constexpr Format kFormat<Float8E4M3> = {4, 3, 0x7E, false};
template <>
constexpr Format kFormat<Float8E5M2> = {5, 2, 0x7B, true};

double value_of(std::uint32_t bits, const Format& format) {
  const std::uint32_t magnitude = bits & 0x7FU;
  const double sign = (bits & 0x80U) != 0 ? -1.0 : 1.0;
  if (magnitude > format.largest) {
    const bool infinite = format.has_infinity && magnitude == format.largest + 1;
    return infinite ? sign * std::numeric_limits<double>::infinity() : std::numeric_limits<double>::quiet_NaN();
  }
  const int exponent = static_cast<int>(magnitude >> format.mantissa_bits);
  const int mantissa = static_cast<int>(magnitude) & ((1 << format.mantissa_bits) - 1);
  if (exponent == 0) return sign * std::ldexp(mantissa, 1 - format.bias() - format.mantissa_bits);
  return sign * std::ldexp(mantissa + (1 << format.mantissa_bits), exponent - format.bias() - format.mantissa_bits);
}

double rounded(double x, const Format& format) {
  if (x == 0.0) return x;
  const double largest = value_of(format.largest, format);
  if (std::isinf(x)) return std::copysign(largest, x);
  const int exponent = std::max(std::ilogb(x), 1 - format.bias());
  const double unit = std::ldexp(1.0, exponent - format.mantissa_bits);
  const double nearest = std::nearbyint(x / unit) * unit;
  return std::fabs(nearest) > largest ? std::copysign(largest, x) : nearest;
}

template <typename T>
void expect_nearest_even(float x) {
  const T found = from_float<T>(x);
  ASSERT_EQ(value_of(found.bits, kFormat<T>), rounded(static_cast<double>(x), kFormat<T>)) << std::hexfloat << x;
  ASSERT_EQ((found.bits & 0x80U) != 0, std::signbit(x)) << std::hexfloat << x;
}

template <typename T>
class Float8 : public testing::Test {};
using Types = testing::Types<Float8E4M3, Float8E5M2>;
TYPED_TEST_SUITE(Float8, Types);

TYPED_TEST(Float8, EveryPatternStandsForItsValueAndSurvivesTheRoundTrip) {
  for (std::uint32_t bits = 0; bits <= 0xFFU; ++bits) {
    const TypeParam x{static_cast<std::uint8_t>(bits)};
    const auto found = static_cast<double>(to_float(x));
    const double expected = value_of(bits, kFormat<TypeParam>);
    ASSERT_EQ(std::isnan(found), std::isnan(expected)) << bits;
    if (std::isnan(expected)) continue;
    ASSERT_EQ(found, expected) << bits;
    ASSERT_EQ(std::signbit(found), std::signbit(expected)) << bits;
    if (!std::isfinite(expected)) continue;  // stores saturate
    ASSERT_EQ(from_float<TypeParam>(to_float(x)).bits, bits);
  }
}

TYPED_TEST(Float8, TiesAndTheirNeighboursRoundToNearestEven) {
  for (std::uint32_t bits = 0; bits < kFormat<TypeParam>.largest; ++bits) {
    const double low = value_of(bits, kFormat<TypeParam>);
    const auto tie = static_cast<float>(low + (value_of(bits + 1, kFormat<TypeParam>) - low) / 2.0);
    for (const float x : {tie, std::nextafter(tie, 0.0F), std::nextafter(tie, 1e30F)}) {
      expect_nearest_even<TypeParam>(x);
      expect_nearest_even<TypeParam>(-x);
      if (testing::Test::HasFatalFailure()) return;
    }
  }
}

TYPED_TEST(Float8, RandomValuesRoundToNearestEvenAndSaturate) {
  support::Stream random(45);
  for (std::int32_t round = 0; round < support::full_or_reduced(1'000'000, 100'000); ++round) {
    const auto x = std::bit_cast<float>(static_cast<std::uint32_t>(random.bits()));
    if (std::isnan(x)) {
      ASSERT_TRUE(std::isnan(to_float(from_float<TypeParam>(x))));
      continue;
    }
    expect_nearest_even<TypeParam>(x);
    if (testing::Test::HasFatalFailure()) return;
  }
  for (const float x : {0.0F, 1e-45F, 1e30F, 447.9F, 448.0F, 464.0F, 480.0F, 57344.0F, 61440.0F, 65536.0F, INFINITY}) {
    expect_nearest_even<TypeParam>(x);
    expect_nearest_even<TypeParam>(-x);
  }
}

static_assert(to_float(from_float<Float8E4M3>(1.0625F)) == 1.0F, "converts at compile time, ties to even");
static_assert(from_float<Float8E5M2>(1.0F).bits == 0x3C);

}  // namespace
}  // namespace lean
