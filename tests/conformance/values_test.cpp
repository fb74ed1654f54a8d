// Values: NaN and infinities, reachable and not; huge and tiny numbers; shapes of score that small random inputs never
// have; and data whose answer is exact.
#include <gtest/gtest.h>

#include <algorithm>
#include <cfenv>
#include <cmath>
#include <limits>

#include "api/backends.hpp"
#include "backends/reference/load.hpp"
#include "lean/float_types.hpp"
#include "problem/address.hpp"
#include "support/inputs.hpp"
#include "support/reduced.hpp"
#include "support/run_and_check.hpp"
#include "support/sweeps.hpp"
#include "support/tables.hpp"
#include "support/target.hpp"

namespace lean::support {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInf = std::numeric_limits<double>::infinity();

/// x as an output of this type holds it.
double rounded(double x, DType dtype) {
  const auto narrow = static_cast<float>(x);
  if (dtype == DType::kFloat32) return static_cast<double>(narrow);
  return static_cast<double>(dtype == DType::kFloat16 ? to_float(from_float<Half>(narrow))
                                                      : to_float(from_float<BFloat16>(narrow)));
}

/// LSE and O of one row.
using RowBits = std::vector<float>;
RowBits row_of(const TestProblem& built, std::int64_t sequence, std::int32_t head, std::int64_t token) {
  RowBits row{built.lse({sequence, head, token})};
  const Case& c = built.description();
  for (std::int32_t i = 0; i < (c.value_dim != 0 ? c.value_dim : c.head_dim); ++i) {
    row.push_back(static_cast<float>(built.o({sequence, head, token, i})));
  }
  return row;
}

bool all_nan(const RowBits& row) {
  return std::all_of(row.begin(), row.end(), [](float x) { return std::isnan(x); });
}

/// Puts a value into the inputs, runs, and says which rows changed: those that `reaches` names, and no other.
template <typename TPut, typename TReaches, typename TExpect>
void expect_local_effect(const Case& c, TPut put, TReaches reaches, TExpect expect) {
  const TestExecutor executor(c.executor);
  TestProblem clean(c);
  ASSERT_TRUE(run(clean, options_of(c, executor)));
  TestProblem built(c);
  put(built);
  built.remember();
  ASSERT_TRUE(run_and_check(built, reference::decode(built.problem()), options_of(c, executor)));
  int reached = 0;
  for (std::int64_t b = 0; b < c.batch(); ++b) {
    for (std::int32_t head = 0; head < c.q_heads; ++head) {
      for (std::int32_t token = 0; token < c.n_q[0]; ++token) {
        const RowBits row = row_of(built, b, head, token);
        if (reaches(b, head, token)) {
          ++reached;
          expect(row);
        } else {
          EXPECT_EQ(row, row_of(clean, b, head, token)) << "row (" << b << ", " << head << ", " << token << ") of " << to_text(c);
        }
      }
    }
  }
  EXPECT_GT(reached, 0);
}

/// Cases for R08 and R09: two sequences, two kv heads, three causal query tokens, several contributors.
std::vector<Case> local_effect_cases() {
  std::vector<Case> cases;
  for (const DType dtype : dtypes()) {
    for (const CpuIsa isa : available_isas()) {
      for (const std::int32_t d : {24, 7}) {
        if (!target_serves({.dtype = dtype, .head_dim = d})) continue;
        cases.push_back({.dtype = dtype,
                         .head_dim = d,
                         .lens = {1301, 409},
                         .n_q = {3},
                         .causal = true,
                         .input = Input::kNormal,
                         .workers = 5,
                         .isa = isa});
      }
    }
  }
  return cases;
}

TEST(Conformance, R08_NanInQueryReachesItsRowOnly) {
  for (const Case& c : local_effect_cases()) {
    expect_local_effect(
        c, [](TestProblem& p) { p.set_q({1, 2, 1, 3}, kNan); },
        [](std::int64_t b, std::int32_t head, std::int32_t token) { return b == 1 && head == 2 && token == 1; },
        [](const RowBits& row) { EXPECT_TRUE(all_nan(row)); });
  }
}

/// The end of a sequence's last row block is where the next one's first queries come along (copy_query_boxes()).
TEST(Conformance, R08_NanInQueryBehindARowBlockReachesItsRowOnly) {
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
    for (const std::int32_t head_dim : {64, 128, 192}) {
      Case c{.dtype = dtype, .q_heads = 4, .kv_heads = 1, .head_dim = head_dim, .lens = {300, 131}, .n_q = {70}, .causal = true};
      c.input = Input::kNormal;
      c.workers = 5;
      for (const char* layout : {"shd", "bshd", "bhsd"}) {
        c.q_layout = layout;
        expect_local_effect(
            c, [](TestProblem& p) { p.set_q({1, 2, 0, 3}, kNan); },
            [](std::int64_t b, std::int32_t head, std::int32_t token) { return b == 1 && head == 2 && token == 0; },
            [](const RowBits& row) { EXPECT_TRUE(all_nan(row)); });
      }
    }
  }
}

TEST(Conformance, R08_NanInKeyReachesTheRowsThatSeeIt) {
  for (const Case& c : local_effect_cases()) {
    for (const std::int64_t key : {std::int64_t{0}, std::int64_t{700}, std::int64_t{1299}}) {  // token 0 of 3 sees up to 1298
      expect_local_effect(
          c, [key](TestProblem& p) { p.set_k({0, 1, key, 5}, kNan); },
          [key](std::int64_t b, std::int32_t head, std::int32_t token) { return b == 0 && head >= 2 && key <= 1298 + token; },
          [](const RowBits& row) { EXPECT_TRUE(all_nan(row)); });
    }
  }
}

