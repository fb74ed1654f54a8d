// Calls of many rows, as prefill chunks and drafts of many tokens are: more than 64 packed rows of a kv head. On GPUs with products of
// warpgroups they have a tile of their own (src/backends/cuda/kernel/tile/wide_tile.cuh), and each of its paths is taken here: whole
// tiles and ends of tiles, rows that see less than others, boxes and rows that threads copy, one worker and several to an output.
#include <gtest/gtest.h>

#include <limits>
#include <utility>
#include <vector>

#include "support/reduced.hpp"
#include "support/run_and_check.hpp"

namespace lean::support {
namespace {

/// Row blocks of 128 rows and more, full and not, over whole tiles and what is left of one.
Case chunk_case(DType dtype, std::int32_t head_dim) {
  return {.dtype = dtype,
          .q_heads = 4,
          .kv_heads = 1,
          .head_dim = head_dim,
          .lens = {300, 131, 256},
          .n_q = {70},
          .k_layout = "bhsd",
          .v_layout = "bhsd",
          .workers = 5};
}

/// What a call may ask beside its lengths.
std::vector<std::pair<const char*, void (*)(Case&)>> features() {
  return {{"nothing", [](Case&) {}},
          {"causal", [](Case& c) { c.causal = true; }},
          {"window", [](Case& c) { c.causal = true, c.window_left = 40; }},
          {"two-sided window", [](Case& c) { c.window_left = 150, c.window_right = 9; }},
          {"softcap", [](Case& c) { c.causal = true, c.softcap = 3.0F; }},
          {"sinks", [](Case& c) { c.causal = true, c.sinks = true; }},
          {"left padding", [](Case& c) { c.causal = true, c.pad = {31, 0, 129}; }},
          {"token-major", [](Case& c) { c.causal = true, c.k_layout = c.v_layout = "bshd"; }},
          {"packed", [](Case& c) { c.causal = true, c.q_layout = "shd", c.o_layout = "hsd", c.n_q = {70, 17, 140}; }},
          {"packed keys", [](Case& c) { c.causal = true, c.k_layout = c.v_layout = "shd"; }},
          {"a chunk longer than its context", [](Case& c) { c.causal = true, c.lens = {60, 1, 0}; }},
          {"a group of 3", [](Case& c) { c.causal = true, c.q_heads = 6, c.kv_heads = 2; }},
          {"a scale below 0", [](Case& c) { c.scale = -0.5F; }},
          {"ALiBi", [](Case& c) { c.causal = true, c.alibi = true; }},
          {"peaks", [](Case& c) { c.causal = true, c.input = Input::kPeaks; }},
          {"scores from far below 0 to far above", [](Case& c) { c.input = Input::kAscending; }},
          {"scores from far above 0 to far below", [](Case& c) { c.input = Input::kDescending; }}};
}

/// Each variant's own dims, and fewer.
TEST(Conformance, ManyRowsWithEveryFeature) {
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
    using Dims = std::vector<std::int32_t>;
    for (const std::int32_t head_dim : full_or_reduced(Dims{40, 64, 72, 96, 128, 136, 192, 200, 256}, Dims{64, 96, 200})) {
      for (const auto& [name, add] : features()) {
        Case c = chunk_case(dtype, head_dim);
        add(c);
        EXPECT_TRUE(run_and_check(c)) << name;
      }
    }
  }
}

TEST(Conformance, ManyRowsOfPages) {
  for (const std::int32_t page_tokens : {1, 16, 24, 64, 128, 256}) {  // 1 and 24 hold no whole boxes
    for (const std::int32_t window : {-1, 77}) {
      for (const std::int32_t head_dim : {80, 96, 128, 184, 192, 256}) {
        Case c = chunk_case(DType::kBFloat16, head_dim);
        c.page_tokens = page_tokens;
        c.csr = page_tokens == 64;
        c.causal = true;
        c.window_left = window;
        EXPECT_TRUE(run_and_check(c)) << page_tokens << ", " << window << ", " << head_dim;
      }
    }
  }
}

/// Values with dims of their own, fewer than the keys' or more: DeepSeek's prefill (192 and 128), and what is filled up to it.
TEST(Conformance, ManyRowsOfValuesWithDimsOfTheirOwn) {
  for (const auto& [head_dim, value_dim] :
       {std::pair{192, 128}, {160, 64}, {192, 136}, {128, 192}, {64, 128}, {96, 40}, {256, 128}, {72, 8}}) {
    for (const auto& [name, add] : features()) {
      Case c = chunk_case(DType::kBFloat16, head_dim);
      c.value_dim = value_dim;
      add(c);
      EXPECT_TRUE(run_and_check(c)) << name << ", " << head_dim << ", " << value_dim;
    }
    for (const std::int32_t page_tokens : {16, 24, 64}) {
      Case c = chunk_case(DType::kFloat16, head_dim);
      c.value_dim = value_dim;
      c.page_tokens = page_tokens;
      c.causal = true;
      EXPECT_TRUE(run_and_check(c)) << page_tokens << ", " << head_dim << ", " << value_dim;
    }
    for (const std::int32_t n_q : {1, 3}) {  // decode steps have no other kernel
      Case c = chunk_case(DType::kBFloat16, head_dim);
      c.value_dim = value_dim;
      c.n_q = {n_q};
      c.lens = {1100, 40, 0};
      EXPECT_TRUE(run_and_check(c)) << n_q << ", " << head_dim << ", " << value_dim;
    }
  }
}

/// Rules that plain wide tiles lack, alone and together: what a mask hides from all rows of a block holds NaN, as in every case here.
std::vector<std::pair<const char*, void (*)(Case&)>> rules() {
  return {
      {"ALiBi", [](Case& c) { c.causal = true, c.alibi = true; }},
      {"ALiBi without causality", [](Case& c) { c.alibi = true; }},
      {"a boolean mask", [](Case& c) { c.mask = Mask::kBoolean; }},
      {"a mask of numbers", [](Case& c) { c.mask = Mask::kFloat32; }},
      {"a mask of fp16", [](Case& c) { c.mask = Mask::kFloat16, c.causal = true; }},
      {"a mask of bf16 and a window", [](Case& c) { c.mask = Mask::kBFloat16, c.causal = true, c.window_left = 40; }},
      {"a mask, its tokens apart", [](Case& c) { c.mask = Mask::kBoolean, c.mask_layout = "bhds"; }},
      {"a tree mask", [](Case& c) { c.tree = true; }},
      {"a tree mask of causal drafts", [](Case& c) { c.tree = true, c.causal = true; }},
      {"a tree mask of few drafts", [](Case& c) { c.tree = true, c.q_heads = 8, c.n_q = {20}; }},
      {"a tree mask of 32 drafts", [](Case& c) { c.tree = true, c.n_q = {32}; }},
      {"a tree mask of more drafts than tokens", [](Case& c) { c.tree = true, c.lens = {60, 1, 0}; }},
      {"softcap, ALiBi and a mask", [](Case& c) { c.causal = true, c.softcap = 3.0F, c.alibi = true, c.mask = Mask::kBoolean; }},
      {"ALiBi and a window", [](Case& c) { c.causal = true, c.alibi = true, c.window_left = 40, c.window_right = 3; }},
      {"ALiBi of padded requests", [](Case& c) { c.causal = true, c.alibi = true, c.pad = {31, 0, 129}; }},
      {"a mask and peaks", [](Case& c) { c.mask = Mask::kBoolean, c.input = Input::kPeaks; }}};
}

/// The ruled variants' own dims, and fewer; others are any call's.
TEST(Conformance, ManyRowsUnderRules) {
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
    using Dims = std::vector<std::int32_t>;
    for (const std::int32_t head_dim : full_or_reduced(Dims{40, 64, 96, 128, 192}, Dims{64, 96})) {
      for (const auto& [name, add] : rules()) {
        Case c = chunk_case(dtype, head_dim);
        add(c);
        EXPECT_TRUE(run_and_check(c)) << name << ", " << head_dim;
      }
    }
  }
}

