// Decode steps as servers make them: few query tokens, all heads of a K/V head together, head dimensions of models. Backends have
// code of their own for these, by row block, type and layout, and each of its paths is taken here.
#include <gtest/gtest.h>

#include "support/reduced.hpp"
#include "support/run_and_check.hpp"
#include "support/tables.hpp"

namespace lean::support {
namespace {

/// Of models, and 40: whole rows of a GPU's variants, and rows that these fill up with zeros.
const std::vector<std::int32_t> kStepDims = head_dims_and({40, 80, 96, 192});

/// K and V alike.
struct StepLayout {
  const char* name;
  std::int32_t page_tokens;
};

constexpr StepLayout kStepLayouts[] = {{"bhsd", 0},  {"bshd", 0},  {"hsd", 0},   {"shd", 0},   {"bhsd~gap8", 0}, {"bshd~bcasth", 0},
                                       {"bshd", 1},  {"bhsd", 16}, {"bshd", 16}, {"bhsd", 24}, {"bshd", 24},     {"bhsd", 48},
                                       {"bshd", 48}, {"bhsd", 64}, {"bshd", 64}, {"bshd", 256}};

/// Tokens around boxes of 16, tiles and pages.
const std::vector<std::int32_t> kStepLengths = {1, 613, 0, 97, 272, 15};

Case step_case(KvType type, std::int32_t head_dim, const StepLayout& layout) {
  return {.kv_type = type,
          .kv_scales = type == KvType::kAsQueries ? KvScales::kNone : KvScales::kHead,
          .q_heads = 8,
          .kv_heads = 2,
          .head_dim = head_dim,
          .lens = kStepLengths,
          .page_tokens = layout.page_tokens,
          .k_layout = layout.name,
          .v_layout = layout.name,
          .workers = 5};
}

TEST(Conformance, R06_DecodeStepsOfEveryTypeRowBlockAndLayout) {
  EveryNth some(23);
  for (const KvType type : {KvType::kAsQueries, KvType::kE4M3, KvType::kE5M2}) {
    for (const std::int32_t head_dim : kStepDims) {
      for (const std::int32_t n_q : {1, 2, 3, 5, 13, 30}) {  // of 4 heads each: blocks of 8, 8, 16, 32, 64 and 128 rows
        for (const StepLayout& layout : kStepLayouts) {
          if (some.skips()) continue;
          Case c = step_case(type, head_dim, layout);
          c.n_q = {n_q};
          c.csr = n_q == 5;
          c.causal = true;
          ASSERT_TRUE(target_serves(c)) << to_text(c);
          EXPECT_TRUE(run_and_check(c));
        }
      }
    }
  }
}

/// Windows and left padding: tiles begin at tokens that divide nothing.
TEST(Conformance, R06_DecodeStepsThatBeginAnywhere) {
  EveryNth some(11);
  for (const KvType type : {KvType::kAsQueries, KvType::kE4M3}) {
    for (const std::int32_t head_dim : kStepDims) {
      for (const StepLayout& layout : kStepLayouts) {
        if (some.skips()) continue;
        Case c = step_case(type, head_dim, layout);
        c.window_left = 301;
        ASSERT_TRUE(target_serves(c)) << to_text(c);
        EXPECT_TRUE(run_and_check(c));
        c.window_left = -1;
        c.pad = {0, 37, 0, 96, 16, 3};
        c.n_q = {7};
        EXPECT_TRUE(run_and_check(c));
      }
    }
  }
}

/// Outputs that are all alike and share the workers evenly, or nearly: a GPU knows these shares without walking the line. Lengths
/// around tiles, around a tile for each worker, and of none; sequences that begin anywhere.
TEST(Conformance, R04_EvenLinesOfAnyLength) {
  struct Outputs {
    std::int32_t sequences;
    std::int32_t kv_heads;
    std::int32_t group;
  };
  EveryNth some(23);
  for (const std::int32_t head_dim : head_dims_and({96})) {
    for (const Outputs& outputs : {Outputs{1, 1, 8}, {1, 1, 16}, {1, 8, 4}, {3, 2, 1}, {2, 5, 12}}) {
      for (const StepLayout& layout : {StepLayout{"bhsd", 0}, {"bshd", 0}, {"bshd", 16}, {"bhsd", 64}}) {
        for (const std::int32_t tokens : {0, 1, 256, 257, 1024, 2305, 5003}) {
          if (some.skips()) continue;
          Case c = step_case(KvType::kAsQueries, head_dim, layout);
          c.q_heads = outputs.kv_heads * outputs.group;
          c.kv_heads = outputs.kv_heads;
          c.lens.assign(static_cast<std::size_t>(outputs.sequences), tokens);
          c.capacity = tokens + 8;
          c.workers = tokens == 257 ? 33 : 132;
          if (tokens == 2305) c.pad.assign(c.lens.size(), 250);
          if (tokens == 5003) c.window_left = 3001;
          ASSERT_TRUE(target_serves(c)) << to_text(c);
          EXPECT_TRUE(run_and_check(c));
        }
      }
    }
  }
}

/// Batches around 32 sequences and a multiple of them, alike, uneven and with empty ones: a warp of a GPU sums up to four a lane.
TEST(Conformance, R04_BatchesAroundLanesOfAWarp) {
  EveryNth some(13);
  for (const std::int32_t sequences : {32, 33, 36, 65, 127, 128, 129}) {
    for (const StepLayout& layout : {StepLayout{"bhsd", 0}, {"hsd", 0}, {"bshd", 0}, {"bshd", 16}}) {
      for (const std::int32_t kv_heads : {1, 3}) {
        for (const std::int32_t tokens : {0, 100, 260}) {  // 0: each its own
          if (some.skips()) continue;
          Case c = step_case(KvType::kAsQueries, 64, layout);
          c.q_heads = 4 * kv_heads;
          c.kv_heads = kv_heads;
          c.workers = tokens == 100 ? 7 : 132;
          c.capacity = 263;
          c.lens.assign(static_cast<std::size_t>(sequences), tokens);
          if (tokens == 0) {
            for (std::int32_t i = 0; i < sequences; ++i) c.lens[static_cast<std::size_t>(i)] = i % 5 == 0 ? 0 : i * 97 % 261;
          }
          if (tokens == 260) c.lens.back() = 259;  // as many tiles, not as many tokens
          ASSERT_TRUE(target_serves(c)) << to_text(c);
          EXPECT_TRUE(run_and_check(c));
        }
      }
    }
  }
}

/// More outputs than a GPU has multiprocessors, and as many workers as it likes: short and long ones, alike and not, so that shares are
/// whole outputs, parts of them, or both; sequences that begin anywhere, and two queries.
TEST(Conformance, R06_DecodeStepsOfManyOutputs) {
  struct Batch {
    std::int32_t sequences, tokens;  // of 4 K/V heads: 192 outputs, and 284; 0 tokens: each its own
  };
  constexpr Batch kBatches[] = {{48, 0}, {71, 60}, {71, 0}, {48, 190}, {48, 60}, {71, 190}};
  EveryNth some(11);
  std::size_t next = 0;
  for (const KvType type : {KvType::kAsQueries, KvType::kE4M3}) {
    for (const std::int32_t head_dim : {64, 80, 128}) {
      for (const StepLayout& layout :
           {StepLayout{"bhsd", 0}, {"bshd", 0}, {"hsd", 0}, {"bhsd~gap8", 0}, {"bshd", 16}, {"bhsd", 24}, {"bhsd", 64}}) {
        for (int i = 0; i < 2; ++i) {
          const Batch& batch = kBatches[next++ % std::size(kBatches)];
          if (some.skips()) continue;
          Case c = step_case(type, head_dim, layout);
          c.q_heads = batch.tokens == 190 ? 32 : 4;
          c.kv_heads = 4;
          c.workers = 0;
          c.causal = true;
          c.lens.assign(static_cast<std::size_t>(batch.sequences), batch.tokens);
          if (batch.tokens == 0) {
            for (std::int32_t s = 0; s < batch.sequences; ++s) c.lens[static_cast<std::size_t>(s)] = s % 7 == 0 ? 0 : s * 97 % 301;
            c.lens[5] = 3001;
            if (batch.sequences == 71) c.window_left = 150;
          }
          if (batch.tokens == 60) c.n_q = {2};
          if (batch.tokens == 190 && batch.sequences == 71) c.pad.assign(c.lens.size(), 37);
          ASSERT_TRUE(target_serves(c)) << to_text(c);
          EXPECT_TRUE(run_and_check(c));
        }
      }
    }
  }
}

}  // namespace
}  // namespace lean::support
