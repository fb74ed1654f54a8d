// Sweeps: every kind of problem the target serves, within the derived bound of the oracle. Lengths are prime or odd
// and ragged, K and V lie differently, unreachable memory is NaN. One oracle serves all ways of computing a problem.
#include <gtest/gtest.h>

#include <iterator>
#include <tuple>
#include <utility>

#include "base/int_math.hpp"
#include "support/reduced.hpp"
#include "support/run_and_check.hpp"
#include "support/sweeps.hpp"
#include "support/tables.hpp"

namespace lean::support {
namespace {

TEST(Conformance, EveryHeadDimOfEveryType) {
  std::vector<std::int32_t> dims{1, 2, 3, 5, 7, 9, 15, 17, 31, 33, 63, 65, 97, 127, 129, 191, 255, 257, 320, 512, kMaxHeadDim};
  for (std::int32_t d = 8; d <= 256; d += full_or_reduced(8, 56)) dims.push_back(d);
  for (const DType dtype : dtypes()) {
    for (const std::int32_t d : dims) {
      expect_right_on_every_isa(
          {.dtype = dtype, .q_heads = 6, .head_dim = d, .lens = {1, 131, 29}, .seed = static_cast<std::uint64_t>(d)});
    }
  }
}

TEST(Conformance, ValueDimMayDifferFromHeadDim) {
  for (const DType dtype : dtypes()) {
    for (const auto& [d, dv] : {std::pair{64, 128},
                                {128, 64},
                                {192, 128},
                                {256, 1},
                                {1, 256},
                                {40, 33},
                                {8, 17},
                                {kMaxHeadDim, 512},
                                {1, kMaxHeadDim},
                                {512, 1}}) {
      expect_right_on_every_isa({.dtype = dtype, .head_dim = d, .value_dim = dv, .lens = {211, 3}});
    }
  }
}

TEST(Conformance, R06_EveryGroupSize) {
  std::vector<std::int32_t> groups{1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 16, 32, 71, 128, 130};
  for (std::int32_t group = 1; on_cuda() && group <= 130; ++group) groups.push_back(group);  // every padding of a row block
  for (const DType dtype : dtypes()) {
    for (const std::int32_t group : groups) {
      const std::int32_t kv_heads = group % 2 == 0 ? 1 : 3;  // 1: MQA
      expect_right_on_every_isa(
          {.dtype = dtype, .q_heads = group * kv_heads, .kv_heads = kv_heads, .head_dim = 40, .lens = {67, 0, 193}});
    }
  }
}

TEST(Conformance, EveryPolicyFixupAndWorkerCount) {
  const std::vector<std::int32_t> worker_counts =
      full_or_reduced<std::vector<std::int32_t>>({1, 2, 3, 5, 7, 16, 33, 64, 132, 264}, {1, 3, 16});
  Case c{.q_heads = 6,
         .head_dim = 48,
         .lens = full_or_reduced<std::vector<std::int32_t>>({1511, 1, 0, 613, 64, 2999}, {613, 1, 0, 97})};
  for (const DType dtype : dtypes()) {
    c.dtype = dtype;
    expect_right_however_shared_out(c, worker_counts);
  }
}

/// What servers ask for all day, and a GPU has variants of its own for: whole head dims, heads or rows end to end, pages, few and
/// many sequences, alike and ragged, so that workers stay without a share too.
TEST(Conformance, DecodeStepsOfEveryGroupAndLayout) {
  std::vector<std::vector<std::int32_t>> batches{{1409}, {131, 0, 517, 64, 1}, std::vector<std::int32_t>(40, 70)};
  if (on_cuda()) batches.emplace_back(300, 33);
  const int nth = on_cuda() ? 5 : full_or_reduced(11, 97);  // the CPU backend has no variants for these
  int turn = 0;
  for (const DType dtype : dtypes()) {
    for (const KvType kv_type : {KvType::kAsQueries, KvType::kE4M3}) {
      if (kv_type != KvType::kAsQueries && dtype == DType::kFloat32) continue;
      for (const std::int32_t d : cuda::kHeadDims) {
        for (const auto& [group, n_q] : {std::pair{1, 1}, {4, 1}, {8, 2}, {13, 1}, {6, 5}, {16, 4}, {25, 4}}) {
          for (const auto& [layout, page_tokens] : {std::pair{"bhsd", 0}, {"bshd", 0}, {"bhsd", 64}, {"bshd", 16}}) {
            for (const std::vector<std::int32_t>& lens : batches) {
              if (turn++ % nth != 0) continue;
              Case c{.dtype = dtype, .kv_type = kv_type, .q_heads = 2 * group, .head_dim = d, .lens = lens, .n_q = {n_q}};
              c.page_tokens = page_tokens;
              c.causal = n_q > 1;
              c.sinks = group == 4;
              c.window_left = group == 13 ? 100 : -1;
              c.k_layout = c.v_layout = layout;
              c.workers = 132;
              expect_right_on_every_isa(c);
            }
          }
        }
      }
    }
  }
}

TEST(Conformance, EveryQueryTokenCount) {
  std::vector<std::int32_t> counts{1, 2, 4, 8, 16, 37};
  for (std::int32_t n_q = 3; on_cuda() && n_q < 16; ++n_q) counts.push_back(n_q);
  for (const bool causal : {false, true}) {
    for (const std::int32_t n_q : counts) {
      for (const DType dtype : dtypes()) {
        expect_right_on_every_isa(
            {.dtype = dtype, .q_heads = 6, .head_dim = 40, .lens = {41, 197, 37}, .n_q = {n_q}, .causal = causal});
      }
    }
  }
}

/// A LeanTile that is nearly all V, and heads of whole vectors of 32 bf16: the shapes that AMX computes, with tails of tokens.
TEST(Conformance, R06_WholeVectorsOfBfloat16AndTilesOfMostlyV) {
  if (on_cuda()) GTEST_SKIP() << "the CPU's instruction sets";
  for (const std::int32_t group : {1, 8, 17, 40}) {
    for (const auto& [d, dv] : {std::pair{32, 32}, {64, 96}, {96, 64}, {128, 128}, {256, 256}, {1, 224}, {32, 256}, {256, 32}}) {
      for (const std::int32_t page_tokens : {0, 16}) {
        Case c{.dtype = DType::kBFloat16, .q_heads = group, .kv_heads = 1, .head_dim = d, .value_dim = dv, .lens = {15, 31, 401}};
        c.n_q = {group == 8 ? 3 : 1};
        c.causal = true;
        c.page_tokens = page_tokens;
        c.workers = 3;
        expect_right_on_every_isa(c);
      }
    }
  }
}

TEST(Conformance, MixedPrefillAndDecodeByCumulativeQueryLengths) {
  for (const DType dtype : dtypes()) {
    for (const Policy& policy : all_policies()) {
      expect_right_on_every_isa({.dtype = dtype,
                                 .head_dim = 40,
                                 .lens = {101, 53, 7, 0, 211},
                                 .n_q = {1, 53, 7, 2, 0},
                                 .causal = true,
                                 .q_layout = "shd",
                                 .k_layout = "hsd",
                                 .v_layout = "bshd",
                                 .policy = policy,
                                 .workers = 7});
    }
  }
}

TEST(Conformance, ThePaperLayoutOfHeadsTotalDim) {
  for (const DType dtype : dtypes()) {
    expect_right_on_every_isa({.dtype = dtype, .lens = {311, 1, 89, 523}, .k_layout = "hsd", .v_layout = "hsd", .workers = 5});
  }
}

TEST(Conformance, R22_EveryPairOfLayouts) {
  const std::vector<std::string> dense{"bhsd", "bshd", "sbhd", "hbsd~gap3", "bhds", "bshd~gap8", "bhsd~inner2", "bshd~off1"};
  const std::vector<std::string> packed{"shd", "hsd", "shd~gap5", "hsd~negs", "sdh", "hsd~off3"};
  const std::vector<DType> types = dtypes();
  for (const auto* names : {&dense, &packed}) {
    for (const std::string& k : *names) {
      for (const std::string& v : *names) {
        const DType dtype = types[(k.size() + v.size()) % types.size()];
        for (const std::int32_t dv : {40, 0}) {
          expect_right_on_every_isa(
              {.dtype = dtype, .head_dim = 24, .value_dim = dv, .lens = {71, 0, 43}, .capacity = 2, .k_layout = k, .v_layout = v});
        }
      }
    }
  }
}

/// Rows that begin at multiples of 16 bytes, as copies of whole rows need them.
TEST(Conformance, R22_EveryPairOfLayoutsWithAlignedRows) {
  const std::vector<std::string> dense{"bhsd",      "bshd",      "sbhd",        "hbsd~gap8",   "bshd~gap16",
                                       "bhsd~off8", "bhsd~negs", "bshd~bcasth", "bhsd~bcastb", "bhsd~bcasts"};
  const std::vector<std::string> packed{"shd", "hsd", "shd~gap8", "hsd~negs", "hsd~off8", "hsd~gap24", "shd~bcasth"};
  const std::vector<DType> types = dtypes();
  for (const auto* names : {&dense, &packed}) {
    for (std::size_t i = 0; i < names->size(); ++i) {
      for (std::size_t j = 0; j < names->size(); ++j) {
        expect_right_on_every_isa({.dtype = types[(i + j) % types.size()],
                                   .head_dim = 8 * static_cast<std::int32_t>(1 + (3 * i + 5 * j) % 32),
                                   .lens = {271, 0, 43, 129},
                                   .pad = {3, 0, 43, 0},
                                   .capacity = 2,
                                   .k_layout = (*names)[i],
                                   .v_layout = (*names)[j],
                                   .workers = 7});
      }
    }
  }
}

TEST(Conformance, EveryQueryOutputAndLseLayout) {
  for (const char* q :
       {"bhsd", "bshd", "sbhd~gap3", "bhsd~gap2", "bshd~off2", "bhsd~inner3", "bhds", "shd", "hsd~gap1", "hsd~gap6"}) {
    for (const char* o : {"bhsd", "bshd~gap2", "sbhd", "bhsd~inner2", "bhds", "hbsd~negs"}) {
      for (const char* lse : {"bhsd", "bshd~gap1", "hbsd~inner3"}) {
        expect_right_on_every_isa(
            {.head_dim = 24, .lens = {71, 0, 43}, .n_q = {3}, .q_layout = q, .o_layout = o, .lse_layout = lse});
      }
    }
  }
}

/// A case drawn from everything at once.
Case random_case(std::uint64_t seed) {
  Stream random(seed);
  Case c{.dtype = random.one_of({DType::kFloat32, DType::kFloat16, DType::kBFloat16}), .seed = seed};
  c.kv_heads = static_cast<std::int32_t>(random.between(1, 4));
  c.q_heads = c.kv_heads * static_cast<std::int32_t>(random.between(1, random.chance(20) ? 17 : 4));
  c.head_dim = static_cast<std::int32_t>(random.chance(70) ? 8 * random.between(1, 32)
                                                           : random.between(1, random.chance(90) ? 256 : kMaxHeadDim));
  c.value_dim = static_cast<std::int32_t>(random.chance(60) ? 0 : random.between(1, random.chance(90) ? 256 : kMaxHeadDim));
  c.lens.clear();
  const std::int64_t longest = random.one_of<std::int64_t>({3, 40, 300, full_or_reduced(1000, 400)});
  for (std::int64_t b = random.between(1, 6); b > 0; --b) c.lens.push_back(static_cast<std::int32_t>(random.between(0, longest)));
  c.n_q = {static_cast<std::int32_t>(random.chance(60) ? 1 : random.between(1, 9))};
  if (random.chance(30)) {
    c.q_layout = random.one_of({"shd", "hsd", "shd~gap2"});
    c.n_q.push_back(static_cast<std::int32_t>(random.between(0, 20)));
  }
  if (random.chance(40)) {
    for (const std::int32_t length : c.lens) c.pad.push_back(static_cast<std::int32_t>(random.between(0, length)));
  }
  c.capacity = static_cast<std::int32_t>(random.chance(50) ? 0 : random.between(0, longest + 5));
  c.causal = random.chance(50);
  c.lse = random.chance(80);
  c.k_layout =
      random.one_of({"bhsd", "bshd", "bhsd~gap4", "bshd~off1", "bhsd~inner2", "shd", "hsd", "bhds", "bhsd~bcasth", "hsd~negs"});
  c.v_layout = random.one_of({"bhsd", "bshd", "bshd~gap1", "bhsd~negd", "sbhd"});
  c.input = random.one_of({Input::kNormal, Input::kPeaks, Input::kAscending, Input::kDescending, Input::kSignature, Input::kFlat});
  c.fill = random.one_of({Fill::kNan, Fill::kInfinity});
  c.guard = random.one_of({Guard::kCanary, Guard::kPage});
  c.policy = all_policies()[static_cast<std::size_t>(random.between(0, static_cast<std::int64_t>(all_policies().size()) - 1))];
  c.workers = static_cast<std::int32_t>(random.between(1, 20));
  c.executor = random.one_of({ExecutorKind::kDefault, ExecutorKind::kPool, ExecutorKind::kPermuted, ExecutorKind::kDescending});
  c.fixup = random.one_of({Fixup::kLastArriver, Fixup::kTwoKernels});
  for (int asked = random.chance(50) ? 0 : 1; asked > 0 && asked < 4; asked += random.chance(50) ? 1 : 3) {
    features()[static_cast<std::size_t>(random.between(0, static_cast<std::int64_t>(features().size()) - 1))].ask(c);
  }
  return c;
}

/// The same, rounded to where rows are aligned to 16 bytes and values are as wide as keys: what every backend serves.
Case random_aligned_case(std::uint64_t seed) {
  Case c = random_case(seed);
  Stream random(~seed);
  const std::vector<DType> types = dtypes();
  c.dtype = types[static_cast<std::size_t>(random.between(0, static_cast<std::int64_t>(types.size()) - 1))];
  c.head_dim = (c.head_dim + 7) / 8 * 8;
  c.value_dim = 0;
  c.q_layout =
      is_packed(c.q_layout) ? random.one_of({"shd", "hsd", "shd~gap2"}) : random.one_of({"bshd", "bhsd~gap4", "bshd~off2"});
  c.k_layout =
      random.one_of({"bhsd", "bshd", "bhsd~gap8", "bshd~off8", "sbhd", "shd", "hsd", "hsd~negs", "bhsd~bcasth", "bhsd~negs"});
  c.v_layout = random.one_of({"bhsd", "bshd", "bshd~gap8", "sbhd", "bhsd~off16"});
  if (c.page_tokens > 0) ask_for_pages(c, c.page_tokens);
  if (c.append) ask_to_append(c, c.rotary_dim);
  c.o_layout = random.one_of({"bhsd", "bshd~gap1", "sbhd", "bhsd~off3"});
  c.fixup = random.one_of({Fixup::kLastArriver, Fixup::kTwoKernels, Fixup::kHostBlock});
  if (c.fixup == Fixup::kHostBlock) c.executor = ExecutorKind::kPool;
  if (!pairs(c.policy, c.fixup)) c.fixup = Fixup::kLastArriver;
  if (random.chance(30)) c.workers = static_cast<std::int32_t>(random.between(1, 132));
  return c;
}

TEST(Conformance, RandomCasesWithAlignedRows) {
  const std::vector<CpuIsa> isas = available_isas();
  for (std::uint64_t seed = 1; seed <= (on_cuda() ? 3000U : full_or_reduced(300U, 50U)); ++seed) {
    Case c = random_aligned_case(seed);
    c.isa = isas[seed % isas.size()];
    EXPECT_TRUE(run_and_check(c));
  }
}

TEST(Conformance, RandomCases) {
  const std::vector<CpuIsa> isas = available_isas();
  for (std::uint64_t seed = 1; seed <= full_or_reduced(1200U, 150U); ++seed) {
    Case c = random_case(seed);
    c.isa = isas[seed % isas.size()];
    EXPECT_TRUE(run_and_check(c));
  }
}

/// Row blocks of many rows, with values as wide as keys or of dims of their own.
TEST(Conformance, RandomCasesOfManyRows) {
  const std::vector<CpuIsa> isas = available_isas();
  for (std::uint64_t seed = 1; seed <= (on_cuda() ? 600U : full_or_reduced(60U, 10U)); ++seed) {
    Case c = random_aligned_case(seed);
    if (c.append || c.tree) continue;
    Stream random(seed ^ 0x5A5A);
    for (std::int32_t& n_q : c.n_q) n_q = static_cast<std::int32_t>(1 + random.between(65, 300) / (c.q_heads / c.kv_heads));
    if (random.chance(40)) c.value_dim = static_cast<std::int32_t>(8 * random.between(1, 32));
    c.isa = isas[seed % isas.size()];
    EXPECT_TRUE(run_and_check(c));
  }
}

/// Dims that a GPU has no matrix products for, in calls of every feature, layout and way to share the work out.
TEST(Conformance, R06_OddAndWideDimsWithEverythingElse) {
  const std::pair<std::int32_t, std::int32_t> dims[] = {{59, 59},   {111, 111},         {192, 128},
                                                        {512, 512}, {kMaxHeadDim, 512}, {40, 300}};
  for (std::uint64_t seed = 1; seed <= full_or_reduced(300U, 40U); ++seed) {
    Case c = random_case(seed);
    std::tie(c.head_dim, c.value_dim) = dims[seed % std::size(dims)];
    c.rotary_dim = min_of(c.rotary_dim, c.value_dim < c.head_dim ? 0 : c.head_dim / 2 * 2);
    if (on_cuda() && c.dtype == DType::kFloat32) c.dtype = DType::kBFloat16;
    EXPECT_TRUE(target_serves(c) || !on_cuda()) << to_text(c);
    EXPECT_TRUE(run_and_check(c));
  }
}

TEST(Conformance, CaseLinesSurviveARoundTrip) {
  for (std::uint64_t seed = 1; seed <= 200; ++seed) {
    const Case c = random_case(seed);
    std::string error;
    const auto parsed = parse_case(to_text(c), error);
    ASSERT_TRUE(parsed) << error;
    EXPECT_EQ(to_text(*parsed), to_text(c));
  }
  std::string error;
  EXPECT_FALSE(parse_case("dtype=f31", error));
  EXPECT_FALSE(parse_case("nonsense=1", error));
}

}  // namespace
}  // namespace lean::support