TEST(Conformance, R08_NanInValueReachesOneElementOfTheRowsThatSeeIt) {
  for (const Case& c : local_effect_cases()) {
    expect_local_effect(
        c, [](TestProblem& p) { p.set_v({1, 0, 123, 4}, kNan); },
        [](std::int64_t b, std::int32_t head, std::int32_t) { return b == 1 && head < 2; },
        [](const RowBits& row) {
          EXPECT_TRUE(std::isnan(row[1 + 4]));
          EXPECT_EQ(std::count_if(row.begin(), row.end(), [](float x) { return std::isnan(x); }), 1);
        });
  }
}

TEST(Conformance, R09_InfiniteScoresFollowIeee) {
  for (const Case& c : local_effect_cases()) {
    const auto make = [](double score) {
      return [score](TestProblem& p) {
        for (std::int32_t head = 0; head < 2; ++head) {
          for (std::int64_t token = 0; token < 3; ++token) p.set_q({1, head, token, 2}, 1.0);
        }
        p.set_k({1, 0, 200, 2}, score);
      };
    };
    const auto reaches = [](std::int64_t b, std::int32_t head, std::int32_t) { return b == 1 && head < 2; };
    // +inf - (+inf) is NaN; a score of -inf weighs nothing.
    expect_local_effect(c, make(kInf), reaches, [](const RowBits& row) { EXPECT_TRUE(all_nan(row)); });
    expect_local_effect(c, make(-kInf), reaches, [](const RowBits& row) {
      EXPECT_TRUE(std::all_of(row.begin(), row.end(), [](float x) { return std::isfinite(x); }));
    });
  }
}

/// Shapes whose row blocks are a kernel of their own on GPUs each: steps, chunks of every width, few values, latent rows.
std::vector<Case> shapes_of_every_tile(DType dtype) {
  const Case plain{.dtype = dtype, .lens = {700, 409}, .scale = 1e36F, .input = Input::kUniform, .workers = 5};
  std::vector<Case> cases;
  const auto add = [&](const auto& edit) {
    cases.push_back(plain);
    edit(cases.back());
  };
  for (const std::int32_t d : {64, 96, 128, 192, 256}) {
    for (const std::int32_t n_q : {1, 7, 70}) {
      add([=](Case& c) { c.head_dim = d, c.n_q = {n_q}; });
      if (d == 192) add([=](Case& c) { c.head_dim = d, c.value_dim = 128, c.n_q = {n_q}; });
    }
  }
  for (const std::int32_t heads : {16, 32, 64, 132}) {
    add([=](Case& c) {
      c.q_heads = heads, c.kv_heads = 1, c.head_dim = 576, c.value_dim = 512, c.values_in_keys = true, c.k_layout = "bhsd";
      if (heads == 132) c.workers = 2;  // 33 tiles a worker, of several blocks: in turns
    });
  }
  const std::size_t same = cases.size();
  for (std::size_t i = 0; i < same; ++i) {
    cases.push_back(cases[i]);
    cases.back().kv_type = KvType::kE4M3;
  }
  return cases;
}

/// q k is 400 in one dim, and only times the scale beyond fp32: a row that sees it is NaN.
TEST(Conformance, R09_AScaledScoreBeyondTheRangeIsInfinite) {
  support::EveryNth some(7);
  for (const DType dtype : dtypes()) {
    for (const Case& shape : shapes_of_every_tile(dtype)) {
      for (const CpuIsa isa : available_isas()) {
        for (const std::int64_t key : {std::int64_t{0}, std::int64_t{333}}) {
          if (some.skips()) continue;
          Case c = shape;
          c.isa = isa;
          const TestExecutor executor(c.executor);
          TestProblem built(c);
          if (!served(built, options_of(c, executor))) continue;
          ASSERT_TRUE(run(built, options_of(c, executor)));
          const std::int64_t token = c.n_q[0] - 1;
          const RowBits mean = row_of(built, 1, 1, token);
          built.set_q({1, 1, token, 2}, 1.0);  // one row; all others' scores are 0
          built.set_k({1, 0, key, 2}, 400.0);
          built.remember();
          ASSERT_TRUE(run(built, options_of(c, executor)));
          EXPECT_TRUE(all_nan(row_of(built, 1, 1, token))) << reproducer(c);
          if (!c.values_in_keys) {  // where it is one, the value changed too
            EXPECT_EQ(row_of(built, 1, 0, token), mean) << reproducer(c);
          }
        }
      }
    }
  }
}

/// Scores so far apart that the largest alone have weights.
struct FarScores {
  double sign = 1.0;
  float scale = 1.0F;
  bool mixed = false;  // on both sides of 0
};

