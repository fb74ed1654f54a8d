// Partial: rows of (O, m, l) in one run of floats, and the merge of two of them row by row.
#include "fixup/partial.hpp"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <set>
#include <vector>

#include "support/random.hpp"

namespace lean::fixup {
namespace {

using support::Stream;

/// A partial in memory of its own.
struct Held {
  PartialLayout layout;
  std::vector<float> floats;

  explicit Held(const PartialLayout& shape) : layout(shape), floats(static_cast<std::size_t>(shape.floats())) {}
  [[nodiscard]] Partial get() { return layout.at(floats.data()); }
  [[nodiscard]] std::vector<std::uint32_t> bits() const {
    std::vector<std::uint32_t> all;
    for (const float x : floats) all.push_back(std::bit_cast<std::uint32_t>(x));
    return all;
  }
};

Held random_partial(const PartialLayout& layout, Stream& random) {
  Held held(layout);
  for (float& x : held.floats) x = static_cast<float>(random.between(-1000, 1000)) * 0x1p-5F;
  const Partial partial = held.get();
  for (std::int32_t row = 0; row < layout.q_rows; ++row) {
    const bool empty = random.chance(20);
    partial.m[row] = empty ? softmax::kNegInf : static_cast<float>(random.between(-30, 30));
    partial.l[row] = empty ? 0.0F : static_cast<float>(random.between(1, 1000));
    for (std::int32_t d = 0; empty && d < layout.value_stride; ++d) partial.o_row(row)[d] = 0.0F;
  }
  return held;
}

auto merger(std::int32_t dims) {
  return [dims](const softmax::MergeStep& step, float* into, const float* other) {
    for (std::int32_t d = 0; d < dims; ++d) into[d] = softmax::merge_element(step, into[d], other[d]);
  };
}

TEST(PartialLayout, EveryFloatBelongsToExactlyOneElement) {
  for (const auto& [q_rows, value_stride] : {std::pair{16, 16}, {32, 48}, {128, 256}, {1, 1}}) {
    const PartialLayout layout{q_rows, value_stride};
    std::vector<float> floats(static_cast<std::size_t>(layout.floats()));
    const Partial partial = layout.at(floats.data());
    std::set<const float*> seen;
    for (std::int32_t row = 0; row < q_rows; ++row) {
      for (std::int32_t d = 0; d < value_stride; ++d) seen.insert(partial.o_row(row) + d);
      seen.insert(partial.m + row);
      seen.insert(partial.l + row);
    }
    EXPECT_EQ(seen.size(), floats.size());
    EXPECT_EQ(*seen.begin(), floats.data());
    EXPECT_EQ(*seen.rbegin(), floats.data() + floats.size() - 1);
  }
}

TEST(MergeInto, EveryRowIsTheMergeOfItsStatesAndNothingElseChanges) {
  const PartialLayout layout{16, 32};
  for (std::uint64_t seed = 1; seed <= 200; ++seed) {
    Stream random(seed);
    Held into = random_partial(layout, random);
    Held other = random_partial(layout, random);
    Held before = into;
    const auto other_bits = other.bits();
    const auto rows = static_cast<std::int32_t>(random.between(0, layout.q_rows));
    merge_into(into.get(), other.get(), rows, merger(layout.value_stride));
    Held expected = before;
    for (std::int32_t row = 0; row < rows; ++row) {
      const softmax::MergeStep step = softmax::merge_step(before.get().state(row), other.get().state(row));
      expected.get().m[row] = step.merged.m;
      expected.get().l[row] = step.merged.l;
      for (std::int32_t d = 0; d < layout.value_stride; ++d) {
        expected.get().o_row(row)[d] = softmax::merge_element(step, before.get().o_row(row)[d], other.get().o_row(row)[d]);
      }
    }
    ASSERT_EQ(into.bits(), expected.bits()) << "seed " << seed;
    ASSERT_EQ(other.bits(), other_bits);
  }
}

/// Partials of two halves of the keys, merged and finished, are the softmax over all keys. Scores far apart, so that a
/// merge that leaves a factor out shows (LeanAttention's pseudo-code does not re-scale O).
TEST(MergeInto, R48_TwoHalvesMakeTheWhole) {
  constexpr std::int32_t kKeys = 40;
  for (std::uint64_t seed = 1; seed <= 100; ++seed) {
    Stream random(seed);
    std::vector<double> score(kKeys);
    std::vector<double> value(kKeys);
    for (std::size_t i = 0; i < kKeys; ++i) {
      score[i] = static_cast<double>(random.between(-600, 600)) / 64.0;
      value[i] = static_cast<double>(random.between(-64, 64)) / 8.0;
    }
    const auto over = [&](std::size_t begin, std::size_t end) {
      Held held({1, 1});
      const Partial partial = held.get();
      partial.m[0] = softmax::kNegInf;
      for (std::size_t i = begin; i < end; ++i) partial.m[0] = std::max(partial.m[0], static_cast<float>(score[i]));
      double l = 0.0;
      double o = 0.0;
      for (std::size_t i = begin; i < end; ++i) {
        l += std::exp2(score[i] - static_cast<double>(partial.m[0]));
        o += std::exp2(score[i] - static_cast<double>(partial.m[0])) * value[i];
      }
      partial.l[0] = static_cast<float>(l);
      partial.o[0] = static_cast<float>(o);
      return held;
    };
    const auto cut = static_cast<std::size_t>(random.between(0, kKeys));
    Held merged = over(0, cut);
    Held right = over(cut, kKeys);
    merge_into(merged.get(), right.get(), 1, merger(1));
    Held whole = over(0, kKeys);
    const double expected = static_cast<double>(whole.get().o[0]) / static_cast<double>(whole.get().l[0]);
    const double result = static_cast<double>(merged.get().o[0]) / static_cast<double>(merged.get().l[0]);
    EXPECT_EQ(merged.get().m[0], whole.get().m[0]);
    EXPECT_NEAR(result, expected, 16 * 0x1p-24 * 8.0) << "seed " << seed;  // 8: largest |value|; a dozen roundings
  }
}

TEST(MergeInto, R07_EmptyWithEmptyStaysEmpty) {
  const PartialLayout layout{4, 16};
  Held a(layout);
  for (std::int32_t row = 0; row < layout.q_rows; ++row) a.get().m[row] = softmax::kNegInf;
  Held b = a;
  merge_into(a.get(), b.get(), layout.q_rows, merger(layout.value_stride));
  EXPECT_EQ(a.bits(), b.bits());
}

}  // namespace
}  // namespace lean::fixup
