// fp8 K/V: every code, every head dimension (rows that are no multiple of 16 bytes too), scales.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "backends/reference/load.hpp"
#include "support/reduced.hpp"
#include "support/run_and_check.hpp"
#include "support/sweeps.hpp"
#include "support/tables.hpp"

namespace lean::support {
namespace {

constexpr KvType kKvTypes[] = {KvType::kE4M3, KvType::kE5M2};

TEST(Conformance, Fp8WithEveryHeadDimAndQueryType) {
  for (const DType dtype : dtypes()) {
    for (const KvType type : kKvTypes) {
      std::vector<std::int32_t> dims;
      for (std::int32_t d = 1; d <= 256; d += full_or_reduced(5, 31)) dims.push_back(d);
      for (std::int32_t d = 8; on_cuda() && d <= 256; d += 8) dims.push_back(d);
      for (const std::int32_t d : dims) {
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

/// Every code of K in a dim of its own sequence: finite scores, infinite ones, NaN.
TEST(Conformance, Fp8EveryCodeOfKIsReadExactly) {
  for (const DType dtype : dtypes()) {
    for (const KvType type : kKvTypes) {
      Case c{.dtype = dtype, .kv_type = type, .head_dim = 40, .lens = std::vector<std::int32_t>(256, 3), .k_layout = "bshd"};
      TestProblem built(c);
      const Problem& problem = built.problem();
      auto* const codes = static_cast<std::uint8_t*>(const_cast<void*>(problem.k.data));
      for (std::int64_t i = 0; i < 256; ++i) {
        codes[i * problem.k.strides.sequence + i % 3 * problem.k.strides.token + i % 40] = static_cast<std::uint8_t>(i);
      }
      built.remember();
      const TestExecutor executor(c.executor, 4);
      EXPECT_TRUE(run_and_check(built, reference::decode(problem), options_of(c, executor)));
    }
  }
}

TEST(Conformance, R22_Fp8RowsMayBeginAnywhere) {
  const std::pair<const char*, const char*> layouts[] = {
      {"bhsd", "bhsd"},      {"bshd", "bhsd~gap16"},     {"bshd~gap1", "bhsd~gap2"}, {"bhsd~off1", "bshd~gap4"},
      {"bhsd~off4", "sbhd"}, {"bhsd~gap8", "bshd~off8"}, {"hsd", "hsd~off16"},       {"shd~gap5", "hsd~off3"}};
  std::size_t turn = 0;
  for (const std::int32_t d : {8, 64, 72, 128, 136, 200, 256}) {
    for (const auto& [k, v] : layouts) {
      const DType dtype = dtypes()[turn % dtypes().size()];
      const KvType type = kKvTypes[turn++ / 2 % 2];
      expect_right_on_every_isa({.dtype = dtype,
                                 .kv_type = type,
                                 .kv_scales = KvScales::kHead,
                                 .head_dim = d,
                                 .lens = {301, 0, 129},
                                 .pad = {3, 0, 0},
                                 .k_layout = k,
                                 .v_layout = v,
                                 .workers = 5});
    }
  }
}

TEST(Conformance, Fp8PagesOfAnySize) {
  EveryNth some(7);
  for (const std::int32_t page_tokens : {1, 3, 16, 64, 256}) {
    for (const std::int32_t d : {64, 72, 128, 256}) {
      for (const KvType type : kKvTypes) {
        for (const char* k : {"bhsd", "bshd", "bshd~gap3"}) {
          if (some.skips()) continue;
          Case c{.dtype = DType::kBFloat16,
                 .kv_type = type,
                 .kv_scales = KvScales::kHead,
                 .q_heads = 6,
                 .head_dim = d,
                 .lens = {301, 0, 129},
                 .page_tokens = page_tokens,
                 .csr = page_tokens == 3,
                 .k_layout = k,
                 .v_layout = page_tokens == 64 ? "bhsd~gap8" : "bhsd",
                 .workers = 5};
          expect_right_on_every_isa(c);
        }
      }
    }
  }
}

/// Lengths around the tiles' ends, several query tokens, rows of every row block.
TEST(Conformance, R06_Fp8EveryRowBlock) {
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    for (const std::int32_t d : cuda::kHeadDims) {
      for (const std::int32_t n_q : {1, 2, 3, 8, 17, 40}) {
        if (reduced() && (d > 64 || n_q > 8)) continue;
        expect_right_on_every_isa({.dtype = dtype,
                                   .kv_type = kKvTypes[static_cast<std::size_t>(n_q % 2)],
                                   .kv_scales = KvScales::kTensor,
                                   .q_heads = 12,
                                   .kv_heads = 3,
                                   .head_dim = d,
                                   .lens = {255, 256, 257, 511, 64, 40},
                                   .n_q = {n_q},
                                   .causal = true,
                                   .workers = 7});
      }
    }
  }
}

/// Where products need queries in another type, rows of any magnitude keep their precision.
TEST(Conformance, Fp8QueriesOfAnyMagnitude) {
  for (const DType dtype : dtypes()) {
    if (dtype == DType::kFloat16) continue;  // has no such numbers
    for (const KvType type : kKvTypes) {
      const Case c{.dtype = dtype, .kv_type = type, .kv_scales = KvScales::kHead, .lens = {613, 37}, .input = Input::kPeaks};
      TestProblem built(c);
      const Problem& problem = built.problem();
      for (std::int32_t kv_head = 0; kv_head < c.kv_heads; ++kv_head) {
        const int exponent = kv_head == 0 ? -90 : 90;
        const_cast<float*>(problem.k_scales)[kv_head] = std::ldexp(1.0F, -exponent);
        for (std::int64_t b = 0; b < c.batch(); ++b) {
          for (std::int32_t head = 2 * kv_head; head < 2 * kv_head + 2; ++head) {
            for (std::int32_t dim = 0; dim < c.head_dim; ++dim) {
              const At at{b, head, 0, dim};
              built.set_q(at, std::ldexp(built.q(at), exponent));
            }
          }
        }
      }
      built.remember();
      const TestExecutor executor(c.executor, 4);
      EXPECT_TRUE(run_and_check(built, reference::decode(problem), options_of(c, executor)));
    }
  }
}

/// Keys of 0 hide the largest element of every query: what is left decides.
TEST(Conformance, Fp8SmallQueriesBesideALargeOne) {
  for (const DType dtype : dtypes()) {
    if (dtype == DType::kFloat16) continue;
    for (const int exponent : {20, 40, 60}) {
      const Case c{.dtype = dtype, .kv_type = KvType::kE4M3, .lens = {613, 37}};
      TestProblem built(c);
      for (std::int64_t b = 0; b < c.batch(); ++b) {
        for (std::int32_t head = 0; head < c.q_heads; ++head) built.set_q({b, head, 0, 5}, std::ldexp(1.0, exponent));
        for (std::int32_t head = 0; head < c.kv_heads; ++head) {
          for (std::int64_t token = 0; token < c.lens[static_cast<std::size_t>(b)]; ++token) built.set_k({b, head, token, 5}, 0.0);
        }
      }
      built.remember();
      const TestExecutor executor(c.executor, 4);
      EXPECT_TRUE(run_and_check(built, reference::decode(built.problem()), options_of(c, executor))) << exponent;
    }
  }
}

/// In one query, and NaN in one value and one key too.
TEST(Conformance, R08_Fp8NanAndInfinityStayWhereTheyBelong) {
  const double nan = std::nan("");
  const double infinity = std::numeric_limits<double>::infinity();
  for (const DType dtype : dtypes()) {
    for (const KvType type : kKvTypes) {
      for (const double x : {nan, infinity, -infinity}) {
        const Case c{.dtype = dtype, .kv_type = type, .kv_scales = KvScales::kTensor, .head_dim = 72, .lens = {613, 37, 300}};
        TestProblem built(c);
        built.set_q({2, 3, 0, 1}, x);
        if (std::isnan(x)) {
          built.set_v({0, 1, 500, 70}, x);
          built.set_k({1, 0, 36, 71}, x);
        }
        built.remember();
        const TestExecutor executor(c.executor, 4);
        EXPECT_TRUE(run_and_check(built, reference::decode(built.problem()), options_of(c, executor)));
      }
    }
  }
}

TEST(Conformance, Fp8ScalesScale) {
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

/// Scales whose product with a row's own leaves fp32's normal range; and one that is no number for a row that has none.
TEST(Conformance, Fp8ScalesOfValuesMayBeAnyFiniteNumber) {
  for (const DType dtype : dtypes()) {
    for (const CpuIsa isa : available_isas()) {
      for (const float scale : {1e-39F, 1e35F, INFINITY}) {
        Case c{.dtype = dtype, .kv_type = KvType::kE4M3, .kv_scales = KvScales::kTensor, .lens = {4099, 0}, .isa = isa};
        const TestExecutor executor(c.executor);
        TestProblem built(c);
        if (!served(built, options_of(c, executor))) continue;
        *const_cast<float*>(built.problem().v_scales) = scale;
        built.remember();
        ASSERT_TRUE(run(built, options_of(c, executor)));
        EXPECT_EQ(built.o({1, 0, 0, 0}), 0.0);
        EXPECT_EQ(built.lse({1, 0, 0}), -INFINITY);
        if (std::isinf(scale) || dtype == DType::kFloat16) continue;  // fp16 holds no such values
        const reference::ErrorReport report = reference::compare(built.problem(), reference::decode(built.problem()),
                                                                 rounding_of(built.problem(), options_of(c, executor)));
        EXPECT_TRUE(report.passes()) << reference::describe(report);
      }
    }
  }
}

}  // namespace
}  // namespace lean::support
