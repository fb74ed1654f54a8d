// Where elements lie: 64-bit offsets with any strides, the order of packed rows, and the causal limit, which the
// schedule must see the same way.
#include "problem/address.hpp"

#include <gtest/gtest.h>

#include "schedule/line_shape.hpp"
#include "support/random.hpp"

namespace lean {
namespace {

__extension__ using Int128 = __int128;

TEST(Address, R19_OffsetsBeyond2To31ElementsAndTo32BytesAreExact) {
  // 8 heads x 128 Ki tokens x 256 dims: a sequence holds 2^28 elements, sequence 20 begins beyond 2^32 of them.
  const Strides dense = {.sequence = 8LL * 131'072 * 256, .head = 131'072LL * 256, .token = 256, .dim = 1};
  const Sequence lengths = {.q_tokens = 1, .kv_end = 131'072};
  EXPECT_EQ(kv_offset(dense, lengths, {.sequence = 20, .head = 7}, false),
            20 * (std::int64_t{1} << 28) + 7 * (std::int64_t{1} << 25));
  EXPECT_GT(kv_offset(dense, lengths, {.sequence = 20, .head = 7}, false), std::int64_t{1} << 32);

  const Strides huge = {
      .sequence = std::int64_t{1} << 40, .head = (std::int64_t{1} << 33) + 1, .token = (std::int64_t{1} << 31) + 3};
  EXPECT_EQ(q_offset(huge, lengths, {.sequence = 5, .head = 63}, false),
            5 * (std::int64_t{1} << 40) + 63 * ((std::int64_t{1} << 33) + 1));
  const Sequence packed = {.q_tokens = 1, .q_first_token = 2'000'000'000, .kv_end = 7, .kv_first_token = 1'999'999'999};
  EXPECT_EQ(q_offset(huge, packed, {.sequence = 5, .head = 2}, true),
            2'000'000'000 * ((std::int64_t{1} << 31) + 3) + 2 * ((std::int64_t{1} << 33) + 1));
  EXPECT_EQ(kv_offset(huge, packed, {.sequence = 5, .head = 2}, true),
            1'999'999'999 * ((std::int64_t{1} << 31) + 3) + 2 * ((std::int64_t{1} << 33) + 1));
}

TEST(Address, R19_OffsetsAreExactForRandomStrides) {
  support::Stream random(9);
  std::int64_t beyond_32_bits = 0;
  for (std::int32_t round = 0; round < 100'000; ++round) {
    const std::int64_t reach = std::int64_t{1} << random.between(0, 30);
    const Strides strides = {
        .sequence = random.between(-reach, reach), .head = random.between(-reach, reach), .token = random.between(-reach, reach)};
    const HeadPosition at = {.sequence = random.between(0, INT32_MAX), .head = static_cast<std::int32_t>(random.between(0, 1000))};
    const Sequence lengths = {.q_first_token = random.between(0, INT32_MAX), .kv_first_token = random.between(0, INT32_MAX)};
    const Int128 head = Int128{at.head} * strides.head;
    ASSERT_TRUE(Int128{q_offset(strides, lengths, at, false)} == Int128{at.sequence} * strides.sequence + head);
    ASSERT_TRUE(Int128{kv_offset(strides, lengths, at, false)} == Int128{at.sequence} * strides.sequence + head);
    ASSERT_TRUE(Int128{q_offset(strides, lengths, at, true)} == Int128{lengths.q_first_token} * strides.token + head);
    ASSERT_TRUE(Int128{kv_offset(strides, lengths, at, true)} == Int128{lengths.kv_first_token} * strides.token + head);
    beyond_32_bits += q_offset(strides, lengths, at, false) > std::int64_t{1} << 32 ? 1 : 0;
  }
  EXPECT_GT(beyond_32_bits, 10'000);
}

TEST(Address, R21_ZeroAndNegativeStridesWalkWhereTheySay) {
  const Sequence lengths = {.q_tokens = 1, .kv_end = 10};
  EXPECT_EQ(kv_offset({.sequence = 0, .head = -64, .token = 8}, lengths, {.sequence = 9, .head = 3}, false), -192);
  EXPECT_EQ(q_offset({.sequence = 100, .head = 0, .token = 8}, lengths, {.sequence = 2, .head = 31}, false), 200);
}

TEST(Address, PackedRowsGoTokenByTokenWithTheGroupSideBySide) {
  for (const std::int32_t group : {1, 3, 8}) {
    std::int64_t row = 0;
    for (std::int32_t token = 0; token < 20; ++token) {
      for (std::int32_t head = 0; head < group; ++head, ++row) {
        ASSERT_EQ(packed_row(row, group).token, token);
        ASSERT_EQ(packed_row(row, group).head_in_group, head);
      }
    }
  }
  EXPECT_EQ(packed_row(std::int64_t{INT32_MAX} * 100 + 99, 100).token, INT32_MAX);
}

TEST(Address, TheLastQueryTokenSeesEveryKeyAndEachOneBeforeItOneLess) {
  const Sequence lengths = {.q_tokens = 4, .kv_begin = 10, .kv_end = 100};
  EXPECT_EQ(visible_end(lengths, 3, true), 100);
  EXPECT_EQ(visible_end(lengths, 2, true), 99);
  EXPECT_EQ(visible_end(lengths, 0, true), 97);
  for (std::int32_t token = 0; token < 4; ++token) EXPECT_EQ(visible_end(lengths, token, false), 100);
}

TEST(Address, MoreQueriesThanKeysSeeNothingAtFirst) {
  const Sequence lengths = {.q_tokens = 5, .kv_begin = 3, .kv_end = 5};
  EXPECT_EQ(visible_end(lengths, 0, true), 3);
  EXPECT_EQ(visible_end(lengths, 2, true), 3);
  EXPECT_EQ(visible_end(lengths, 3, true), 4);
  EXPECT_EQ(visible_end(lengths, 4, true), 5);
  const Sequence largest = {.q_tokens = INT32_MAX, .kv_end = INT32_MAX};
  EXPECT_EQ(visible_end(largest, INT32_MAX - 1, true), INT32_MAX);
  EXPECT_EQ(visible_end({.q_tokens = INT32_MAX, .kv_end = 1}, 0, true), 0);
}

/// By asking every pair of a query and a key.
TEST(Address, ASpanOfQueriesSeesTheKeysThatOneOfThemSees) {
  std::int64_t spans = 0;
  for (const std::int32_t left : {-1, 0, 1, 3, 100, INT32_MAX}) {
    for (const std::int32_t right : {-1, 0, 2, 100, INT32_MAX}) {
      for (std::int32_t q_tokens = 1; q_tokens <= 6; ++q_tokens) {
        for (std::int32_t kv_tokens = 0; kv_tokens <= 9; ++kv_tokens) {
          for (std::int32_t token = 0; token < q_tokens; ++token) {
            for (std::int32_t last = token; last < q_tokens; ++last) {
              std::int64_t first_key = INT64_MAX;
              std::int64_t last_key = -1;
              for (std::int64_t query = token; query <= last; ++query) {
                for (std::int64_t key = 0; key < kv_tokens; ++key) {
                  const std::int64_t distance = key - (kv_tokens - q_tokens + query);
                  if ((left >= 0 && -distance > left) || (right >= 0 && distance > right)) continue;
                  first_key = std::min(first_key, key);
                  last_key = std::max(last_key, key);
                }
              }
              const KeySpan span = keys_seen({left, right}, kv_tokens, q_tokens, token, last);
              if (last_key < 0) {
                ASSERT_LE(span.end, span.begin);
              } else {
                ASSERT_EQ(span.begin, first_key);
                ASSERT_EQ(span.end, last_key + 1);
              }
              ++spans;
            }
          }
        }
      }
    }
  }
  EXPECT_GT(spans, 10'000);
}

TEST(Address, TheScheduleCountsTheTilesThatTheCausalLimitLetsARowBlockSee) {
  for (const std::int32_t group : {1, 3}) {
    for (const std::int32_t q_rows : {1, 2, 16}) {
      for (std::int32_t q_tokens = 1; q_tokens <= 12; ++q_tokens) {
        for (std::int32_t kv_begin = 0; kv_begin <= 5; kv_begin += 5) {
          for (std::int32_t kv_tokens = 0; kv_tokens <= 40; ++kv_tokens) {
            const schedule::LineShape shape = {
                .batch = 1, .kv_heads = 1, .group = group, .q_rows = q_rows, .tile_tokens = 4, .reach = {.right = 0}};
            const Sequence lengths = {.q_tokens = q_tokens, .kv_begin = kv_begin, .kv_end = kv_begin + kv_tokens};
            const schedule::SequenceWork work = {.q_tokens = q_tokens, .kv_tokens = kv_tokens};
            for (std::int32_t block = 0; block < shape.row_blocks(work); ++block) {
              const std::int64_t last_row = static_cast<std::int64_t>(block) * q_rows + shape.rows_in(work, block) - 1;
              const std::int32_t seen = visible_end(lengths, packed_row(last_row, group).token, true) - kv_begin;
              ASSERT_EQ(shape.tiles_of(work, block).count, std::max<std::int64_t>(1, (seen + 3) / 4));
              ASSERT_EQ(shape.tiles_of(work, block).first, 0);
            }
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace lean
