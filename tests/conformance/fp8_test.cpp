// fp8 K/V: every code, every head dimension (rows that are no multiple of 16 bytes too), scales.
#include <gtest/gtest.h>

#include <cmath>

#include "backends/reference/load.hpp"
#include "support/reduced.hpp"
#include "support/run_and_check.hpp"
#include "support/tables.hpp"

namespace lean::support {
namespace {

constexpr KvType kKvTypes[] = {KvType::kE4M3, KvType::kE5M2};

TEST(Conformance, Fp8WithEveryHeadDimAndQueryType) {
  if (!target_serves({.kv_type = KvType::kE4M3})) GTEST_SKIP() << "the target has no fp8 K/V";
  for (const DType dtype : dtypes()) {
    for (const KvType type : kKvTypes) {
      for (std::int32_t d = 1; d <= 256; d += full_or_reduced(5, 31)) {
        Case c{.dtype = dtype, .kv_type = type, .kv_scales = KvScales::kHead, .q_heads = 6, .head_dim = d, .lens = {1, 131, 29}};
        c.seed = static_cast<std::uint64_t>(d);
        const TestExecutor executor(c.executor);
        TestProblem built(c);
        if (!served(built, options_of(c, executor))) continue;
        const reference::Answer answer = reference::decode(built.problem());
        for (const CpuIsa isa : available_isas()) {
          Options options = options_of(c, executor);
          options.cpu_isa = isa;
          EXPECT_TRUE(run_and_check(built, answer, options)) << name_of(isa);
        }
      }
    }
  }
}

/// One visible token: the output is its V row, whatever q and K are; so all 256 codes are read, exactly.
TEST(Conformance, Fp8EveryCodeOfVIsReadExactly) {
  if (!target_serves({.kv_type = KvType::kE4M3})) GTEST_SKIP() << "the target has no fp8 K/V";
  for (const CpuIsa isa : available_isas()) {
    for (const KvType type : kKvTypes) {
      Case c{.dtype = dtypes().front(),
             .kv_type = type,
             .q_heads = 1,
             .kv_heads = 1,
             .head_dim = 256,
             .lens = {1},
             .v_layout = "bshd"};
      c.isa = isa;
      const TestExecutor executor(c.executor);
      TestProblem built(c);
      if (!served(built, options_of(c, executor))) return;
      auto* const codes = static_cast<std::uint8_t*>(const_cast<void*>(built.problem().v.data));
      for (int i = 0; i < 256; ++i) codes[i] = static_cast<std::uint8_t>(i);
      built.remember();
      ASSERT_TRUE(run(built, options_of(c, executor)));
      for (std::int32_t i = 0; i < 256; ++i) {
        const double expected = built.v({0, 0, 0, i});
        const double found = built.o({0, 0, 0, i});
        EXPECT_TRUE(std::isnan(expected) ? std::isnan(found) : found == expected) << i << ": " << found << ", not " << expected;
      }
    }
  }
}

TEST(Conformance, Fp8ScalesScale) {
  if (!target_serves({.kv_type = KvType::kE4M3})) GTEST_SKIP() << "the target has no fp8 K/V";
  for (const DType dtype : dtypes()) {
    for (const KvType type : kKvTypes) {
      Case c{
          .dtype = dtype, .kv_type = type, .kv_scales = KvScales::kHead, .lens = {613, 37}, .scale = 0.25F, .input = Input::kPeaks};
      const TestExecutor executor(c.executor);
      TestProblem built(c);
      if (!served(built, options_of(c, executor))) continue;
      auto* const k_scales = const_cast<float*>(built.problem().k_scales);
      auto* const v_scales = const_cast<float*>(built.problem().v_scales);
      k_scales[0] = k_scales[1] = v_scales[0] = v_scales[1] = 1.0F;
      built.remember();
      ASSERT_TRUE(run(built, options_of(c, executor)));
      const auto plain = built.output_bits();
      std::vector<double> o;
      for (std::int32_t i = 0; i < c.head_dim; ++i) o.push_back(built.o({0, 3, 0, i}));
      v_scales[1] = 2.0F;  // kv head 1: query heads 2 and 3
      built.remember();
      ASSERT_TRUE(run(built, options_of(c, executor)));
      for (std::int32_t i = 0; i < c.head_dim; ++i) EXPECT_EQ(built.o({0, 3, 0, i}), 2.0 * o[static_cast<std::size_t>(i)]);
      v_scales[1] = 1.0F;
      k_scales[0] = k_scales[1] = 4.0F;
      built.problem().scores.scale = 0.0625F;
      built.remember();
      ASSERT_TRUE(run(built, options_of(c, executor)));
      EXPECT_EQ(built.output_bits(), plain);
    }
  }
}

}  // namespace
}  // namespace lean::support
