// Multi-head latent attention as decode steps ask for it: keys of 576 dims whose first 512 are the values, in the same memory, one kv
// head of many query heads (DeepSeek-V2, arXiv 2405.04434, sec. 2.1). On GPUs with products of warpgroups it has a tile of its own
// (src/backends/cuda/kernel/tile/wide_tile.cuh, swapped_tile.cuh), and each of its paths is taken here; on any target it is what the problem says.
#include <gtest/gtest.h>

#include <limits>
#include <utility>
#include <vector>

#include "support/reduced.hpp"
#include "support/run_and_check.hpp"

namespace lean::support {
namespace {

/// Whole tiles of 64 tokens, ends of tiles and a sequence without tokens.
Case latent_case(DType dtype, std::int32_t heads, std::int32_t n_q) {
  return {.dtype = dtype,
          .q_heads = heads,
          .kv_heads = 1,
          .head_dim = 576,
          .value_dim = 512,
          .values_in_keys = true,
          .lens = {300, 131, 64, 0, 17},
          .n_q = {n_q},
          .k_layout = "bhsd",
          .workers = 5};
}

/// One row block and several, full and not.
TEST(Conformance, LatentHeadsAndQueryTokens) {
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
    for (const std::int32_t heads : {16, 20, 64, 128}) {
      for (const std::int32_t n_q : {1, 2, 4}) {
        for (const bool causal : {false, true}) {
          if (heads * n_q > 256 || (causal && n_q == 1)) continue;
          Case c = latent_case(dtype, heads, n_q);
          c.causal = causal;
          EXPECT_TRUE(run_and_check(c)) << heads << ", " << n_q;
        }
      }
    }
  }
}

/// Boxes of whole pages and of parts, and pages that hold no whole box.
TEST(Conformance, LatentPages) {
  for (const std::int32_t page_tokens : {1, 16, 24, 32, 64, 128}) {
    for (const std::int32_t heads : {16, 128}) {
      Case c = latent_case(DType::kBFloat16, heads, heads == 16 ? 2 : 1);
      c.page_tokens = page_tokens;
      c.csr = page_tokens == 32;
      c.k_layout = page_tokens == 64 ? "bshd" : "bhsd";
      c.causal = true;
      EXPECT_TRUE(run_and_check(c)) << page_tokens << ", " << heads;
    }
  }
}

/// What a call may ask beside its lengths; some of it is another kernel's.
std::vector<std::pair<const char*, void (*)(Case&)>> features() {
  return {{"no lse", [](Case& c) { c.lse = false; }},
          {"window", [](Case& c) { c.causal = true, c.window_left = 40; }},
          {"softcap", [](Case& c) { c.causal = true, c.softcap = 3.0F; }},
          {"sinks", [](Case& c) { c.sinks = true; }},
          {"left padding", [](Case& c) { c.causal = true, c.pad = {31, 0, 13, 0, 16}; }},
          {"packed queries", [](Case& c) { c.causal = true, c.q_layout = "shd", c.o_layout = "hsd", c.n_q = {2, 1, 5}; }},
          {"packed keys", [](Case& c) { c.causal = true, c.k_layout = "shd"; }},
          {"two kv heads", [](Case& c) { c.kv_heads = 2, c.causal = true; }},
          {"a scale", [](Case& c) { c.scale = 0.07F; }},
          {"a scale below 0", [](Case& c) { c.scale = -0.05F; }},
          {"ALiBi", [](Case& c) { c.causal = true, c.alibi = true; }},
          {"peaks", [](Case& c) { c.causal = true, c.input = Input::kPeaks; }},
          {"scores that rise", [](Case& c) { c.input = Input::kAscending; }},
          {"infinity where nothing is seen", [](Case& c) { c.fill = Fill::kInfinity; }},
          {"values in memory of their own", [](Case& c) { c.values_in_keys = false, c.v_layout = "bhsd"; }},
          {"chunks", [](Case& c) { c.policy = Policy::fixed_chunk(); }},
          {"splits", [](Case& c) { c.policy = Policy::fixed_split(3); }},
          {"two kernels", [](Case& c) { c.fixup = Fixup::kTwoKernels; }}};
}

/// Of 16, 32 and 64 rows, which are a tile each (swapped_tile.cuh, wide_tile.cuh).
TEST(Conformance, LatentWithEveryFeature) {
  for (const auto& [name, add] : features()) {
    for (const std::int32_t heads : {8, 16, 32}) {
      Case c = latent_case(heads == 16 ? DType::kFloat16 : DType::kBFloat16, heads, 2);
      add(c);
      EXPECT_TRUE(run_and_check(c)) << name << ", " << heads;
    }
  }
}

/// Few rows are a decode step: outputs of one part, of few, of one level of a merge and of two, of all workers and of some, and lines that a
/// warp builds for itself and that all threads build.
TEST(Conformance, LatentStepsOfManyPartsAndSequences) {
  for (const std::int32_t n_q : {1, 2}) {
    for (const std::int32_t workers : full_or_reduced(std::vector{2, 5, 9, 20, 33, 132}, {2, 33})) {
      Case c = latent_case(n_q == 1 ? DType::kBFloat16 : DType::kFloat16, 16, n_q);
      c.causal = true;
      c.workers = workers;
      c.lens = {8200};
      EXPECT_TRUE(run_and_check(c)) << n_q << ", " << workers;
      c.lens = {1100, 0, 577, 64, 2000};
      EXPECT_TRUE(run_and_check(c)) << n_q << ", " << workers;
    }
    for (const int batch : full_or_reduced(std::vector{33, 129, 300}, {33})) {
      Case c = latent_case(DType::kBFloat16, 16, n_q);
      c.lens.clear();
      for (int i = 0; i < batch; ++i) c.lens.push_back(i * 37 % 200);
      c.workers = 7;
      EXPECT_TRUE(run_and_check(c)) << n_q << ", " << batch;
    }
  }
}

/// R26: the first page outside the pool is one of a tile late in a segment, or one that threads ask for since padding cuts it.
TEST(Conformance, R26_LatentStepsSkipPagesOutsideThePool) {
  for (const std::int32_t pad : {0, 32}) {
    for (const std::int32_t page : {0, 2, 4, 7}) {
      for (const std::int32_t page_tokens : {24, 64}) {
        for (const std::int32_t n_q : {1, 2}) {
          Case c = latent_case(DType::kBFloat16, 16, n_q);
          c.lens = {300, 577};
          c.pad = {0, pad};
          c.page_tokens = page_tokens;
          c.workers = 1;
          EXPECT_TRUE(skips_page(c, page)) << pad << ", " << page << ", " << page_tokens << ", " << n_q;
        }
      }
    }
  }
}

/// The same rows in fp8, with a scale, of either kind and beside queries of either type.
Case fp8_case(DType dtype, KvType type, std::int32_t heads, std::int32_t n_q) {
  Case c = latent_case(dtype, heads, n_q);
  c.kv_type = type;
  c.kv_scales = KvScales::kHead;
  return c;
}

TEST(Conformance, LatentFp8HeadsAndQueryTokens) {
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
    for (const KvType type : {KvType::kE4M3, KvType::kE5M2}) {
      for (const std::int32_t heads : {16, 20, 64, 128}) {
        for (const std::int32_t n_q : {1, 2, 4}) {
          if (heads * n_q > 256) continue;
          Case c = fp8_case(dtype, type, heads, n_q);
          c.causal = n_q > 1;
          EXPECT_TRUE(run_and_check(c)) << heads << ", " << n_q;
        }
      }
    }
  }
}