/// A row's scores are one dim of its keys times a scale, the largest of two tokens in different tiles: the row is the mean of their
/// values, its log-sum-exp their score, and other rows of its block stay as they are. One key lies far below, at -inf under the largest
/// of scales.
TEST(Conformance, R09_FarScoresLeaveTheLargestAlone) {
  for (const DType dtype : dtypes()) {
    for (const Case& shape : shapes_of_every_tile(dtype)) {
      for (const CpuIsa isa : available_isas()) {
        for (const FarScores& far : {FarScores{1.0, 1e8F}, {1.0, 3e8F}, {-1.0, 1e12F}, {1.0, 1e36F, true}}) {
          if (far.sign > 0.0 && (reduced() || isa != available_isas().back())) continue;
          Case c = shape;
          c.isa = isa;
          c.scale = far.scale;
          const TestExecutor executor(c.executor);
          TestProblem built(c);
          if (!served(built, options_of(c, executor))) continue;
          const std::int64_t token = c.n_q[0] - 1;
          const double largest = far.mixed ? 8.0 : far.sign > 0.0 ? -0.5 : 8.0;
          for (std::int64_t t = 0; t < c.lens[1] && !far.mixed; ++t) {
            built.set_k({1, 0, t, 2}, -(std::abs(built.k({1, 0, t, 2})) + 1.0));
          }
          for (const std::int64_t t : {200, 400}) built.set_k({1, 0, t, 2}, largest * far.sign);
          built.set_k({1, 0, 333, 2}, -400.0 * far.sign);
          built.remember();
          RowBits mean;
          if (far.mixed) {
            ASSERT_TRUE(run(built, options_of(c, executor)));
            mean = row_of(built, 1, 0, token);
          }
          built.set_q({1, 1, token, 2}, far.sign);
          built.remember();
          ASSERT_TRUE(run(built, options_of(c, executor)));
          if (far.mixed) {
            EXPECT_EQ(row_of(built, 1, 0, token), mean) << reproducer(c);
          }
          const RowBits row = row_of(built, 1, 1, token);
          const double score = largest * static_cast<double>(far.scale);
          EXPECT_NEAR(row[0], score, 1e-6 * std::abs(score) + 1.0) << reproducer(c);
          const std::int32_t dims = c.value_dim != 0 ? c.value_dim : c.head_dim;
          for (std::int32_t i = 0; i < dims; ++i) {
            const auto value = [&](std::int64_t t) { return c.values_in_keys ? built.k({1, 0, t, i}) : built.v({1, 0, t, i}); };
            const double expected = (value(200) + value(400)) / 2;
            EXPECT_NEAR(row[static_cast<std::size_t>(i) + 1], expected, 0.01 * std::abs(expected) + 0.01)
                << i << " of " << reproducer(c);
          }
        }
      }
    }
  }
}

/// One key's score is the next number in fp32 above another's, of maxima with an even and an odd last place where that is 16, twice what
/// leaves a row as it is: whichever it refers to, its weights fit fp16.
TEST(Conformance, R09_TheNextScoreAboveAFarOneLeavesARowFinite) {
  for (const DType dtype : dtypes()) {
    for (const Case& shape : shapes_of_every_tile(dtype)) {
      if (shape.kv_type != KvType::kAsQueries) continue;
      for (int more = 0; more < 4; ++more) {
        Case c = shape;
        c.scale = 1e8F;
        for (int i = 0; i < more; ++i) c.scale = std::nextafter(c.scale, 2e8F);
        const TestExecutor executor(c.executor);
        TestProblem built(c);
        if (!served(built, options_of(c, executor))) continue;
        const std::int64_t token = c.n_q[0] - 1;
        built.set_q({1, 1, token, 2}, 1.0);
        built.set_q({1, 1, token, 3}, 0x1p-12);
        for (std::int64_t t = 0; t < c.lens[1]; ++t) {
          built.set_k({1, 0, t, 2}, t == 5 || t == 400 ? 1.0 : 0.0);
          built.set_k({1, 0, t, 3}, t == 400 ? 0x1p-11 : 0.0);
        }
        built.remember();
        ASSERT_TRUE(run(built, options_of(c, executor)));
        const RowBits row = row_of(built, 1, 1, token);
        EXPECT_TRUE(std::all_of(row.begin(), row.end(), [](float x) { return std::isfinite(x); })) << reproducer(c);
        EXPECT_NEAR(row[0], static_cast<double>(c.scale), 1e-6 * static_cast<double>(c.scale)) << reproducer(c);
      }
    }
  }
}

TEST(Conformance, R07_AllScoresMinusInfinityGiveAnEmptyRow) {
  for (const Case& shape : local_effect_cases()) {
    Case c = shape;
    c.q_heads = 2;
    c.kv_heads = 1;
    const TestExecutor executor(c.executor);
    TestProblem built(c);
    for (std::int32_t head = 0; head < c.q_heads; ++head) {
      for (std::int64_t token = 0; token < 3; ++token) built.set_q({1, head, token, 2}, 1.0);
    }
    for (std::int64_t t = 0; t < 409; ++t) built.set_k({1, 0, t, 2}, -kInf);
    built.remember();
    ASSERT_TRUE(run_and_check(built, reference::decode(built.problem()), options_of(c, executor)));
    EXPECT_EQ(built.lse({1, 0, 0}), -INFINITY);
    EXPECT_EQ(built.o({1, 0, 0, 0}), 0.0);
  }
}

TEST(Conformance, R10_UnreachableMemoryChangesNoBit) {
  for (const DType dtype : dtypes()) {
    for (const CpuIsa isa : available_isas()) {
      for (const auto& [k, v] : {std::pair{"bshd~gap5", "bhsd"},
                                 {"bhsd~inner2", "bshd~gap1"},
                                 {"shd", "hsd~gap3"},
                                 {"bhds", "sbhd"},
                                 {"bshd~gap8", "bhsd"},
                                 {"shd", "hsd~gap8"},
                                 {"hsd", "hsd"}}) {
        for (const std::int32_t d : {64, 21}) {
          Case c{.dtype = dtype,
                 .head_dim = d,
                 .lens = {101, 0, 333, 17},
                 .pad = {50, 0, 1, 16},
                 .capacity = 411,
                 .k_layout = k,
                 .v_layout = v,
                 .fill = Fill::kZero,
                 .workers = 7,
                 .isa = isa};
          const TestExecutor executor(c.executor);
          TestProblem zeros(c);
          if (!served(zeros, options_of(c, executor))) continue;
          ASSERT_TRUE(run_and_check(zeros, reference::decode(zeros.problem()), options_of(c, executor)));
          for (const Fill fill : {Fill::kNan, Fill::kInfinity}) {
            c.fill = fill;
            TestProblem built(c);
            ASSERT_TRUE(run(built, options_of(c, executor)));
            EXPECT_EQ(built.output_bits(), zeros.output_bits()) << reproducer(c);
          }
        }
      }
    }
  }
}

