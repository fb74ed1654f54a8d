// Calls of many rows, as prefill chunks and drafts of many tokens are: more than 64 packed rows of a kv head. On GPUs with products of
// warpgroups they have a tile of their own (src/backends/cuda/kernel/tile/wide_tile.cuh), and each of its paths is taken here: whole
// tiles and ends of tiles, rows that see less than others, boxes and rows that threads copy, one worker and several to an output.
#include <gtest/gtest.h>

#include <utility>
#include <vector>

#include "support/run_and_check.hpp"

namespace lean::support {
namespace {

/// Row blocks of 128 rows, full and not, over whole tiles and what is left of one.
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
          {"peaks", [](Case& c) { c.causal = true, c.input = Input::kPeaks; }}};
}

TEST(Conformance, ManyRowsWithEveryFeature) {
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
    for (const std::int32_t head_dim : {64, 128}) {
      for (const auto& [name, add] : features()) {
        Case c = chunk_case(dtype, head_dim);
        add(c);
        EXPECT_TRUE(run_and_check(c)) << name;
      }
    }
  }
}

TEST(Conformance, ManyRowsOfPages) {
  for (const std::int32_t page_tokens : {16, 24, 64, 128, 256}) {  // 24 holds no whole boxes
    for (const std::int32_t window : {-1, 77}) {
      Case c = chunk_case(DType::kBFloat16, 128);
      c.page_tokens = page_tokens;
      c.csr = page_tokens == 64;
      c.causal = true;
      c.window_left = window;
      EXPECT_TRUE(run_and_check(c)) << page_tokens << ", " << window;
    }
  }
}

/// One output in many hands, and many outputs in one.
TEST(Conformance, ManyRowsOnAnyNumberOfWorkers) {
  for (const std::int32_t workers : {1, 2, 7, 40}) {
    for (const bool causal : {false, true}) {
      Case c = chunk_case(DType::kFloat16, 128);
      c.workers = workers;
      c.causal = causal;
      c.lens = {1100, 40};
      EXPECT_TRUE(run_and_check(c)) << workers;
    }
  }
}

}  // namespace
}  // namespace lean::support
