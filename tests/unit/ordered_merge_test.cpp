// The laws of the ordered merge: what the CPU runs of it here, the GPU runs lane by lane.
#include "fixup/ordered_merge.hpp"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "support/random.hpp"

namespace lean::fixup {
namespace {

using softmax::kNegInf;
using support::Stream;

constexpr std::int32_t kDims = 8;
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

/// One row of a result.
struct Row {
  softmax::State state;
  float o[kDims] = {};

  [[nodiscard]] bool operator==(const Row& other) const {  // a zero's sign apart
    return state.m == other.state.m && state.l == other.state.l && std::equal(o, o + kDims, other.o);
  }
};

Row random_row(Stream& random) {
  Row row;
  row.state = {.m = static_cast<float>(random.between(-2000, 2000)) / 64.0F,
               .l = static_cast<float>(random.between(1, 5000)) / 7.0F};
  for (float& x : row.o) x = static_cast<float>(random.between(-9999, 9999)) / 37.0F;
  return row;
}
std::vector<Row> random_rows(Stream& random, std::int64_t count) {
  std::vector<Row> rows;
  for (std::int64_t i = 0; i < count; ++i) rows.push_back(random_row(random));
  return rows;
}
Row empty_row(float o) {
  Row row;
  std::fill_n(row.o, kDims, o);
  return row;
}

Partial partial_of(Row& row) { return {.o = row.o, .m = &row.state.m, .l = &row.state.l, .value_stride = kDims}; }

/// The merge, into a row that held something else before.
Row merged(std::vector<Row> parts) {
  Row whole = empty_row(kNan);
  whole.state = {kNan, kNan};
  merge_parts(
      partial_of(whole), 1, static_cast<std::int32_t>(parts.size()),
      [&](std::int32_t i) { return partial_of(parts[static_cast<std::size_t>(i)]); },
      [](float* sums, const float* part, float weight) {
        for (std::int32_t d = 0; d < kDims; ++d) sums[d] = add_part(sums[d], part[d], weight);
      });
  return whole;
}

TEST(OrderedMerge, APartAloneIsTheResult) {
  for (std::uint64_t seed = 1; seed <= 500; ++seed) {
    Stream random(seed);
    const Row row = random_row(random);
    EXPECT_EQ(merged({row}), row) << "seed " << seed;
  }
}

TEST(OrderedMerge, R07_EmptyPartsAddNothingWhateverTheirOHolds) {
  for (std::uint64_t seed = 1; seed <= 500; ++seed) {
    Stream random(seed);
    const std::vector<Row> parts = random_rows(random, random.between(1, 40));
    std::vector<Row> last = parts;
    std::vector<Row> first = parts;
    for (const float o : {0.0F, kNan, std::numeric_limits<float>::infinity(), 7.0F}) {
      last.push_back(empty_row(o));
      first.insert(first.begin(), empty_row(o));
    }
    EXPECT_EQ(merged(last), merged(parts)) << "seed " << seed;
    const Row moved = merged(first);  // l is added by place: the same within its roundings
    const Row whole = merged(parts);
    EXPECT_EQ(moved.state.m, whole.state.m);
    EXPECT_TRUE(std::equal(moved.o, moved.o + kDims, whole.o)) << "seed " << seed;
    EXPECT_NEAR(moved.state.l, whole.state.l, 16 * 0x1p-24F * whole.state.l);
  }
}

TEST(OrderedMerge, R07_EmptyPartsAloneAreEmpty) {
  for (const std::size_t count : {std::size_t{1}, std::size_t{2}, std::size_t{33}}) {
    EXPECT_EQ(merged(std::vector<Row>(count, empty_row(kNan))), empty_row(0.0F)) << count;
  }
}

TEST(OrderedMerge, AMaximumThatIsNoNumberMakesNoNumber) {
  for (const float m : {kNan, std::numeric_limits<float>::infinity()}) {
    for (const std::size_t place : {std::size_t{0}, std::size_t{1}, std::size_t{2}}) {
      Stream random(9);
      std::vector<Row> parts = random_rows(random, 3);
      parts[place].state.m = m;
      const Row whole = merged(parts);
      EXPECT_TRUE(std::isnan(whole.state.l)) << m << " at " << place;
      for (const float x : whole.o) EXPECT_TRUE(std::isnan(x)) << m << " at " << place;
    }
  }
}

TEST(OrderedMerge, AValueThatIsNoNumberStaysWhereItsPartWeighsNothing) {
  Stream random(11);
  std::vector<Row> parts = random_rows(random, 2);
  parts[0].state.m = -1000.0F;
  parts[0].o[3] = kNan;
  const Row whole = merged(parts);
  EXPECT_TRUE(std::isnan(whole.o[3]));
  EXPECT_EQ(whole.o[2], parts[1].o[2]);
}

TEST(OrderedMerge, StatesOfTwoPartsCommuteBitForBit) {
  for (std::uint64_t seed = 1; seed <= 2000; ++seed) {
    Stream random(seed);
    const std::vector<Row> parts = random_rows(random, 2);
    const Row ab = merged({parts[0], parts[1]});
    const Row ba = merged({parts[1], parts[0]});
    ASSERT_EQ(std::bit_cast<std::uint32_t>(ab.state.m), std::bit_cast<std::uint32_t>(ba.state.m));
    ASSERT_EQ(std::bit_cast<std::uint32_t>(ab.state.l), std::bit_cast<std::uint32_t>(ba.state.l)) << "seed " << seed;
  }
}

/// The same formula written out: O by index, l in halves.
TEST(OrderedMerge, R43_SumsAreInTheOrderThatAWarpHas) {
  for (std::uint64_t seed = 1; seed <= 500; ++seed) {
    Stream random(seed);
    const std::vector<Row> parts = random_rows(random, random.between(1, kMaxOneLevel));
    float m = kNegInf;
    for (const Row& part : parts) m = std::fmax(m, part.state.m);
    Row expected;
    std::vector<float> l(kMaxOneLevel);
    for (std::size_t i = 0; i < parts.size(); ++i) {
      const float weight = std::exp2(parts[i].state.m - m);
      l[i] = parts[i].state.l * weight;
      for (std::int32_t d = 0; d < kDims; ++d) expected.o[d] = std::fma(parts[i].o[d], weight, expected.o[d]);
    }
    for (std::size_t half = l.size() / 2; half > 0; half /= 2) {
      for (std::size_t i = 0; i < half; ++i) l[i] += l[i + half];
    }
    expected.state = {m, l[0]};
    ASSERT_EQ(merged(parts), expected) << "seed " << seed;
  }
}

/// Every lane of a warp comes to the sum that one thread has: lanes with a number each, which see each other's.
TEST(OrderedMerge, R43_EveryLaneComesToTheSumOfOneThread) {
  for (std::uint64_t seed = 1; seed <= 200; ++seed) {
    Stream random(seed);
    AllLanes lanes;
    for (float& x : lanes.x) x = static_cast<float>(random.between(1, 1000000)) / 977.0F;
    const AllLanes sums = sum_over_lanes(lanes, [](const AllLanes& x, std::int32_t step) { return x.across(step); });
    for (const float sum : sums.x) ASSERT_EQ(std::bit_cast<std::uint32_t>(sum), std::bit_cast<std::uint32_t>(lanes.sum()));
    const double exact = std::accumulate(lanes.x, lanes.x + kMaxOneLevel, 0.0);
    ASSERT_NEAR(lanes.sum(), exact, 5 * 0x1p-24 * exact);
  }
}

/// Any number of parts within the bound: each weight has the rounding of a difference and an exp2, each sum one rounding a part.
TEST(OrderedMerge, R48_AnyNumberOfPartsMakesTheWhole) {
  for (const std::int64_t count : {1, 2, 31, 32, 33, 64, 65, 200}) {
    Stream random(static_cast<std::uint64_t>(count));
    const std::vector<Row> parts = random_rows(random, count);
    const Row whole = merged(parts);
    double l = 0.0;
    double o = 0.0;
    double size = 0.0;
    for (const Row& part : parts) {
      const double weight = std::exp2(static_cast<double>(part.state.m) - static_cast<double>(whole.state.m));
      l += weight * static_cast<double>(part.state.l);
      o += weight * static_cast<double>(part.o[0]);
      size += weight * std::fabs(static_cast<double>(part.o[0]));
    }
    const double bound = static_cast<double>(count + 64) * 0x1p-24;  // differences of maxima below 2^6
    EXPECT_NEAR(whole.state.l, l, bound * l) << count;
    EXPECT_NEAR(whole.o[0], o, bound * size) << count;
  }
}

}  // namespace
}  // namespace lean::fixup