/// The last token is alone in its chunk, and only the last query sees it: the other query's part there is empty, with 0 x NaN in O.
TEST(Conformance, R07_WhatAnEmptyPartHoldsReachesNoRow) {
  for (const DType dtype : dtypes()) {
    for (const std::int32_t tiles : {1, 2, 5, 8}) {
      Case c{.dtype = dtype, .lens = {1}, .n_q = {2}, .causal = true, .policy = Policy::fixed_chunk(1), .workers = 5};
      const TestExecutor executor(c.executor);
      const Options options = options_of(c, executor);
      const TestProblem shape(c);
      if (!served(shape, options)) continue;
      c.lens = {backend_of(options.backend)->tiling_of(shape.problem(), options).config.tile_tokens * tiles + 1};
      TestProblem built(c);
      for (std::int32_t head = 0; head < c.kv_heads; ++head) built.set_v({0, head, c.lens[0] - 1, 3}, kNan);
      built.remember();
      const reference::Answer answer = reference::decode(built.problem());
      ASSERT_TRUE(run_and_check(built, answer, options)) << reproducer(c);
      EXPECT_FALSE(std::isnan(built.o({0, 1, 0, 3}))) << reproducer(c);
      EXPECT_TRUE(std::isnan(built.o({0, 1, 1, 3}))) << reproducer(c);
    }
  }
}

/// The last token is alone in its chunk and its score is -inf: that part is empty, like one that sees no token, whatever V holds there.
TEST(Conformance, R07_APartWhoseScoresAreMinusInfinityIsEmpty) {
  for (const DType dtype : dtypes()) {
    for (const CpuIsa isa : available_isas()) {
      Case c{.dtype = dtype, .lens = {1}, .policy = Policy::fixed_chunk(1), .workers = 5, .isa = isa};
      const TestExecutor executor(c.executor);
      const Options options = options_of(c, executor);
      const TestProblem shape(c);
      if (!served(shape, options)) continue;
      c.lens = {backend_of(options.backend)->tiling_of(shape.problem(), options).config.tile_tokens * 2 + 1};
      TestProblem built(c);
      for (std::int32_t head = 0; head < c.q_heads; ++head) built.set_q({0, head, 0, 2}, 1.0);
      for (std::int32_t head = 0; head < c.kv_heads; ++head) built.set_k({0, head, c.lens[0] - 1, 2}, -kInf);
      built.remember();
      ASSERT_TRUE(run_and_check(built, reference::decode(built.problem()), options));
      const auto bits = built.output_bits();
      for (std::int32_t head = 0; head < c.kv_heads; ++head) built.set_v({0, head, c.lens[0] - 1, 3}, kNan);
      built.remember();
      ASSERT_TRUE(run(built, options));
      EXPECT_EQ(built.output_bits(), bits) << reproducer(c);
    }
  }
}

/// More queries than keys: the first ones see nothing, and those behind them share their blocks and see NaN in V.
TEST(Conformance, R07_RowsThatSeeNothingAreEmptyWhateverOthersSee) {
  for (const DType dtype : dtypes()) {
    for (const std::int32_t n_q : {9, 70, 200}) {
      for (const std::int32_t d : {40, 64, 128}) {
        const Case c{.dtype = dtype, .head_dim = d, .lens = {1, 7}, .n_q = {n_q}, .causal = true, .workers = 3};
        const TestExecutor executor(c.executor);
        const Options options = options_of(c, executor);
        TestProblem built(c);
        if (!served(built, options)) continue;
        for (std::int32_t head = 0; head < c.kv_heads; ++head) {
          built.set_v({0, head, 0, 3}, kNan);
          built.set_v({1, head, 0, 3}, kInf);
        }
        built.remember();
        ASSERT_TRUE(run_and_check(built, reference::decode(built.problem()), options)) << reproducer(c);
        EXPECT_EQ(built.o({0, 1, n_q - 2, 3}), 0.0) << reproducer(c);
        EXPECT_EQ(built.lse({0, 1, n_q - 2}), -INFINITY);
        EXPECT_TRUE(std::isnan(built.o({0, 1, n_q - 1, 3}))) << reproducer(c);
        EXPECT_EQ(built.o({1, 0, n_q - 8, 3}), 0.0) << reproducer(c);
        EXPECT_FALSE(std::isfinite(built.o({1, 0, n_q - 7, 3}))) << reproducer(c);
      }
    }
  }
}

// ---- huge, tiny, steep ------------------------------------------------------------------------------------------------

/// Every key of a sequence has the score `score(token)`, exactly, at scale 1; q holds the part that fits.
template <typename TScore>
void set_scores(TestProblem& built, double q, TScore score) {
  const Case& c = built.description();
  for (std::int64_t b = 0; b < c.batch(); ++b) {
    for (std::int32_t i = 0; i < c.head_dim; ++i) {
      for (std::int32_t head = 0; head < c.q_heads; ++head) built.set_q({b, head, 0, i}, i == 0 ? q : 0.0);
      for (std::int64_t t = 0; t < c.lens[static_cast<std::size_t>(b)]; ++t) {
        for (std::int32_t head = 0; head < c.kv_heads; ++head) built.set_k({b, head, t, i}, i == 0 ? score(t) / q : 0.0);
      }
    }
  }
  built.remember();
}