/// Pages of any size, since rows are converted one by one.
TEST(Conformance, LatentFp8Pages) {
  for (const std::int32_t page_tokens : {1, 5, 16, 24, 32, 64, 128}) {
    for (const std::int32_t heads : {16, 128}) {
      Case c = fp8_case(DType::kBFloat16, KvType::kE4M3, heads, heads == 16 ? 2 : 1);
      c.page_tokens = page_tokens;
      c.csr = page_tokens == 32;
      c.k_layout = page_tokens == 64 ? "bshd" : "bhsd";
      c.causal = true;
      EXPECT_TRUE(run_and_check(c)) << page_tokens << ", " << heads;
    }
  }
}

TEST(Conformance, LatentFp8WithEveryFeature) {
  for (const auto& [name, add] : features()) {
    for (const std::int32_t heads : {8, 16, 32}) {
      Case c = fp8_case(heads == 16 ? DType::kFloat16 : DType::kBFloat16, KvType::kE4M3, heads, 2);
      add(c);
      EXPECT_TRUE(run_and_check(c)) << name << ", " << heads;
    }
  }
  Case c = fp8_case(DType::kBFloat16, KvType::kE5M2, 128, 1);  // every contributor's rows are scaled once
  c.lens = {1100, 40, 700};
  for (const std::int32_t workers : {1, 2, 7, 40}) {
    c.workers = workers;
    EXPECT_TRUE(run_and_check(c)) << workers;
  }
}

/// Scales on which the order of scores depends, and such as make no numbers of them.
TEST(Conformance, LatentFp8ScalesOfAnySign) {
  for (const float scale : {-0.25F, 0.0F, -0.0F, std::numeric_limits<float>::quiet_NaN()}) {
    for (const auto& [heads, softcap] : {std::pair{8, false}, std::pair{16, false}, std::pair{32, false}, std::pair{32, true}}) {
      Case c = fp8_case(DType::kBFloat16, KvType::kE4M3, heads, 2);
      c.causal = true;
      if (softcap) c.softcap = 3.0F;
      EXPECT_TRUE(takes_key_scale(c, scale)) << scale << ", " << heads << ", " << softcap;
    }
  }
}

