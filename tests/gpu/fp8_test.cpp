// The backend's conversions from fp8, by instruction and by arithmetic, against the library's own.
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "gpu/device_memory.hpp"
#include "gpu/test_kernels.hpp"
#include "lean/float_types.hpp"

namespace lean::gpu {
namespace {

constexpr std::uint32_t kPairs = 65536;

float expected_of(Fp8Conversion conversion, std::uint32_t code) {
  const auto bits = static_cast<std::uint8_t>(code);
  return conversion == Fp8Conversion::kE5M2 ? to_float(Float8E5M2{bits}) : to_float(Float8E4M3{bits});
}

bool same(float a, float b) { return (std::isnan(a) && std::isnan(b)) || (a == b && std::signbit(a) == std::signbit(b)); }

TEST(Fp8, EveryPairOfCodesIsConvertedExactly) {
  const DeviceBuffer halves(kPairs * sizeof(std::uint32_t));
  std::vector<std::uint32_t> found(kPairs);
  for (const Fp8Conversion conversion : {Fp8Conversion::kE5M2, Fp8Conversion::kE4M3, Fp8Conversion::kE4M3ByProduct}) {
    for (const bool upper : {false, true}) {
      halves.fill(std::byte{0});
      convert_fp8_pairs(halves.as<std::uint32_t>(), conversion, upper);
      halves.copy_to(found.data());
      for (std::uint32_t pair = 0; pair < kPairs; ++pair) {
        const float low = to_float(Half{static_cast<std::uint16_t>(found[pair])});
        const float high = to_float(Half{static_cast<std::uint16_t>(found[pair] >> 16)});
        ASSERT_TRUE(same(low, expected_of(conversion, pair & 0xFFU))) << pair;
        ASSERT_TRUE(same(high, expected_of(conversion, pair >> 8))) << pair;
      }
    }
  }
}

}  // namespace
}  // namespace lean::gpu