/// The case with a mask that says value(key) of every key, for all rows.
template <typename TValue>
void set_mask(TestProblem& built, TValue value) {
  const Scores& scores = built.problem().scores;
  const Case& c = built.description();
  for (std::int32_t head = 0; head < c.q_heads; ++head) {
    for (std::int64_t key = 0; key < c.lens[0]; ++key) {
      const std::int64_t offset = mask_offset(scores.mask_strides, {0, head}, 0, key);
      if (scores.mask_is_boolean) {
        static_cast<std::uint8_t*>(const_cast<void*>(scores.mask))[offset] = value(key) != 0.0 ? 1 : 0;
        continue;
      }
      reference::store_element(const_cast<void*>(scores.mask), scores.mask_dtype, offset, value(key));
    }
  }
  for (std::int32_t head = 0; head < c.kv_heads; ++head) {  // keys that the case's own mask hid hold NaN
    for (std::int64_t t = 0; t < c.lens[0]; ++t) {
      for (std::int32_t i = 0; i < c.head_dim; ++i) {
        built.set_k({0, head, t, i}, std::sin(static_cast<double>(t * 7 + i)));
        built.set_v({0, head, t, i}, t < c.lens[0] / 2 ? 1.0 : 3.0);
      }
    }
  }
  built.remember();
}

/// A token whose weight underflows is read and multiplied, alone in its chunk or not; one that a mask hides from all rows never matters.
TEST(Conformance, R08_ValuesOfWeightZeroCountWhereTheyAreSeen) {
  for (const DType dtype : dtypes()) {
    for (const CpuIsa isa : available_isas()) {
      for (const std::int32_t d : {64, 24, 7}) {
        for (const Policy& policy : {Policy{}, Policy::fixed_chunk(1)}) {
          for (const Mask mask : {Mask::kNone, Mask::kBoolean}) {
            const Case c{.dtype = dtype, .head_dim = d, .lens = {300}, .scale = 1.0F, .mask = mask, .policy = policy, .isa = isa};
            const TestExecutor executor(c.executor);
            TestProblem built(c);
            if (!served(built, options_of(c, executor))) continue;
            for (const double value : {kNan, kInf}) {
              if (mask != Mask::kNone) set_mask(built, [](std::int64_t key) { return key == 200 ? 0.0 : 1.0; });
              set_scores(built, 1.0, [](std::int64_t t) { return t == 200 ? -2000.0 : 0.0; });
              for (std::int32_t head = 0; head < c.kv_heads; ++head) built.set_v({0, head, 200, 4}, value);
              built.remember();
              ASSERT_TRUE(run_and_check(built, reference::decode(built.problem()), options_of(c, executor)));
              EXPECT_EQ(std::isnan(built.o({0, 1, 0, 4})), mask == Mask::kNone) << reproducer(c);
              EXPECT_TRUE(std::isfinite(built.o({0, 1, 0, 3}))) << reproducer(c);
            }
          }
        }
      }
    }
  }
}

TEST(Conformance, R11_HugeEqualScoresAreAMean) {
  for (const double score : {1e30, -1e30, -5e4, 5e4}) {
    for (const DType dtype : dtypes()) {
      if (dtype == DType::kFloat16 && std::abs(score) > 1e6) continue;
      for (const CpuIsa isa : available_isas()) {
        // Powers of two and integer V: the mean is exact. fp16 and bf16 round score / q, equally for every token.
        Case c{.dtype = dtype, .lens = {256, 1024}, .scale = 1.0F, .input = Input::kUniform, .workers = 5, .isa = isa};
        const TestExecutor executor(c.executor);
        TestProblem built(c);
        set_scores(built, score < 1e6 ? 256.0 : 1024.0, [score](std::int64_t) { return score; });
        const reference::Answer answer = reference::decode(built.problem());
        ASSERT_TRUE(run(built, options_of(c, executor)));
        for (std::int64_t b = 0; b < 2; ++b) {
          for (std::int32_t i = 0; i < c.head_dim; ++i) {
            const double mean = answer.o[static_cast<std::size_t>(answer.row(b, 0, 3) * c.head_dim + i)];
            EXPECT_EQ(built.o({b, 3, 0, i}), rounded(mean, dtype)) << reproducer(c);
          }
        }
      }
    }
  }
}

TEST(Conformance, R11_OneHugeScoreTakesAll) {
  for (const DType dtype : dtypes()) {
    if (dtype == DType::kFloat16) continue;  // holds no such scores
    for (const CpuIsa isa : available_isas()) {
      for (const auto& [high, low] : {std::pair{1e30, -1e30}, {-5e4, -1e30}, {1e30, 5e4}}) {
        Case c{.dtype = dtype, .lens = {1511}, .scale = 1.0F, .workers = 5, .isa = isa};
        const TestExecutor executor(c.executor);
        TestProblem built(c);
        set_scores(built, 1024.0, [high = high, low = low](std::int64_t t) { return t == 977 ? high : low; });
        ASSERT_TRUE(run_and_check(built, reference::decode(built.problem()), options_of(c, executor)));
        for (std::int32_t i = 0; i < c.head_dim; ++i) EXPECT_EQ(built.o({0, 1, 0, i}), built.v({0, 0, 977, i}));
      }
    }
  }
}

