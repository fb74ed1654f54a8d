// Conversions of every instruction set against lean/float_types.hpp: all values of fp16, bf16 and fp8 when read, and
// rounding to nearest even, on and beside every tie, when written.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <vector>

#include "backends/cpu/tile_kernels.hpp"
#include "lean/float_types.hpp"
#include "support/tables.hpp"

namespace lean::support {
namespace {

std::vector<std::uint16_t> all_16_bit_values() {
  std::vector<std::uint16_t> values;
  for (std::uint32_t bits = 0; bits <= 0xFFFF; ++bits) values.push_back(static_cast<std::uint16_t>(bits));
  return values;
}

template <typename T>
void expect_exact_reads(const cpu::TileKernels& kernels, DType dtype) {
  const std::vector<std::uint16_t> values = all_16_bit_values();
  for (const std::int32_t dims : {256, 37}) {  // whole vectors, and a rest
    std::vector<float> read(values.size() + 64);
    for (std::size_t at = 0; at + static_cast<std::size_t>(dims) <= values.size(); at += static_cast<std::size_t>(dims)) {
      kernels.load_row[cpu::table_index(dtype)](values.data() + at, read.data(), dims);
      for (std::size_t i = 0; i < static_cast<std::size_t>(dims); ++i) {
        const float expected = to_float(T{values[at + i]});
        if (std::isnan(expected)) {
          EXPECT_TRUE(std::isnan(read[i])) << std::hex << values[at + i];
        } else {
          EXPECT_EQ(std::bit_cast<std::uint32_t>(read[i]), std::bit_cast<std::uint32_t>(expected)) << std::hex << values[at + i];
        }
      }
    }
  }
}

/// Every value of the type, the midpoint to its neighbour, and the floats next to that.
template <typename T>
void expect_nearest_even_writes(const cpu::TileKernels& kernels, DType dtype) {
  std::vector<float> floats;
  for (const std::uint16_t bits : all_16_bit_values()) {
    const float low = to_float(T{bits});
    const float high = to_float(T{static_cast<std::uint16_t>(bits + 1)});
    if (!std::isfinite(low) || !std::isfinite(high)) continue;
    const float middle = 0.5F * low + 0.5F * high;
    floats.insert(floats.end(), {low, middle, std::nextafter(middle, low), std::nextafter(middle, high)});
  }
  floats.insert(floats.end(), {INFINITY, -INFINITY, 65519.0F, 65520.0F, 1e30F, 3.4e38F, -3.4e38F, 1e-45F, -1e-45F});
  for (const std::size_t dims : {std::size_t{256}, std::size_t{37}}) {
    std::vector<std::uint16_t> written(dims);
    for (std::size_t at = 0; at + dims <= floats.size(); at += dims) {
      kernels.store_row[cpu::table_index(dtype)](floats.data() + at, 1.0F, written.data(), static_cast<std::int32_t>(dims));
      for (std::size_t i = 0; i < dims; ++i) {
        EXPECT_EQ(written[i], from_float<T>(floats[at + i]).bits) << floats[at + i];
      }
    }
  }
}

template <typename T>
void expect_exact_fp8_reads(const cpu::TileKernels& kernels, DType dtype) {
  std::vector<std::uint8_t> values;
  for (int bits = 0; bits < 256; ++bits) values.push_back(static_cast<std::uint8_t>(bits));
  for (const std::int32_t dims : {256, 37}) {
    std::vector<float> read(256);
    for (std::size_t at = 0; at + static_cast<std::size_t>(dims) <= values.size(); at += static_cast<std::size_t>(dims)) {
      kernels.load_row[cpu::table_index(dtype)](values.data() + at, read.data(), dims);
      for (std::size_t i = 0; i < static_cast<std::size_t>(dims); ++i) {
        const float expected = to_float(T{values[at + i]});
        const auto bits = std::bit_cast<std::uint32_t>(read[i]);
        EXPECT_TRUE(std::isnan(expected) ? std::isnan(read[i]) : bits == std::bit_cast<std::uint32_t>(expected)) << at + i;
      }
    }
  }
}

TEST(Conversion, EveryInstructionSetReadsEveryValueExactly) {
  if (on_cuda()) GTEST_SKIP() << "the CPU's kernels";
  for (const CpuIsa isa : available_isas()) {
    SCOPED_TRACE(name_of(isa));
    expect_exact_reads<Half>(cpu::kernels_for(isa), DType::kFloat16);
    expect_exact_reads<BFloat16>(cpu::kernels_for(isa), DType::kBFloat16);
    expect_exact_fp8_reads<Float8E4M3>(cpu::kernels_for(isa), DType::kFloat8E4M3);
    expect_exact_fp8_reads<Float8E5M2>(cpu::kernels_for(isa), DType::kFloat8E5M2);
  }
}

TEST(Conversion, EveryInstructionSetWritesToNearestEven) {
  if (on_cuda()) GTEST_SKIP() << "the CPU's kernels";
  for (const CpuIsa isa : available_isas()) {
    SCOPED_TRACE(name_of(isa));
    expect_nearest_even_writes<Half>(cpu::kernels_for(isa), DType::kFloat16);
    expect_nearest_even_writes<BFloat16>(cpu::kernels_for(isa), DType::kBFloat16);
  }
}

}  // namespace
}  // namespace lean::support
