// check_lengths(): what decode() would clamp or skip is named with entry, value and what is allowed.
#include <gtest/gtest.h>

#include <array>
#include <string>

#include "lean/lean.hpp"

namespace lean {
namespace {

constexpr std::array<std::int32_t, 2> kLengths = {8, 5};

Problem two_sequences() {
  return {.batch = 2, .q_heads = 1, .kv_heads = 1, .head_dim = 1, .kv_capacity = 12, .kv_lengths = kLengths.data()};
}

std::string found(const Problem& problem) { return check_lengths(problem).message; }

TEST(CheckLengths, R25_NamesTheEntryItsValueAndWhatIsAllowed) {
  Problem p = two_sequences();
  EXPECT_EQ(found(p), "");
  p.kv_capacity = 7;
  EXPECT_EQ(found(p), "kv_lengths[0] = 8: allowed 0 to 7 (the tokens there is room for)");
  const std::array<std::int32_t, 2> pads = {8, 6};
  p.kv_capacity = 12, p.kv_left_pad = pads.data();
  EXPECT_EQ(found(p), "kv_left_pad[1] = 6: allowed 0 to 5 (the sequence's length)");
  const std::array<std::int32_t, 3> cumulative = {0, 3, 9};
  p.kv_left_pad = nullptr, p.cu_q_tokens = cumulative.data(), p.total_q_tokens = 8, p.q_tokens = 8;
  EXPECT_EQ(found(p), "cu_q_tokens[2] = 9: allowed 0 to 8 (all tokens there are)");
}

TEST(CheckLengths, R25_CountsNewTokensWhereTheCallDoes) {
  const std::array<std::int32_t, 2> cached = {8, INT32_MAX};
  std::array<std::int32_t, 2> lengths = {-99, -99};
  Problem p = two_sequences();
  p.q_tokens = 4, p.kv_lengths = lengths.data(), p.append.cached_lengths = cached.data();
  EXPECT_EQ(found(p), "kv_lengths[1] = 2147483647: allowed 0 to 12 (the tokens there is room for)");
  EXPECT_EQ(lengths[0], 12);
  const std::array<std::int32_t, 2> cumulative = {0, 1};
  p.batch = 1, p.cu_q_tokens = cumulative.data(), p.total_q_tokens = 1;
  EXPECT_EQ(found(p), "");
  EXPECT_EQ(lengths[0], 9);
  const std::int32_t fewer_than_none = -3;  // and 4 new ones are not 1
  p.q_tokens = 4, p.cu_q_tokens = nullptr, p.append.cached_lengths = &fewer_than_none;
  EXPECT_EQ(found(p), "kv_lengths[0] = -3: allowed 0 to 12 (the tokens there is room for)");
  p.kv_lengths = nullptr;  // nothing to write
  static_cast<void>(found(p));
  std::array<std::int32_t, 3> both = {5, 5, 5};  // which decode() refuses
  p.batch = 2, p.append.cached_lengths = both.data();
  for (const std::int32_t* const kv_lengths : {both.data(), both.data() + 1}) {
    p.kv_lengths = kv_lengths;
    EXPECT_EQ(found(p), "");
    EXPECT_EQ(both, (std::array<std::int32_t, 3>{5, 5, 5}));
  }
}

TEST(CheckLengths, R26_NamesThePageIdThatACallWouldRead) {
  const std::array<std::int32_t, 6> table = {-7, 5, 99, 0, 6, -1};
  Problem p = two_sequences();
  p.pages = {.page_tokens = 4, .page_count = 6, .block_table = table.data(), .block_table_stride = 3};
  EXPECT_EQ(found(p), "pages.block_table[0, 0] = -7: allowed 0 to 5");
  p.scores.window_left = 3;  // the last query, at 7, sees 4 and on
  EXPECT_EQ(found(p), "pages.block_table[1, 1] = 6: allowed 0 to 5");
  EXPECT_EQ(check_lengths(p).code, StatusCode::kBadPageIndex);
  p.pages.page_count = 7;
  EXPECT_EQ(found(p), "") << "nothing reads the third page";
}

TEST(CheckLengths, R26_NamesThePlaceAmongTheIdsOfAllSequences) {
  const std::array<std::int32_t, 3> begins = {0, 2, 4};
  const std::array<std::int32_t, 4> ids = {0, 1, 2, 3};
  Problem p = two_sequences();
  p.pages = {.page_tokens = 4, .page_count = 3, .page_indptr = begins.data(), .page_indices = ids.data()};
  EXPECT_EQ(found(p), "pages.page_indices[3] = 3: allowed 0 to 2");
  p.pages.page_indices = nullptr;
  EXPECT_EQ(found(p), "") << "on a device, perhaps";
}

/// What two sequences write in one call would be whatever the later of two workers left there.
TEST(CheckLengths, R29_NamesThePageThatTwoSequencesAppendTo) {
  std::array<std::int32_t, 6> table = {9, 300001, -1, 9, 300001, -1};
  const std::string shared = ": this call appends to that page already: pages of new tokens must not be shared";
  float row = 0.0F;
  Problem p = two_sequences();  // 8 and 5 tokens
  p.q_tokens = 1;
  p.pages = {.page_tokens = 4, .page_count = 300002, .block_table = table.data(), .block_table_stride = 3};
  EXPECT_EQ(found(p), "") << "nothing is appended: pages may be shared";
  p.append.k.data = p.append.v.data = &row;
  EXPECT_EQ(found(p), "pages.block_table[1, 1] = 300001" + shared);
  EXPECT_EQ(check_lengths(p).code, StatusCode::kBadPageIndex);
  table[4] = 300000;
  EXPECT_EQ(found(p), "") << "the page before, which both read, is nobody's to write";
  p.q_tokens = 2;
  EXPECT_EQ(found(p), "") << "tokens 3 and 4 of the second are in its own pages; 6 and 7 of the first in its last";
  p.q_tokens = 5;
  EXPECT_EQ(found(p), "pages.block_table[1, 0] = 9" + shared);
  table[3] = 11, table[1] = 9;
  EXPECT_EQ(found(p), "pages.block_table[0, 1] = 9" + shared) << "one sequence, one page twice";
  const std::array<std::int32_t, 3> begins = {0, 2, 4};
  const std::array<std::int32_t, 4> ids = {0, 1, 2, 1};
  p.q_tokens = 1;
  p.pages = {.page_tokens = 4, .page_count = 3, .page_indptr = begins.data(), .page_indices = ids.data()};
  EXPECT_EQ(found(p), "pages.page_indices[3] = 1" + shared);
}

}  // namespace
}  // namespace lean