TEST(Conformance, R12_DenormalsAndNegativeZeros) {
  for (const DType dtype : dtypes()) {
    const double tiny = dtype == DType::kFloat16 ? 0x1p-20 : 0x1p-130;  // below the type's normal range
    for (const CpuIsa isa : available_isas()) {
      Case c{.dtype = dtype, .lens = {211, 64}, .input = Input::kNormal, .isa = isa};
      const TestExecutor executor(c.executor);
      TestProblem built(c);
      for (std::int64_t t = 0; t < 211; ++t) {
        for (std::int32_t i = 0; i < c.head_dim; ++i) {
          built.set_v({0, 0, t, i}, tiny * static_cast<double>(t % 5 - 2));
          built.set_k({0, 1, t, i}, i % 2 == 0 ? -0.0 : tiny);
          if (t < 64) built.set_v({1, 0, t, i}, -0.0);
        }
      }
      built.remember();
      EXPECT_TRUE(run_and_check(built, reference::decode(built.problem()), options_of(c, executor)));
    }
  }
}

TEST(Conformance, R48_ShapesOfScores) {
  EveryNth some(5);
  for (const DType dtype : dtypes()) {
    for (const Input input :
         {Input::kPeaks, Input::kAscending, Input::kDescending, Input::kEqual, Input::kNormal, Input::kSignature}) {
      for (const float q_std : {0.1F, 1.0F, 10.0F}) {
        if (some.skips()) continue;
        Case c{.dtype = dtype, .q_heads = 6, .lens = {full_or_reduced(4099, 613), 1009, 61}, .input = input, .q_std = q_std};
        const TestExecutor executor(c.executor);
        TestProblem built(c);
        const reference::Answer answer = reference::decode(built.problem());
        for (const CpuIsa isa : available_isas()) {
          for (const Policy& policy : {Policy::lean(), Policy::fixed_split(5), Policy::fixed_chunk(256), Policy::data_parallel()}) {
            for (const std::int32_t workers : {1, 13, 64}) {
              Options options = options_of(c, executor);
              options.cpu_isa = isa;
              options.policy = policy;
              options.workers = workers;
              if (!served(built, options)) continue;
              EXPECT_TRUE(run_and_check(built, answer, options)) << name_of(isa) << ", workers " << workers;
            }
          }
        }
      }
    }
  }
}

/// Each rounding of a sum of equal terms goes the way of the one before it, so nothing but the sum's depth keeps it within the
/// bound.
TEST(Conformance, R48_EqualScoresOverEqualValuesHowEverManyThereAre) {
  for (const DType dtype : dtypes()) {
    for (const std::int32_t tokens : {512, 4096, full_or_reduced(32768, 8192)}) {
      for (const std::int32_t head_dim : {64, 16}) {
        Case c{.dtype = dtype, .head_dim = head_dim, .lens = {tokens}, .input = Input::kFlat};
        const TestExecutor executor(c.executor);
        TestProblem built(c);
        if (!served(built, options_of(c, executor))) continue;
        const reference::Answer answer = reference::decode(built.problem());
        for (const CpuIsa isa : available_isas()) {
          for (const std::int32_t workers : {1, 7}) {
            Options options = options_of(c, executor);
            options.cpu_isa = isa;
            options.workers = workers;
            EXPECT_TRUE(run_and_check(built, answer, options)) << name_of(isa) << ", workers " << workers;
          }
        }
      }
    }
  }
}