TEST(Conformance, ManyRowsUnderRulesOfPagesAndOnAnyNumberOfWorkers) {
  for (const auto& [name, add] : rules()) {
    for (const std::int32_t page_tokens : {1, 16, 64}) {
      Case c = chunk_case(DType::kBFloat16, 128);
      c.page_tokens = page_tokens;
      add(c);
      EXPECT_TRUE(run_and_check(c)) << name << ", " << page_tokens;
    }
    for (const std::int32_t workers : {1, 2, 40}) {
      Case c = chunk_case(DType::kFloat16, 64);
      c.lens = {1100, 40, 0};
      c.workers = workers;
      add(c);
      EXPECT_TRUE(run_and_check(c)) << name << ", " << workers;
    }
  }
}

/// R26: pages outside the pool under a mask, and of a tree mask, whose rules other tiles have not.
TEST(Conformance, R26_ManyRowsUnderRulesSkipPagesOutsideThePool) {
  for (const std::int32_t page : {0, 2, 7}) {
    for (const bool tree : {false, true}) {
      Case c = chunk_case(DType::kBFloat16, 128);
      c.lens = {300, 577};
      c.n_q = {40};
      c.page_tokens = 64;
      c.mask = tree ? Mask::kNone : Mask::kBoolean;
      c.tree = tree;
      EXPECT_TRUE(skips_page(c, page)) << page << ", " << tree;
    }
  }
}

