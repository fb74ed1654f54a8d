// Paged K/V: every page size and layout, tables whose tails must not be read, ids that lead nowhere, shared pages.
#include <gtest/gtest.h>

#include <algorithm>
#include <climits>
#include <vector>

#include "base/int_math.hpp"
#include "support/reduced.hpp"
#include "support/run_and_check.hpp"
#include "support/sweeps.hpp"
#include "support/tables.hpp"
#include "support/test_workspace.hpp"

namespace lean::support {
namespace {

constexpr std::int32_t kPageSizes[] = {1, 3, 16, 37, 64, 256, 1000};

TEST(Conformance, R28_EveryPageSizeAndLayout) {
  EveryNth some(7);
  for (const DType dtype : dtypes()) {
    for (const CpuIsa isa : available_isas()) {
      for (const std::int32_t page_tokens : kPageSizes) {
        for (const auto& [k, v] : {std::pair{"bhsd", "bhsd"},  // HND
                                   {"bshd", "bshd"},           // NHD
                                   {"bshd", "bhsd~gap8"},
                                   {"bhds", "sbhd~off8"},
                                   {"bhsd~gap16", "bshd~inner2"},
                                   {"bshd~negs", "bhsd~bcasth"}}) {
          for (const bool csr : {false, true}) {
            if (some.skips()) continue;
            Case c{.dtype = dtype, .head_dim = 24, .lens = {1, 613, 0, 97}, .page_tokens = page_tokens, .csr = csr, .k_layout = k};
            c.v_layout = v;
            c.isa = isa;
            EXPECT_TRUE(run_and_check(c));
          }
        }
      }
    }
  }
}

TEST(Conformance, R28_PagesWithEveryPolicyFixupAndWorkerCount) {
  for (const std::int32_t page_tokens : {1, 48, 128}) {
    const Case c{.q_heads = 6,
                 .lens = {full_or_reduced(1511, 613), 1, 0, 613},
                 .n_q = {3},
                 .pad = {200, 1, 0, 0},
                 .page_tokens = page_tokens};
    expect_right_however_shared_out(c, {1, 5, 40});
  }
}

/// Pages move, bits stay: in the pool, and against the same tokens side by side.
TEST(Conformance, R49_WhereAPageLiesChangesNoBit) {
  for (const DType dtype : dtypes()) {
    for (const CpuIsa isa : available_isas()) {
      Case c{.dtype = dtype, .lens = {613, 37}, .n_q = {2}, .k_layout = "bshd", .v_layout = "bhsd", .workers = 5, .isa = isa};
      const TestExecutor executor(c.executor);
      TestProblem contiguous(c);
      ASSERT_TRUE(run(contiguous, options_of(c, executor)));
      for (const std::int32_t page_tokens : kPageSizes) {
        for (const bool csr : {false, true}) {
          c.page_tokens = page_tokens;
          c.csr = csr;
          TestProblem built(c);
          if (!served(built, options_of(c, executor))) return;
          ASSERT_TRUE(run(built, options_of(c, executor)));
          EXPECT_EQ(built.output_bits(), contiguous.output_bits()) << reproducer(c);
        }
      }
    }
  }
}

/// Guarded memory ends with the table, and its tails would lead far outside the pool.
TEST(Conformance, R27_TailsOfTablesAreNotRead) {
  for (const std::int32_t page_tokens : kPageSizes) {
    for (const bool csr : {false, true}) {
      for (const auto& lens : {std::vector<std::int32_t>{613}, {37, 613}, {0, 1, 512}, {512, 1, 0}}) {
        EXPECT_TRUE(run_and_check({.lens = lens, .page_tokens = page_tokens, .csr = csr, .guard = Guard::kPage}));
      }
    }
  }
}

/// Where a window begins in a page that ends near 2^31, a tile's last token and the page's size together pass it.
TEST(Conformance, R28_APageMayBeAsLongAsASequence) {
  if (on_cuda()) GTEST_SKIP() << "one token of K and V stands for all, in the CPU's memory";
  constexpr std::int32_t kDims = 64, kPages[] = {0, 1}, kMostTokens = INT_MAX;
  std::vector<float> row(kDims, 1.0F), o(kDims);
  for (const std::int32_t page_tokens : {INT_MAX - 100, INT_MAX - 29, INT_MAX}) {
    Problem p{.batch = 1, .q_heads = 1, .kv_heads = 1, .head_dim = kDims, .kv_capacity = kMostTokens, .kv_lengths = &kMostTokens};
    p.q = p.k = p.v = {.data = row.data(), .strides = {.token = 0}};
    p.o = {.data = o.data()};
    p.scores.window_left = 200;
    p.pages = {.page_tokens = page_tokens, .page_count = 2, .block_table = kPages, .block_table_stride = 2};
    const Options options{.workers = 1};
    const TestWorkspace workspace(p, options);
    std::fill(o.begin(), o.end(), 0.0F);
    ASSERT_EQ(decode(p, options, workspace.get()).code, StatusCode::kOk);
    EXPECT_EQ(o, row) << page_tokens;
  }
}

TEST(Conformance, R26_PageIdsOutsideThePoolAreSkippedAndReported) {
  EveryNth some(5);
  for (const std::int32_t page_tokens : {1, 16, 64, 300}) {
    for (const bool csr : {false, true}) {
      for (const Policy& policy : all_policies()) {
        if (some.skips()) continue;
        Case c{.lens = {211, 613, 97}, .n_q = {3}, .page_tokens = page_tokens, .csr = csr, .guard = Guard::kPage, .policy = policy};
        c.causal = true;
        const TestExecutor executor(c.executor);
        TestProblem clean(c);
        if (!served(clean, options_of(c, executor))) continue;
        ASSERT_TRUE(run(clean, options_of(c, executor)));
        for (const std::int64_t bad :
             {std::int64_t{-1}, clean.problem().pages.page_count, std::int64_t{INT_MIN}, std::int64_t{INT_MAX}}) {
          TestProblem built(c);
          for (const std::int32_t token : {0, 100, 612}) {
            built.page_ids(1)[token / page_tokens] = static_cast<std::int32_t>(bad);
          }
          built.remember();
          ASSERT_TRUE(run_and_check(built, reference::decode(built.problem()), options_of(c, executor))) << "page id " << bad;
          EXPECT_EQ(built.output_bits(0), clean.output_bits(0));
          EXPECT_EQ(built.output_bits(2), clean.output_bits(2));
          EXPECT_NE(built.output_bits(1), clean.output_bits(1));
        }
      }
    }
  }
}

TEST(Conformance, R26_ASequenceWithoutAPageInThePoolIsEmpty) {
  Case c{.lens = {211, 37}, .page_tokens = 16, .sinks = true};
  const TestExecutor executor(c.executor);
  TestProblem built(c);
  if (!served(built, options_of(c, executor))) return;
  std::fill_n(built.page_ids(0), ceil_div(211, 16), -1);
  built.remember();
  ASSERT_TRUE(run_and_check(built, reference::decode(built.problem()), options_of(c, executor)));
  EXPECT_EQ(built.o({0, 1, 0, 3}), 0.0);
  EXPECT_EQ(built.lse({0, 1, 0}), built.problem().scores.sinks[1]);
}

/// Keys that are all 0 may have a scale of 0, under which the score of a token that is not there must not become 0 x (-inf). On a GPU
/// by tiles of few and of more rows, whose pages come as runs, in boxes or by threads, and by any call's.
TEST(Conformance, R26_PagesOutsideThePoolAreSkippedUnderAScaleOfZero) {
  for (const std::int32_t group : {1, 9, 24}) {
    for (const std::int32_t page_tokens : {8, 16, 128}) {
      for (const bool pads : {false, true}) {
        Case c{.dtype = DType::kFloat16, .q_heads = 2 * group, .kv_heads = 2, .head_dim = 64, .lens = {211, 613}};
        ask_for_fp8(c, KvType::kE4M3, KvScales::kHead);
        ask_for_pages(c, page_tokens);
        if (pads) c.pad = {3, 0};
        const TestExecutor executor(c.executor);
        TestProblem built(c);
        if (!served(built, options_of(c, executor))) continue;
        const_cast<float*>(built.problem().k_scales)[1] = 0.0F;
        built.page_ids(1)[256 / page_tokens] = -1;
        built.remember();
        EXPECT_TRUE(run_and_check(built, reference::decode(built.problem()), options_of(c, executor)));
      }
    }
  }
}

void expect_the_page_to_be_named(const Case& c) {
  const TestExecutor executor(c.executor);
  const Options options = options_of(c, executor);
  TestProblem built(c);
  if (!served(built, options)) return;
  const TestWorkspace workspace(built.problem(), options);
  const std::int32_t good = built.page_ids(1)[2];
  built.page_ids(1)[2] = 99;
  ASSERT_TRUE(decode_and_wait(built.problem(), options, workspace.get()).ok());
  built.page_ids(1)[2] = good;
  ASSERT_TRUE(decode_and_wait(built.problem(), options, workspace.get()).ok());
  const Status sticky = sticky_status(workspace.get(), options);
  EXPECT_EQ(sticky.code, StatusCode::kBadPageIndex);
  EXPECT_EQ(std::string(sticky.message).find("pages.block_table[1, 2] = 99: allowed 0 to "), 0U) << sticky.message;
  EXPECT_NE(std::string(sticky.message).find("; its tokens were skipped"), std::string::npos) << sticky.message;
  EXPECT_TRUE(reset_workspace(workspace.get(), options).ok());
  EXPECT_TRUE(sticky_status(workspace.get(), options).ok());
}

/// On a GPU by both kernels, whose pages come as runs, in boxes or by threads.
TEST(Conformance, R26_TheStickyCodeNamesThePagesUntilReset) {
  for (const std::int32_t dim : {59, 64}) {
    for (const std::int32_t page_tokens : {8, 16}) {
      expect_the_page_to_be_named({.head_dim = dim, .lens = {37, 41}, .page_tokens = page_tokens});
      expect_the_page_to_be_named({.head_dim = dim, .lens = {37, 41}, .n_q = {3}, .page_tokens = page_tokens});
    }
  }
}

/// A window that begins behind a bad page never looks it up.
TEST(Conformance, R26_PagesOutsideAWindowAreNotLookedUp) {
  Case c{.lens = {613}, .page_tokens = 16, .window_left = 50};
  const TestExecutor executor(c.executor);
  TestProblem built(c);
  if (!served(built, options_of(c, executor))) return;
  for (std::int32_t page = 0; page < (613 - 51) / 16; ++page) built.page_ids(0)[page] = INT_MIN;
  built.remember();
  EXPECT_TRUE(run_and_check(built, reference::decode(built.problem()), options_of(c, executor)));  // no sticky code expected
}

TEST(Conformance, R29_PagesMayBeShared) {
  for (const bool csr : {false, true}) {
    Case c{.lens = {613, 300, 97}, .n_q = {2}, .page_tokens = 16, .csr = csr};
    const TestExecutor executor(c.executor);
    TestProblem built(c);
    if (!served(built, options_of(c, executor))) return;
    for (std::int32_t page = 0; page < 6; ++page) {  // whole pages of each
      built.page_ids(1)[page] = built.page_ids(0)[page];
      built.page_ids(2)[page] = built.page_ids(0)[5 - page];
    }
    built.page_ids(0)[20] = built.page_ids(0)[7];  // twice in one sequence
    built.remember();
    EXPECT_TRUE(run_and_check(built, reference::decode(built.problem()), options_of(c, executor)));
  }
}

/// K and V of one tensor [pages, 2, heads, tokens, dims].
TEST(Conformance, R28_KAndVMayLieInOneTensor) {
  Case c{.head_dim = 24, .lens = {211, 37}, .page_tokens = 16, .k_layout = "bhsd", .v_layout = "bhsd"};
  const TestExecutor executor(c.executor);
  TestProblem built(c);
  if (!served(built, options_of(c, executor))) return;
  const Problem separate = built.problem();
  const std::int64_t page_elements = separate.k.strides.sequence;
  const std::int64_t bytes = page_elements * bytes_of(c.dtype);
  GuardedBuffer both(static_cast<std::size_t>(2 * separate.pages.page_count * bytes), Guard::kPage);
  for (std::int64_t page = 0; page < separate.pages.page_count; ++page) {
    std::copy_n(static_cast<const std::byte*>(separate.k.data) + page * bytes, bytes, both.data() + 2 * page * bytes);
    std::copy_n(static_cast<const std::byte*>(separate.v.data) + page * bytes, bytes, both.data() + (2 * page + 1) * bytes);
  }
  built.problem().k.data = both.data();
  built.problem().v.data = both.data() + bytes;
  built.problem().k.strides.sequence = built.problem().v.strides.sequence = 2 * page_elements;
  EXPECT_TRUE(run_and_check(built, reference::decode(built.problem()), options_of(c, executor)));
}

TEST(Conformance, R24_PageIndptrIsClampedAndReported) {
  const Case c{.lens = {37, 101, 53}, .page_tokens = 16, .csr = true, .fill = Fill::kZero, .guard = Guard::kPage};
  const TestExecutor executor(ExecutorKind::kDescending);
  for (const auto& [index, value] :
       {std::pair{0, -1}, {0, INT_MIN}, {1, -7}, {1, 100}, {1, INT_MAX}, {2, 1}, {2, INT_MIN}, {3, -3}}) {
    SCOPED_TRACE(testing::Message() << "page_indptr[" << index << "] = " << value);
    TestProblem built(c);
    if (!served(built, options_of(c, executor))) return;
    EXPECT_EQ(check_lengths(built.problem()).code, StatusCode::kOk);
    built.page_indptr()[index] = value;
    built.remember();
    EXPECT_EQ(check_lengths(built.problem()).code, StatusCode::kBadLengths);
    EXPECT_TRUE(run_and_check(built, reference::decode(built.problem()), options_of(c, executor)));
  }
}

}  // namespace
}  // namespace lean::support