TEST(Conformance, R48_AHundredThousandTimesPointThreeIsPointThree) {
  if (!target_serves({.dtype = DType::kFloat32})) GTEST_SKIP() << "the target has no fp32";
  Case c{.dtype = DType::kFloat32,
         .q_heads = 1,
         .kv_heads = 1,
         .head_dim = 32,
         .lens = {100'000},
         .input = Input::kFlat,
         .workers = 1};
  const TestExecutor executor(c.executor);
  TestProblem built(c);
  for (std::int64_t t = 0; t < 100'000; ++t) {
    for (std::int32_t i = 0; i < c.head_dim; ++i) built.set_v({0, 0, t, i}, 0.3);
  }
  built.remember();
  const reference::Answer answer = reference::decode(built.problem());
  for (const CpuIsa isa : available_isas()) {
    c.isa = isa;
    ASSERT_TRUE(run_and_check(built, answer, options_of(c, executor))) << name_of(isa);
    EXPECT_NEAR(built.o({0, 0, 0, 5}), 0.3, 1e-5) << name_of(isa);
  }
}

/// A weight may fall below fp32's normal range, and one value at a time leaves the mean square of a row no room.
TEST(Conformance, TheBoundKnowsWeightsThatAreFlushedAndRowsOfOneElement) {
  if (target_serves({.dtype = DType::kFloat32, .value_dim = 1})) {
    for (const CpuIsa isa : available_isas()) {
      Case c{.dtype = DType::kFloat32, .value_dim = 1, .lens = {2}, .scale = 1.0F, .isa = isa};
      const TestExecutor executor(c.executor);
      TestProblem built(c);
      set_scores(built, 1.0, [](std::int64_t t) { return t == 0 ? 0.0 : -88.5; });
      for (std::int32_t head = 0; head < c.kv_heads; ++head) {
        for (std::int64_t t = 0; t < 2; ++t) built.set_v({0, head, t, 0}, static_cast<double>(t));
      }
      built.remember();
      EXPECT_TRUE(run_and_check(built, reference::decode(built.problem()), options_of(c, executor)));
    }
  }
  for (const DType dtype : dtypes()) {
    for (const std::uint64_t seed : {1U, 2U, 3U}) {
      Case c{.dtype = dtype, .q_heads = 64, .kv_heads = 8, .head_dim = 1, .input = Input::kNormal, .seed = seed};
      c.lens.assign(full_or_reduced(440U, 12U), 1000);
      if (!target_serves(c)) continue;
      expect_right_on_every_isa(c);
    }
  }
}

// ---- finite numbers stay finite ---------------------------------------------------------------------------------------------

constexpr float kLargest = std::numeric_limits<float>::max();

TEST(Conformance, R11_AMaskOfItsTypesSmallestNumberHidesNothing) {
  if (!target_serves({.mask = Mask::kFloat32})) GTEST_SKIP() << "the target has no masks";
  const double bf16_lowest = -static_cast<double>(to_float(BFloat16{0x7F7F}));
  for (const CpuIsa isa : available_isas()) {
    for (const auto& [mask, lowest] : {std::pair{Mask::kFloat32, -static_cast<double>(kLargest)},
                                       {Mask::kBFloat16, bf16_lowest},
                                       {Mask::kFloat32, static_cast<double>(kLargest)},
                                       {Mask::kFloat32, -2e38}}) {
      Case c{.lens = {256}, .mask = mask, .isa = isa};
      const TestExecutor executor(c.executor);
      TestProblem built(c);
      if (!served(built, options_of(c, executor))) continue;
      set_mask(built, [lowest = lowest](std::int64_t) { return lowest; });
      ASSERT_TRUE(run_and_check(built, reference::decode(built.problem()), options_of(c, executor)));
      EXPECT_EQ(built.o({0, 1, 0, 3}), 2.0) << reproducer(c);
      EXPECT_NEAR(static_cast<double>(built.lse({0, 1, 0})) / lowest, 1.0, 1e-6) << reproducer(c);
      // Of two such numbers the larger takes all.
      const double first = lowest < 0.0 ? 0.9 * lowest : lowest;
      const double second = lowest < 0.0 ? lowest : 0.9 * lowest;
      set_mask(built, [&](std::int64_t key) { return key < 128 ? first : second; });
      ASSERT_TRUE(run(built, options_of(c, executor)));
      EXPECT_EQ(built.o({0, 1, 0, 3}), 1.0) << reproducer(c);
    }
  }
}

TEST(Conformance, R11_AlibiSlopesAndSinksMayBeAnyFiniteNumber) {
  for (const DType dtype : dtypes()) {
    for (const CpuIsa isa : available_isas()) {
      Case steep{.dtype = dtype, .lens = {300}, .alibi = true, .input = Input::kNormal, .isa = isa};
      const TestExecutor executor(steep.executor);
      TestProblem slopes(steep);
      if (served(slopes, options_of(steep, executor))) {
        for (std::int32_t h = 0; h < steep.q_heads; ++h) const_cast<float*>(slopes.problem().scores.alibi_slopes)[h] = 3e38F;
        slopes.remember();
        ASSERT_TRUE(run_and_check(slopes, reference::decode(slopes.problem()), options_of(steep, executor)));
        EXPECT_EQ(slopes.o({0, 3, 0, 7}), slopes.v({0, 1, 299, 7})) << "the query's own key takes all";
      }
      for (const float sink : {kLargest, 3e38F, 2e38F, -3e38F}) {
        Case c{.dtype = dtype, .lens = {300}, .sinks = true, .input = Input::kNormal, .isa = isa};
        TestProblem built(c);
        if (!served(built, options_of(c, executor))) continue;
        for (std::int32_t h = 0; h < c.q_heads; ++h) const_cast<float*>(built.problem().scores.sinks)[h] = sink;
        built.remember();
        ASSERT_TRUE(run_and_check(built, reference::decode(built.problem()), options_of(c, executor)));
        if (sink < 0.0F) continue;
        EXPECT_EQ(built.lse({0, 1, 0}), sink);
        EXPECT_EQ(built.o({0, 1, 0, 7}), 0.0);
      }
    }
  }
}

TEST(Conformance, R11_SoftcapsAtTheEndsOfTheirRange) {
  for (const DType dtype : dtypes()) {
    for (const CpuIsa isa : available_isas()) {
      for (const float softcap : {1e-30F, 1e30F}) {
        EXPECT_TRUE(run_and_check({.dtype = dtype, .lens = {613}, .softcap = softcap, .input = Input::kPeaks, .isa = isa}));
      }
    }
  }
}

/// Who traps invalid operations is not interrupted by a right result.
TEST(Conformance, R09_NoInvalidOperationIsRaised) {
  if (on_cuda()) GTEST_SKIP() << "exceptions are the host's";
  for (const DType dtype : dtypes()) {
    for (const CpuIsa isa : available_isas()) {
      for (const bool sinks : {false, true}) {
        Case c{.dtype = dtype, .lens = {700, 0, 1}, .n_q = {2}, .causal = true, .sinks = sinks, .workers = 5, .isa = isa};
        c.executor = ExecutorKind::kDescending;
        const TestExecutor executor(c.executor);
        TestProblem built(c);
        const TestWorkspace workspace(built.problem(), options_of(c, executor), Fill::kZero);
        std::feclearexcept(FE_ALL_EXCEPT);
        ASSERT_TRUE(decode(built.problem(), options_of(c, executor), workspace.get()).ok());
        EXPECT_EQ(std::fetestexcept(FE_INVALID | FE_DIVBYZERO), 0) << reproducer(c);
      }
    }
  }
}

// ---- exact oracles ----------------------------------------------------------------------------------------------------

TEST(Conformance, UniformScoresAndIntegerValuesAreExact) {
  for (const DType dtype : dtypes()) {
    for (const CpuIsa isa : available_isas()) {
      for (const Policy& policy : all_policies()) {
        // 1024 tokens of integers in [-8, 8]: the sum is exact in fp32 in any order, the division by a power of two too.
        Case c{.dtype = dtype, .lens = {1024, 64, 1, 2048}, .input = Input::kUniform, .policy = policy, .workers = 7, .isa = isa};
        const TestExecutor executor(c.executor);
        TestProblem built(c);
        ASSERT_TRUE(run(built, options_of(c, executor)));
        for (std::int64_t b = 0; b < c.batch(); ++b) {
          const std::int64_t tokens = c.lens[static_cast<std::size_t>(b)];
          for (std::int32_t i = 0; i < c.head_dim; ++i) {
            double sum = 0.0;
            for (std::int64_t t = 0; t < tokens; ++t) sum += built.v({b, 1, t, i});
            EXPECT_EQ(built.o({b, 2, 0, i}), rounded(sum / static_cast<double>(tokens), dtype)) << reproducer(c);
          }
        }
      }
    }
  }
}

TEST(Conformance, OneHotAttentionReturnsThatValueRow) {
  for (const DType dtype : dtypes()) {
    for (const CpuIsa isa : available_isas()) {
      for (std::uint64_t seed = 1; seed <= full_or_reduced(20U, 3U); ++seed) {
        Case c{.dtype = dtype,
               .lens = {1511, 1, 97},
               .pad = {0, 0, 31},
               .input = Input::kOneHot,
               .seed = seed,
               .workers = 5,
               .isa = isa};
        const TestExecutor executor(c.executor);
        TestProblem built(c);
        ASSERT_TRUE(run(built, options_of(c, executor)));
        for (std::int64_t b = 0; b < c.batch(); ++b) {
          for (std::int32_t head = 0; head < c.q_heads; ++head) {
            const std::int64_t hot = InputPattern(c).hot_token(b, head / 2);
            for (std::int32_t i = 0; i < c.head_dim; ++i) {
              EXPECT_EQ(built.o({b, head, 0, i}), built.v({b, head / 2, hot, i})) << reproducer(c);
            }
          }
        }
      }
    }
  }
}

TEST(Conformance, R49_ValuesTimesTwoGiveOutputsTimesTwo) {
  for (const DType dtype : dtypes()) {
    for (const CpuIsa isa : available_isas()) {
      Case c{.dtype = dtype, .lens = {1511, 97}, .input = Input::kPeaks, .workers = 5, .isa = isa};
      const TestExecutor executor(c.executor);
      TestProblem once(c);
      TestProblem twice(c);
      for (std::int64_t b = 0; b < c.batch(); ++b) {
        for (std::int32_t head = 0; head < c.kv_heads; ++head) {
          for (std::int64_t t = 0; t < c.lens[static_cast<std::size_t>(b)]; ++t) {
            for (std::int32_t i = 0; i < c.head_dim; ++i) twice.set_v({b, head, t, i}, 2.0 * once.v({b, head, t, i}));
          }
        }
      }
      twice.remember();
      ASSERT_TRUE(run(once, options_of(c, executor)));
      ASSERT_TRUE(run(twice, options_of(c, executor)));
      for (std::int64_t b = 0; b < c.batch(); ++b) {
        for (std::int32_t i = 0; i < c.head_dim; ++i) EXPECT_EQ(twice.o({b, 3, 0, i}), 2.0 * once.o({b, 3, 0, i}));
      }
    }
  }
}

TEST(Conformance, R49_PermutedTokensGiveTheSameWithinTheBound) {
  for (const DType dtype : dtypes()) {
    Case c{.dtype = dtype, .lens = {1511}, .input = Input::kPeaks, .workers = 5};
    const TestExecutor executor(c.executor);
    TestProblem built(c);
    const reference::Answer answer = reference::decode(built.problem());
    const TestProblem original(c);
    for (std::int32_t head = 0; head < c.kv_heads; ++head) {
      for (std::int64_t t = 0; t < 1511; ++t) {
        const std::int64_t from = (t * 389 + 17) % 1511;  // 1511 is prime: a permutation
        for (std::int32_t i = 0; i < c.head_dim; ++i) {
          built.set_k({0, head, t, i}, original.k({0, head, from, i}));
          built.set_v({0, head, t, i}, original.v({0, head, from, i}));
        }
      }
    }
    built.remember();
    EXPECT_TRUE(run_and_check(built, answer, options_of(c, executor)));
  }
}

TEST(Conformance, R49_SplitAndMergedEqualsWhole) {
  if (!target_serves({.dtype = DType::kFloat32})) GTEST_SKIP() << "merge_states() takes fp32 results";
  for (const std::int32_t cut : {0, 1, 500, 1511}) {
    const Case whole{
        .dtype = DType::kFloat32, .lens = {1511}, .o_layout = "bshd", .lse_layout = "bshd", .input = Input::kPeaks, .workers = 5};
    Case right = whole;
    right.pad = {cut};
    const TestExecutor executor(whole.executor);
    TestProblem a(whole);
    TestProblem b(right);
    const reference::Answer answer = reference::decode(a.problem());
    a.kv_lengths()[0] = cut;  // [0, cut) here, [cut, 1511) there
    a.remember();
    ASSERT_TRUE(run(a, options_of(whole, executor)));
    ASSERT_TRUE(run(b, options_of(right, executor)));
    const Problem& left = a.problem();
    ASSERT_TRUE(merge_states(static_cast<float*>(left.o.data), left.lse.data, static_cast<const float*>(b.problem().o.data),
                             b.problem().lse.data, whole.q_heads, whole.head_dim)
                    .ok());
    a.kv_lengths()[0] = 1511;
    const reference::ErrorReport report = reference::compare(left, answer, rounding_of(left, options_of(whole, executor)));
    EXPECT_TRUE(report.passes()) << reference::describe(report);
  }
}

}  // namespace
}  // namespace lean::support