/// R26: pages that hold no whole boxes, whose rows threads copy.
TEST(Conformance, R26_ManyRowsOfShortPagesSkipThoseOutsideThePool) {
  for (const std::int32_t page_tokens : {1, 24}) {
    for (const std::int32_t page : {0, 2, 11}) {
      for (const Mask mask : {Mask::kNone, Mask::kBoolean}) {
        Case c = chunk_case(DType::kBFloat16, 128);
        c.lens = {300, 577};
        c.n_q = {40};
        c.page_tokens = page_tokens;
        c.mask = mask;
        c.workers = page == 0 ? 1 : 5;
        EXPECT_TRUE(skips_page(c, page)) << page_tokens << ", " << page;
      }
    }
  }
}

/// The same rows of fp8, with scales: of either kind and beside queries of either type, as `turn` says.
Case fp8_case(std::int32_t head_dim, std::size_t turn) {
  Case c = chunk_case(turn % 2 == 0 ? DType::kBFloat16 : DType::kFloat16, head_dim);
  c.kv_type = turn / 2 % 2 == 0 ? KvType::kE4M3 : KvType::kE5M2;
  c.kv_scales = KvScales::kHead;
  return c;
}

/// Converted rows fill the kernel's; of other dims any call's kernel has them.
TEST(Conformance, ManyFp8RowsWithEveryFeature) {
  std::size_t turn = 0;
  for (const std::int32_t head_dim : {64, 96, 128, 256}) {
    for (const auto& [name, add] : features()) {
      for (int type = 0; type < 2; ++type) {  // of two kinds that follow each other, so that in the end each feature meets all
        Case c = fp8_case(head_dim, turn++);
        add(c);
        EXPECT_TRUE(run_and_check(c)) << name << ", " << head_dim;
      }
    }
  }
}

/// Pages of any size, since rows are converted one by one.
TEST(Conformance, ManyFp8RowsOfPages) {
  std::size_t turn = 0;
  for (const std::int32_t page_tokens : {1, 5, 16, 24, 64, 128}) {
    for (const std::int32_t window : {-1, 77}) {
      for (const std::int32_t head_dim : {64, 128, 256}) {
        Case c = fp8_case(head_dim, turn++);
        c.page_tokens = page_tokens;
        c.csr = page_tokens == 64;
        c.k_layout = c.v_layout = page_tokens == 16 ? "bshd" : "bhsd";
        c.causal = true;
        c.window_left = window;
        EXPECT_TRUE(run_and_check(c)) << page_tokens << ", " << window << ", " << head_dim;
      }
    }
  }
}

/// R26: rows of pages outside the pool are 0 in the stage, and count as not there.
TEST(Conformance, R26_ManyFp8RowsSkipPagesOutsideThePool) {
  for (const std::int32_t page : {0, 2, 7}) {
    Case c = fp8_case(128, 0);
    c.lens = {300, 577};
    c.n_q = {40};
    c.page_tokens = 64;
    c.workers = 1;
    EXPECT_TRUE(skips_page(c, page)) << page;
  }
}

/// Scales on which the order of scores depends, and such as make no numbers of them.
TEST(Conformance, ManyFp8RowsWithScalesOfAnySign) {
  for (const float scale : {-0.25F, 0.0F, -0.0F, std::numeric_limits<float>::quiet_NaN()}) {
    for (const bool softcap : {false, true}) {
      Case c = fp8_case(128, 0);
      c.causal = true;
      if (softcap) c.softcap = 3.0F;
      EXPECT_TRUE(takes_key_scale(c, scale)) << scale << ", " << softcap;
    }
  }
}

/// One output in many hands, and many outputs in one.
TEST(Conformance, ManyFp8RowsOnAnyNumberOfWorkers) {
  std::size_t turn = 0;
  for (const std::int32_t workers : {1, 2, 7, 40}) {
    for (const std::int32_t head_dim : {64, 128, 256}) {
      Case c = fp8_case(head_dim, turn++);
      c.workers = workers;
      c.causal = workers != 7;
      c.lens = {1100, 40};
      EXPECT_TRUE(run_and_check(c)) << workers << ", " << head_dim;
    }
  }
}

/// The same in 16 bits.
TEST(Conformance, ManyRowsOnAnyNumberOfWorkers) {
  for (const std::int32_t workers : {1, 2, 7, 40}) {
    for (const bool causal : {false, true}) {
      for (const std::int32_t head_dim : {88, 128, 192, 256}) {
        Case c = chunk_case(DType::kFloat16, head_dim);
        c.workers = workers;
        c.causal = causal;
        c.lens = {1100, 40};
        EXPECT_TRUE(run_and_check(c)) << workers << ", " << head_dim;
      }
    }
  }
}

}  // namespace
}  // namespace lean::support
