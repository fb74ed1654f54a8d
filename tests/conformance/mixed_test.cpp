// Calls that mix decode steps, drafts and prefill chunks, whose rows and so whose tiles cost differently, on few and on very many
// workers: every policy and fix-up gives the oracle's answer, and leaves the workspace as it was.
#include <gtest/gtest.h>

#include "support/random.hpp"
#include "support/reduced.hpp"
#include "support/run_and_check.hpp"
#include "support/sweeps.hpp"

namespace lean::support {
namespace {

// A CPU's tile of 32 rows costs what 4 of 8 rows do: here outputs of 8 tiles cost as much as outputs of 2.
TEST(Conformance, R04_OutputsOfTheSameCostAndDifferentTiles) {
  const std::vector<std::int32_t> workers =
      full_or_reduced<std::vector<std::int32_t>>({8, 9, 10, 11, 16, 20, 33, 79, 96, 132}, {10, 20, 96});
  expect_right_however_shared_out({.q_heads = 8,
                                   .kv_heads = 1,
                                   .head_dim = 16,
                                   .lens = {1884, 362},
                                   .n_q = {1, 4},
                                   .causal = true,
                                   .q_layout = "shd",
                                   .o_layout = "shd",
                                   .lse_layout = "shd"},
                                  workers);
  expect_right_however_shared_out({.q_heads = 32,
                                   .kv_heads = 8,
                                   .head_dim = 128,
                                   .lens = {1000, 200},
                                   .n_q = {1, 8},
                                   .causal = true,
                                   .q_layout = "shd",
                                   .o_layout = "shd",
                                   .lse_layout = "hsd"},
                                  full_or_reduced<std::vector<std::int32_t>>({64, 79, 96, 132}, {96}));
}

TEST(Conformance, R05_RandomMixedCallsOnManyWorkers) {
  Stream random(61);
  for (int round = 0; round < full_or_reduced(60, 4); ++round) {
    const auto kv_heads = static_cast<std::int32_t>(random.one_of({1, 2, 3}));
    Case c{.q_heads = kv_heads * static_cast<std::int32_t>(random.one_of({1, 4, 8})),
           .kv_heads = kv_heads,
           .head_dim = 16,
           .lens = {},
           .n_q = {},
           .causal = random.chance(80),
           .q_layout = "shd",
           .o_layout = "hsd",
           .lse_layout = "shd",
           .seed = static_cast<std::uint64_t>(round + 1)};
    for (std::int64_t b = random.between(2, 5); b > 0; --b) {
      c.n_q.push_back(static_cast<std::int32_t>(random.one_of({1, 1, 1, 2, 4, 8, 17})));
      c.lens.push_back(static_cast<std::int32_t>(random.between(c.n_q.back(), random.chance(30) ? 2000 : 500)));
    }
    if (random.chance(20)) c.window_left = static_cast<std::int32_t>(random.between(0, 300));
    expect_right_however_shared_out(c, {static_cast<std::int32_t>(random.between(8, 132))});
  }
}

/// What a GPU's two launches of such a call do side by side, each with workers of its own: the one has more to do than the other, or
/// both have as much, or one nothing; and whoever waits for the call waits for both. They follow each other where the bound is so low
/// that a decode step's kernel serves the chunks, and with the window of a group of 4, whose few rows may be of several query tokens
/// (CudaHost.R01_LaunchesRunSideBySideWhereBothKindsServe).
TEST(Conformance, R05_ChunksBesideFewRows) {
  struct Mix {
    std::vector<std::int32_t> n_q;
    std::vector<std::int32_t> lens;
    std::int32_t most = 1024;  // query tokens, the bound
  };
  struct Heads {
    std::int32_t q_heads, kv_heads, window_left;
  };
  const std::vector<Mix> mixes = full_or_reduced<std::vector<Mix>>({{{700, 1}, {1500, 40}},                // chunks end last
                                                                    {{70, 1, 1, 1}, {70, 3000, 1, 2900}},  // few rows do
                                                                    {{1, 33, 1, 0, 257, 4}, {900, 33, 0, 0, 999, 4}},  // both
                                                                    {{1, 1, 2, 4}, {300, 1, 2, 900}},
                                                                    {{100, 33}, {100, 900}},
                                                                    {{8, 8}, {1760, 310}, 8},  // by a decode step's kernel
                                                                    {{16, 1, 3}, {37, 600, 1009}}},
                                                                   {{{150, 1}, {300, 40}}, {{1, 33, 0, 4}, {500, 33, 0, 4}}});
  for (const Mix& mix : mixes) {
    for (const std::int32_t head_dim : full_or_reduced<std::vector<std::int32_t>>({64, 128}, {64})) {
      for (const std::int32_t workers : full_or_reduced<std::vector<std::int32_t>>({0, 2, 3, 31, 132}, {0, 3})) {
        for (const Heads& heads : {Heads{8, 2, -1}, {8, 2, 200}, {12, 1, 200}}) {
          Case c{.dtype = DType::kBFloat16,
                 .q_heads = heads.q_heads,
                 .kv_heads = heads.kv_heads,
                 .head_dim = head_dim,
                 .lens = mix.lens,
                 .n_q = mix.n_q,
                 .causal = true,
                 .window_left = heads.window_left,
                 .q_layout = "shd",
                 .k_layout = "shd",
                 .v_layout = "shd",
                 .o_layout = "shd",
                 .lse_layout = "hsd",
                 .workers = workers};
          c.n_q.push_back(mix.most);  // of no sequence
          EXPECT_TRUE(run_and_check(c));
        }
      }
    }
  }
}

/// Sequences in numbers that no warp holds at once, and more than share their workers out (kSideBySideSequences).
TEST(Conformance, R05_ChunksBesideVeryManyFewRows) {
  for (const std::size_t batch : full_or_reduced<std::vector<std::size_t>>({100, 1024, 1025, 2000}, {100})) {
    Case c{.dtype = DType::kBFloat16,
           .q_heads = 4,
           .kv_heads = 1,
           .head_dim = 64,
           .lens = std::vector<std::int32_t>(batch, 30),
           .n_q = std::vector<std::int32_t>(batch, 1),
           .causal = true,
           .q_layout = "shd",
           .k_layout = "shd",
           .v_layout = "shd",
           .o_layout = "shd",
           .lse_layout = "hsd"};
    c.lens[batch / 2] = c.n_q[batch / 2] = 150;
    c.lens.back() = 800;
    c.n_q.back() = 70;
    EXPECT_TRUE(run_and_check(c)) << batch;
  }
}

/// Query tokens are bounded, and no sequence comes near the bound: of the launches that a GPU makes of such a batch, for few queries
/// and for many, one finds no sequence of its own.
TEST(Conformance, R05_ManySequencesOfOneKindUnderALargerBound) {
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
    for (const std::size_t batch : {33U, 99U}) {
      for (const std::int32_t n : {1, 7, 17, 40}) {
        for (const std::int32_t head_dim : {64, 128}) {
          Case c{.dtype = dtype,
                 .q_heads = 4,
                 .kv_heads = 4,
                 .head_dim = head_dim,
                 .lens = std::vector<std::int32_t>(batch, n),
                 .n_q = std::vector<std::int32_t>(batch, n),
                 .causal = true,
                 .q_layout = "shd",
                 .k_layout = "shd",
                 .v_layout = "shd~gap8",
                 .o_layout = "shd",
                 .lse_layout = "hsd",
                 .workers = 132};
          c.n_q.push_back(300);  // of no sequence
          EXPECT_TRUE(run_and_check(c));
        }
      }
    }
  }
}

}  // namespace
}  // namespace lean::support