/// R26: rows of pages outside the pool are 0 in the stage, and count as not there.
TEST(Conformance, R26_LatentFp8RowsSkipPagesOutsideThePool) {
  for (const std::int32_t page : {0, 2, 7}) {
    Case c = fp8_case(DType::kBFloat16, KvType::kE4M3, 16, 1);
    c.lens = {300, 577};
    c.page_tokens = 64;
    c.workers = 1;
    EXPECT_TRUE(skips_page(c, page)) << page;
  }
}

/// One output in many hands, and many outputs in one.
TEST(Conformance, LatentOnAnyNumberOfWorkers) {
  for (const std::int32_t workers : {1, 2, 7, 40}) {
    for (const std::int32_t heads : {16, 128}) {
      Case c = latent_case(DType::kFloat16, heads, 1);
      c.workers = workers;
      c.lens = {1100, 40, 700};
      EXPECT_TRUE(run_and_check(c)) << workers << ", " << heads;
    }
  }
}

/// Sequences of as many keys each, which every worker knows its part of without a walk, up to 128 of them; and the same but for one of a
/// warp's lanes, or of those that its lanes look at later, where it has to walk.
TEST(Conformance, LatentSequencesThatAreAlike) {
  for (const int batch : full_or_reduced(std::vector{3, 33, 128}, {3})) {
    for (const std::int32_t heads : {16, 32, 64, 66}) {
      const int outputs = batch * (heads > 64 ? 2 : 1);
      for (const int other : {-1, batch / 2, batch - 1}) {
        for (const int workers : {outputs, 2 * outputs + 2}) {
          Case c = latent_case(DType::kBFloat16, heads, 1);
          c.lens.assign(static_cast<std::size_t>(batch), 140);
          if (other >= 0) c.lens[static_cast<std::size_t>(other)] = 60;
          c.workers = workers;
          EXPECT_TRUE(run_and_check(c)) << batch << ", " << heads << ", " << other << ", " << workers;
          if (batch > 33 || heads == 66) continue;
          c.kv_type = KvType::kE4M3;
          c.kv_scales = KvScales::kHead;
          EXPECT_TRUE(run_and_check(c)) << "fp8, " << batch << ", " << heads << ", " << other << ", " << workers;
        }
      }
    }
  }
}

Case turns_case(DType dtype) {
  Case c = latent_case(dtype, 66, 2);
  c.lens = {300, 131, 64, 0, 17, 577};
  c.workers = 3;
  return c;
}

/// More than one row block, and tiles enough for the warpgroups to take turns at them (kTurnsRule in kernel_rows.hpp): segments of one
/// tile, of two and of many, whole and not, with all that a call may ask and pages of every kind of box.
TEST(Conformance, LatentTilesInTurns) {
  for (const auto& [name, add] : features()) {
    Case c = turns_case(DType::kBFloat16);
    add(c);
    if (!c.pad.empty()) c.pad.push_back(100);
    if (c.n_q.size() > 1) c.n_q = {2, 1, 5, 3, 1, 2};
    EXPECT_TRUE(run_and_check(c)) << name;
  }
  for (const std::int32_t page_tokens : {1, 16, 24, 32, 64, 128}) {
    for (const std::int32_t workers : {1, 2, 5}) {
      Case c = turns_case(workers == 2 ? DType::kFloat16 : DType::kBFloat16);
      c.page_tokens = page_tokens;
      c.workers = workers;
      c.causal = true;
      EXPECT_TRUE(run_and_check(c)) << page_tokens << ", " << workers;
    }
  }
}

/// The same of sequences that are alike, in one part and in two.
TEST(Conformance, LatentTilesInTurnsOfSequencesThatAreAlike) {
  for (const int batch : full_or_reduced(std::vector{3, 33}, {3})) {
    for (const int parts : {1, 2}) {
      for (const int other : {-1, batch - 1}) {
        Case c = turns_case(DType::kBFloat16);
        c.n_q = {1};
        c.lens.assign(static_cast<std::size_t>(batch), 1700 * parts);
        if (other >= 0) c.lens[static_cast<std::size_t>(other)] = 1000;
        c.workers = 2 * batch * parts + parts - 1;
        EXPECT_TRUE(run_and_check(c)) << batch << ", " << parts << ", " << other;
      }
    }
  }
}

/// R26 there: the first page outside the pool is one of a tile late in a segment, whose stage held another tile before. With left
/// padding of half a page threads ask for it, and say so, when that stage is free and not before.
TEST(Conformance, R26_LatentTilesInTurnsSkipPagesOutsideThePool) {
  for (const std::int32_t pad : {0, 32}) {
    for (const std::int32_t page : {2, 3, 4, 7}) {
      Case c = turns_case(DType::kBFloat16);
      c.page_tokens = 64;
      c.workers = 1;
      c.pad = std::vector<std::int32_t>(c.lens.size(), 0);
      c.pad.back() = pad;
      EXPECT_TRUE(skips_page(c, page)) << pad << ", " << page;
    }
  }
}

}  // namespace
}  // namespace lean::support
