// Append: new keys and values reach the cache once, bit for bit, and are attended to: where they go the cache holds NaN before the
// call. Every run here compares the whole cache with what it must hold afterwards.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "backends/reference/load.hpp"
#include "problem/append.hpp"
#include "support/reduced.hpp"
#include "support/run_and_check.hpp"
#include "support/sweeps.hpp"
#include "support/tables.hpp"

namespace lean::support {
namespace {

TEST(Conformance, AppendWithEveryCacheLayoutAndType) {
  if (!target_serves({.append = true})) GTEST_SKIP() << "the target does not append";
  EveryNth some(5);
  for (const DType dtype : dtypes()) {
    for (const CpuIsa isa : available_isas()) {
      for (const char* k : {"bhsd", "bshd", "bshd~gap3", "bhds", "bhsd~inner2", "bshd~negs"}) {
        for (const char* v : {"bhsd~gap8", "bhsd~inner3"}) {
          for (const std::int32_t page_tokens : {0, 1, 16}) {
            for (const KvType type : {KvType::kAsQueries, KvType::kE4M3}) {
              if (some.skips()) continue;
              Case c{
                  .dtype = dtype, .kv_type = type, .head_dim = 24, .lens = {1, 613, 5, 97}, .n_q = {5}, .page_tokens = page_tokens};
              c.kv_scales = type == KvType::kE4M3 ? KvScales::kHead : KvScales::kNone;
              c.capacity = 620;
              c.causal = true;
              c.append = true;
              c.rotary_dim = 24;
              c.k_layout = k;
              c.v_layout = v;
              c.isa = isa;
              EXPECT_TRUE(run_and_check(c));
            }
          }
        }
      }
    }
  }
}

TEST(Conformance, AppendWithEveryPolicyFixupAndWorkerCount) {
  if (!target_serves({.append = true})) GTEST_SKIP() << "the target does not append";
  for (const auto& n_q : {std::vector<std::int32_t>{1}, {full_or_reduced(300, 33), 1, 0, 17}}) {
    Case c{.q_heads = 6,
           .lens = {full_or_reduced(1511, 413), 1, 0, 613},
           .n_q = n_q,
           .pad = {200, 0, 0, 0},
           .causal = true,
           .append = true,
           .rotary_dim = 64};
    c.q_layout = "shd";
    expect_right_however_shared_out(c, reduced() ? std::vector<std::int32_t>{5} : std::vector<std::int32_t>{1, 5, 40});
  }
}

/// Decode steps, for which a GPU has variants of their own. Rows of the output may begin at any multiple of 4 bytes.
TEST(Conformance, AppendInDecodeStepsOfEveryLayout) {
  if (!target_serves({.append = true})) GTEST_SKIP() << "the target does not append";
  EveryNth some(17);
  for (const DType dtype : dtypes()) {
    for (const KvType type : {KvType::kAsQueries, KvType::kE5M2}) {
      if (type != KvType::kAsQueries && dtype == DType::kFloat32) continue;
      for (const std::int32_t d : cuda::kHeadDims) {
        for (const std::int32_t n_q : {1, 3}) {
          for (const auto& [layout, page_tokens] : {std::pair{"bhsd", 0}, {"bshd", 0}, {"bhsd", 64}, {"bshd", 16}}) {
            for (const char* o_layout : {"bhsd", "bshd~off2"}) {
              for (const std::int32_t rotary_dim : {0, d}) {
                if (some.skips()) continue;
                Case c{.dtype = dtype, .kv_type = type, .q_heads = 8, .head_dim = d, .lens = {131, 0, 517, 64, 1}, .n_q = {n_q}};
                c.kv_scales = type == KvType::kAsQueries ? KvScales::kNone : KvScales::kTensor;
                c.pad = {0, 0, 100, 64, 0};
                c.page_tokens = page_tokens;
                c.causal = true;
                c.append = true;
                c.rotary_dim = rotary_dim;
                c.k_layout = c.v_layout = layout;
                c.o_layout = o_layout;
                c.workers = 33;
                EXPECT_TRUE(run_and_check(c));
              }
            }
          }
        }
      }
    }
  }
}

/// One call that appends gives the bits of a call on the cache as it is afterwards.
void expect_bits_of_the_cache_afterwards(const Case& c, TestProblem& built, const Options& options) {
  ASSERT_TRUE(run(built, options));
  const auto bits = built.output_bits();
  Problem whole = built.problem();
  whole.append = {};
  const TestWorkspace workspace(whole, options);
  ASSERT_TRUE(decode_and_wait(whole, options, workspace.get()).ok());
  EXPECT_EQ(built.output_bits(), bits) << reproducer(c);
}
void expect_bits_of_the_cache_afterwards(const Case& c) {
  const TestExecutor executor(c.executor);
  TestProblem built(c);
  const Options options = options_of(c, executor);
  if (served(built, options)) expect_bits_of_the_cache_afterwards(c, built, options);
}

TEST(Conformance, AppendedTokensCountAsIfTheyHadBeenInTheCache) {
  if (!target_serves({.append = true})) GTEST_SKIP() << "the target does not append";
  for (const std::int32_t head_dim : dims_of_equal_tiles()) {
    for (const DType dtype : dtypes()) {
      for (const KvType type : {KvType::kAsQueries, KvType::kE5M2}) {
        for (const std::int32_t page_tokens : {0, 16}) {
          expect_bits_of_the_cache_afterwards({.dtype = dtype,
                                               .kv_type = type,
                                               .kv_scales = type == KvType::kE5M2 ? KvScales::kTensor : KvScales::kNone,
                                               .head_dim = head_dim,
                                               .lens = {613, 37},
                                               .n_q = {4},
                                               .page_tokens = page_tokens,
                                               .causal = true,
                                               .append = true});
        }
      }
    }
  }
}

/// K and V of the first `tokens` tokens of a sequence, as the cache holds them now.
std::vector<double> cached(const TestProblem& built, std::int64_t sequence, std::int64_t tokens) {
  std::vector<double> elements;
  for (std::int32_t head = 0; head < built.problem().kv_heads; ++head) {
    for (std::int64_t t = 0; t < tokens; ++t) {
      for (std::int32_t i = 0; i < built.problem().head_dim; ++i) {
        elements.push_back(built.k({sequence, head, t, i}));
        elements.push_back(built.v({sequence, head, t, i}));
      }
    }
  }
  return elements;
}

/// A call that is told how many tokens were there before it finds the lengths by itself: the bits of a call that is given them.
void expect_bits_of_given_lengths(const Case& c) {
  const TestExecutor executor(c.executor);
  TestProblem built(c);
  const Options options = options_of(c, executor);
  if (!served(built, options)) return;
  ASSERT_TRUE(run(built, options));
  const auto bits = built.output_bits();
  const auto cache = cached(built, 0, c.lens[0]);
  Problem told = built.problem();
  const auto bytes = static_cast<std::size_t>(told.batch) * sizeof(std::int32_t);
  const GuardedBuffer before(bytes, c.guard);
  const GuardedBuffer lengths(bytes, c.guard);  // poison
  for (std::int64_t b = 0; b < told.batch; ++b) before.as<std::int32_t>()[b] = told.kv_lengths[b] - LengthSource(told)(b).q_tokens;
  told.append.cached_lengths = before.as<std::int32_t>();
  told.kv_lengths = lengths.as<std::int32_t>();
  built.restore_cache();
  built.poison_outputs();
  const TestWorkspace workspace(told, options);
  ASSERT_TRUE(decode_and_wait(told, options, workspace.get()).ok());
  EXPECT_EQ(built.output_bits(), bits) << reproducer(c);
  EXPECT_EQ(cached(built, 0, c.lens[0]), cache) << reproducer(c);
  EXPECT_TRUE(std::equal(c.lens.begin(), c.lens.end(), lengths.as<std::int32_t>())) << reproducer(c);
  EXPECT_TRUE(before.intact() && lengths.intact());
}

TEST(Conformance, AppendCountsNewTokensWhereItIsToldOfThoseBefore) {
  if (!target_serves({.append = true})) GTEST_SKIP() << "the target does not append";
  for (const std::int32_t page_tokens : {0, 16}) {
    for (const auto& n_q : {std::vector<std::int32_t>{1}, {3}, {5, 0, 1, 37}}) {
      for (const std::int32_t rotary_dim : {0, 64}) {
        Case c{.lens = {613, 40, 3, 97}, .n_q = n_q, .page_tokens = page_tokens, .causal = true, .append = true};
        c.rotary_dim = rotary_dim;
        if (n_q.size() > 1) c.q_layout = "shd";  // else all have the first number
        expect_bits_of_given_lengths(c);
      }
    }
  }
}

/// Scores under rotary embedding depend on the distance of two positions: turning both by the same angle changes nothing but
/// rounding. And positions count from the first valid token, so left padding does not matter.
TEST(Conformance, RotaryPositionsCountFromTheFirstValidToken) {
  if (!target_serves({.dtype = DType::kFloat32, .append = true})) GTEST_SKIP() << "the target appends no fp32 keys";
  for (const bool interleaved : {false, true}) {
    Case c{.dtype = DType::kFloat32,
           .lens = {9},
           .n_q = {9},
           .causal = true,
           .append = true,
           .rotary_dim = 64,
           .input = Input::kNormal};
    c.rotary_interleaved = interleaved;
    const TestExecutor executor(c.executor);
    TestProblem plain(c);
    c.lens = {29};
    c.pad = {20};
    TestProblem padded(c);
    const auto fill = [](const TestProblem& built) {
      for (std::int32_t head = 0; head < 2; ++head) {
        for (std::int64_t t = 0; t < 9; ++t) {
          for (std::int64_t i = 0; i < 64; ++i) {
            const Append& append = built.problem().append;
            const double x = std::sin(static_cast<double>(head + 3 * t + 7 * i));
            for (const TensorView* tensor : {&append.k, &append.v}) {
              const std::int64_t offset = head * tensor->strides.head + t * tensor->strides.token + i;
              reference::store_element(const_cast<void*>(tensor->data), tensor->dtype, offset, x);
            }
          }
        }
      }
    };
    fill(plain);
    fill(padded);
    plain.remember();
    padded.remember();
    ASSERT_TRUE(run_and_check(plain, reference::decode(plain.problem()), options_of(c, executor)));
    ASSERT_TRUE(run(padded, options_of(c, executor)));
    EXPECT_EQ(padded.output_bits(), plain.output_bits());
  }
}

/// Other libraries count positions from the cache's first token, padding or not.
TEST(Conformance, RotaryPositionsMayCountFromTheFirstTokenOfTheCache) {
  if (!target_serves({.append = true})) GTEST_SKIP() << "the target does not append";
  Case c{.dtype = DType::kFloat16, .lens = {29}, .n_q = {2}, .pad = {20}, .causal = true, .append = true, .rotary_dim = 64};
  const TestExecutor executor(c.executor);
  for (const bool absolute : {false, true}) {
    c.rotary_absolute = absolute;
    TestProblem built(c);
    ASSERT_TRUE(run_and_check(built, reference::decode(built.problem()), options_of(c, executor)));
    const Problem& problem = built.problem();
    for (std::int64_t token = 27; token < 29; ++token) {
      const auto position = static_cast<double>(absolute ? token : token - 20);
      const std::int64_t fresh = (token - 27) * problem.append.k.strides.token;
      const double a = reference::load_element(problem.append.k.data, problem.append.k.dtype, fresh);
      const double b = reference::load_element(problem.append.k.data, problem.append.k.dtype, fresh + 32);
      const double written = reference::load_element(problem.k.data, problem.k.dtype, token * problem.k.strides.token);
      EXPECT_NEAR(written, a * std::cos(position) - b * std::sin(position), 0.01) << "absolute " << absolute << " token " << token;
    }
  }
}

TEST(Conformance, RotaryTurnsPairsByTheirAngle) {
  if (!target_serves({.append = true})) GTEST_SKIP() << "the target does not append";
  const float cosines[] = {1.0F, 1.0F, 0.6F, 0.0F};  // positions 0 and 1
  const float sines[] = {0.0F, 0.0F, 0.8F, 1.0F};
  const Append halves{.rotary_cos = cosines, .rotary_sin = sines, .rotary_dim = 4};
  float row[] = {10.0F, 1.0F, 5.0F, 2.0F, 7.0F};
  rotate_row(halves, 0, row);
  EXPECT_EQ(row[0], 10.0F);
  rotate_row(halves, 1, row);  // (10, 5) by (0.6, 0.8), (1, 2) by a quarter
  EXPECT_FLOAT_EQ(row[0], 2.0F);
  EXPECT_FLOAT_EQ(row[2], 11.0F);
  EXPECT_EQ(row[1], -2.0F);
  EXPECT_EQ(row[3], 1.0F);
  EXPECT_EQ(row[4], 7.0F);
  Append pairs = halves;
  pairs.rotary_interleaved = true;
  float neighbours[] = {10.0F, 5.0F, 1.0F, 2.0F};
  rotate_row(pairs, 1, neighbours);
  EXPECT_FLOAT_EQ(neighbours[0], 2.0F);
  EXPECT_FLOAT_EQ(neighbours[1], 11.0F);
  EXPECT_EQ(neighbours[2], -2.0F);
  EXPECT_EQ(neighbours[3], 1.0F);
}

TEST(Conformance, ARefusedCallAppendsNothing) {
  if (!target_serves({.append = true})) GTEST_SKIP() << "the target does not append";
  Case c{.lens = {37, 97}, .n_q = {3}, .append = true};
  const TestExecutor executor(c.executor);
  TestProblem built(c);
  if (!served(built, options_of(c, executor))) return;
  const TestWorkspace workspace(built.problem(), options_of(c, executor));
  ASSERT_TRUE(workspace.status().ok());
  Workspace small = workspace.get();
  small.scratch_bytes -= 1;
  EXPECT_EQ(decode(built.problem(), options_of(c, executor), small).code, StatusCode::kWorkspaceTooSmall);
  EXPECT_TRUE(built.outputs_untouched());
  built.problem().scores.softcap = -1.0F;
  EXPECT_EQ(decode(built.problem(), options_of(c, executor), workspace.get()).code, StatusCode::kInvalidArgument);
  EXPECT_TRUE(built.outputs_untouched());
}

/// Lengths that lie never make a call write over older tokens, or outside the cache. The oracle reads lengths by the same rule, so
/// the cache is compared with what it was.
TEST(Conformance, R25_NothingIsAppendedToASequenceWhoseLengthsAreClamped) {
  if (!target_serves({.append = true})) GTEST_SKIP() << "the target does not append";
  for (const std::int32_t length : {102, INT_MAX, -1}) {
    Case c{.lens = {37, 101, 53}, .n_q = {2}, .capacity = 101, .append = true, .fill = Fill::kZero, .guard = Guard::kPage};
    const TestExecutor executor(c.executor);
    TestProblem built(c);
    if (!served(built, options_of(c, executor))) return;
    built.kv_lengths()[1] = length;
    built.remember();
    const std::vector<double> before = cached(built, 1, c.capacity);
    EXPECT_TRUE(run_and_check(built, reference::decode(built.problem()), options_of(c, executor)));
    EXPECT_EQ(cached(built, 1, c.capacity), before) << "length " << length;
  }
}

TEST(Conformance, R26_ANewTokenWhosePageIsNotThereIsLeftOut) {
  if (!target_serves({.append = true})) GTEST_SKIP() << "the target does not append";
  Case c{.lens = {37, 97}, .n_q = {3}, .page_tokens = 16, .append = true, .guard = Guard::kPage};
  const TestExecutor executor(c.executor);
  TestProblem built(c);
  if (!served(built, options_of(c, executor))) return;
  built.page_ids(1)[6] = 1000;
  built.remember();
  EXPECT_TRUE(run_and_check(built, reference::decode(built.problem()), options_of(c, executor)));
}

/// Where a kv head has several row blocks, the CPU writes new tokens before anybody reads them: by the same rules.
TEST(Conformance, NewTokensOfSeveralRowBlocksReachTheCacheFirst) {
  if (on_cuda()) GTEST_SKIP() << "the CPU's order of things";
  EveryNth some(3);
  for (const CpuIsa isa : available_isas()) {
    for (const DType dtype : dtypes()) {
      for (const KvType type : {KvType::kAsQueries, KvType::kE4M3}) {
        for (const std::int32_t page_tokens : {0, 16}) {
          for (const auto& n_q : {std::vector<std::int32_t>{150}, {70, 1, 0, 131}}) {  // of two heads each
            if (some.skips()) continue;
            Case c{
                .dtype = dtype, .kv_type = type, .head_dim = 24, .lens = {413, 40, 3, 131}, .n_q = n_q, .page_tokens = page_tokens};
            c.kv_scales = type == KvType::kAsQueries ? KvScales::kNone : KvScales::kHead;
            c.pad = {0, 7, 0, 0};
            c.capacity = 420;
            c.causal = true;
            c.append = true;
            c.isa = isa;
            c.workers = 5;
            if (n_q.size() > 1) {
              c.q_layout = "shd";
              expect_bits_of_given_lengths(c);  // else more tokens are new than there are
            }
            expect_bits_of_the_cache_afterwards(c);
            c.rotary_dim = 24;
            c.window_left = 90;
            EXPECT_TRUE(run_and_check(c));
          }
        }
      }
    }
  }
  Case c{.lens = {97, 313}, .n_q = {80}, .page_tokens = 16, .append = true, .guard = Guard::kPage};
  const TestExecutor executor(c.executor);
  TestProblem built(c);
  built.page_ids(1)[18] = 1000;  // of tokens 288 to 303, which are new
  built.remember();
  EXPECT_TRUE(run_and_check(built, reference::decode(built.problem()), options_of(c, executor)));
}

/// Two requests with one prefix in one call: the first's page, which this call fills, is the second's, whose tokens there count as
/// old. In whatever order the two are computed.
TEST(Conformance, NewTokensThatAnotherSequenceReadsReachTheCacheFirst) {
  if (on_cuda()) GTEST_SKIP() << "the CPU's order of things: a GPU reads old tokens beside the kernel that appends";
  for (const bool csr : {false, true}) {
    for (const std::int64_t reader : {0, 1}) {
      for (const std::int32_t workers : {1, 2, 5}) {
        Case c{.lens = {40, 40}, .n_q = {2, 2}, .page_tokens = 16, .csr = csr, .causal = true, .append = true};
        c.q_layout = "shd";
        c.n_q[static_cast<std::size_t>(1 - reader)] = 20;  // from its second page on
        c.workers = workers;
        const TestExecutor executor(c.executor);
        TestProblem built(c);
        built.page_ids(reader)[1] = built.page_ids(1 - reader)[1];  // of tokens 16 to 31, 12 of them new
        built.remember();
        ASSERT_NO_FATAL_FAILURE(expect_bits_of_the_cache_afterwards(c, built, options_of(c, executor)));
      }
    }
  }
}

/// Rotary tables have a row for each token of the capacity: none is read where there is none.
TEST(Conformance, R02_AppendToACacheWithoutCapacity) {
  if (!target_serves({.append = true})) GTEST_SKIP() << "the target does not append";
  EXPECT_TRUE(run_and_check({.lens = {0, 0}, .n_q = {2}, .append = true, .rotary_dim = 64, .guard = Guard::kPage}));
}

/// A window shorter than the chunk that is appended: early tokens are seen by early rows only, and written all the same.
TEST(Conformance, AChunkLongerThanTheWindowIsAppendedWhole) {
  if (!target_serves({.append = true})) GTEST_SKIP() << "the target does not append";
  for (const DType dtype : dtypes()) {
    for (const std::int32_t page_tokens : {0, 16}) {
      Case c{.dtype = dtype,
             .q_heads = 8,
             .kv_heads = 1,
             .head_dim = 128,
             .lens = {700, 130},
             .n_q = {120},
             .page_tokens = page_tokens};
      c.causal = true;
      c.append = true;
      c.window_left = 9;
      c.workers = 7;
      EXPECT_TRUE(run_and_check(c));
    }
  }
}

}  // namespace
}  // namespace lean::support
