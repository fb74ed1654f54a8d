// Lengths as every room sees them: whatever the arrays hold, nothing outside the tensors is ever addressed, and a
// sequence whose lengths had to be changed says so.
#include "problem/sequence.hpp"

#include <gtest/gtest.h>

#include <vector>

#include "support/random.hpp"
#include "support/reduced.hpp"

namespace lean {
namespace {

using support::Stream;

constexpr std::int32_t kCapacity = 1000;
constexpr std::int64_t kTotal = 5000;

Problem with_capacity() {
  Problem problem;
  problem.kv_capacity = kCapacity;
  problem.q_tokens = 4;
  return problem;
}

TEST(Sequence, WithoutArraysEverySequenceHasTheCapacity) {
  const Sequence s = LengthSource(with_capacity())(7);
  EXPECT_EQ(s.q_tokens, 4);
  EXPECT_EQ(s.q_first_token, 0);
  EXPECT_EQ(s.kv_begin, 0);
  EXPECT_EQ(s.kv_end, kCapacity);
  EXPECT_EQ(s.kv_tokens(), kCapacity);
  EXPECT_FALSE(s.clamped);
}

TEST(Sequence, R25_LengthsAreClampedToTheCapacityAndReported) {
  const std::vector<std::int32_t> lengths = {0, 1, 999, 1000, 1001, INT32_MAX, -1, INT32_MIN};
  const std::vector<std::int32_t> kept = {0, 1, 999, 1000, 1000, 1000, 0, 0};
  Problem problem = with_capacity();
  problem.kv_lengths = lengths.data();
  const LengthSource source(problem);
  for (std::size_t b = 0; b < lengths.size(); ++b) {
    const Sequence s = source(static_cast<std::int64_t>(b));
    EXPECT_EQ(s.kv_end, kept[b]);
    EXPECT_EQ(s.clamped, lengths[b] != kept[b]) << lengths[b];
  }
}

TEST(Sequence, R25_LeftPaddingIsClampedToTheLengthAndReported) {
  const std::vector<std::int32_t> lengths = {10, 10, 10, 10, 10, 0, 2000};
  const std::vector<std::int32_t> pads = {0, 9, 10, 11, -3, 1, 1500};
  const std::vector<std::int32_t> begins = {0, 9, 10, 10, 0, 0, 1000};
  const std::vector<bool> clamped = {false, false, false, true, true, true, true};
  Problem problem = with_capacity();
  problem.kv_lengths = lengths.data();
  problem.kv_left_pad = pads.data();
  for (std::size_t b = 0; b < lengths.size(); ++b) {
    const Sequence s = LengthSource(problem)(static_cast<std::int64_t>(b));
    EXPECT_EQ(s.kv_begin, begins[b]);
    EXPECT_EQ(s.clamped, clamped[b]) << "sequence " << b;
    EXPECT_GE(s.kv_tokens(), 0);
  }
}

TEST(Sequence, CumulativeLengthsGiveEachSequenceItsSpan) {
  const std::vector<std::int32_t> cu_kv = {0, 100, 100, 350, 1350};
  const std::vector<std::int32_t> cu_q = {0, 1, 1, 5, 8};
  Problem problem = with_capacity();
  problem.cu_kv_tokens = cu_kv.data();
  problem.total_kv_tokens = 1350;
  problem.cu_q_tokens = cu_q.data();
  problem.total_q_tokens = 8;
  const LengthSource source(problem);
  for (std::size_t b = 0; b + 1 < cu_kv.size(); ++b) {
    const Sequence s = source(static_cast<std::int64_t>(b));
    EXPECT_EQ(s.kv_first_token, cu_kv[b]);
    EXPECT_EQ(s.kv_tokens(), cu_kv[b + 1] - cu_kv[b]);
    EXPECT_EQ(s.q_first_token, cu_q[b]);
    EXPECT_EQ(s.q_tokens, cu_q[b + 1] - cu_q[b]);
    EXPECT_FALSE(s.clamped);
  }
}

TEST(Sequence, LengthsCutRaggedSpansShort) {
  const std::vector<std::int32_t> cu_kv = {0, 100, 200};
  const std::vector<std::int32_t> lengths = {30, 101};
  Problem problem = with_capacity();
  problem.cu_kv_tokens = cu_kv.data();
  problem.total_kv_tokens = 200;
  problem.kv_lengths = lengths.data();
  EXPECT_EQ(LengthSource(problem)(0).kv_end, 30);
  EXPECT_FALSE(LengthSource(problem)(0).clamped);
  EXPECT_EQ(LengthSource(problem)(1).kv_end, 100);
  EXPECT_TRUE(LengthSource(problem)(1).clamped) << "a length beyond its span is as wrong as one beyond the capacity";
}

struct SpanCase {
  std::int32_t first;
  std::int32_t last;
  std::int64_t begin;
  std::int32_t tokens;
  bool clamped;
};

TEST(Sequence, R24_CumulativeLengthsOutOfOrderOrOutOfRangeAreClampedAndReported) {
  const SpanCase cases[] = {
      {5, 10, 5, 5, false},                   // not starting at 0 is seen by check_lengths(), not here: nothing is out of range
      {10, 5, 10, 0, true},                   // falling
      {-7, 10, 0, 10, true},                  // before the tensor
      {4990, 5001, 4990, 10, true},           // beyond the tensor
      {5001, 5002, 5000, 0, true},            // wholly beyond
      {INT32_MAX, INT32_MIN, 5000, 0, true},  // garbage
      {INT32_MIN, INT32_MAX, 0, 1000, true},  // longer than the capacity
      {0, 1001, 0, 1000, true},               // one token longer than the capacity
      {4000, 5000, 4000, 1000, false},        // exactly to the end
  };
  for (const SpanCase& c : cases) {
    const std::int32_t cumulative[] = {c.first, c.last};
    Problem problem = with_capacity();
    problem.cu_kv_tokens = cumulative;
    problem.total_kv_tokens = kTotal;
    const Sequence kv = LengthSource(problem)(0);
    EXPECT_EQ(kv.kv_first_token, c.begin);
    EXPECT_EQ(kv.kv_tokens(), c.tokens);
    EXPECT_EQ(kv.clamped, c.clamped) << c.first << ", " << c.last;

    Problem queries = with_capacity();
    queries.cu_q_tokens = cumulative;
    queries.total_q_tokens = kTotal;
    queries.q_tokens = kCapacity;
    const Sequence q = LengthSource(queries)(0);
    EXPECT_EQ(q.q_first_token, c.begin);
    EXPECT_EQ(q.q_tokens, c.tokens);
    EXPECT_EQ(q.clamped, c.clamped) << c.first << ", " << c.last;
  }
}

/// A length as a fault would leave it: plausible, off by one, or any bits.
std::int32_t faulty(Stream& random) {
  if (random.chance(50)) return static_cast<std::int32_t>(random.between(0, kTotal));
  if (random.chance(50))
    return static_cast<std::int32_t>(random.one_of<std::int64_t>({-1, 0, kCapacity, kCapacity + 1, kTotal, kTotal + 1}));
  return static_cast<std::int32_t>(random.bits());
}

TEST(Sequence, R24_R25_NoBitsInTheLengthArraysLeadOutsideTheTensors) {
  Stream random(3);
  std::int64_t reported = 0;
  const std::int32_t rounds = support::full_or_reduced(200'000, 20'000);
  for (std::int32_t round = 0; round < rounds; ++round) {
    const std::int32_t cu_q[] = {faulty(random), faulty(random)};
    const std::int32_t cu_kv[] = {faulty(random), faulty(random)};
    const std::int32_t length[] = {faulty(random)};
    const std::int32_t pad[] = {faulty(random)};
    Problem problem = with_capacity();
    if (random.chance(50)) problem.cu_q_tokens = cu_q;
    if (random.chance(50)) problem.cu_kv_tokens = cu_kv;
    if (random.chance(50)) problem.kv_lengths = length;
    if (random.chance(50)) problem.kv_left_pad = pad;
    problem.total_q_tokens = kTotal;
    problem.total_kv_tokens = kTotal;
    const Sequence s = LengthSource(problem)(0);

    ASSERT_TRUE(s.q_tokens >= 0 && s.q_tokens <= problem.q_tokens);
    ASSERT_TRUE(s.kv_begin >= 0 && s.kv_begin <= s.kv_end && s.kv_end <= kCapacity);
    if (problem.cu_q_tokens != nullptr) {
      ASSERT_TRUE(s.q_first_token >= 0 && s.q_first_token + s.q_tokens <= kTotal);
    }
    if (problem.cu_kv_tokens != nullptr) {
      ASSERT_TRUE(s.kv_first_token >= 0 && s.kv_first_token + s.kv_end <= kTotal);
    }
    const bool q_kept = problem.cu_q_tokens == nullptr ||
                        (s.q_first_token == cu_q[0] && s.q_tokens == static_cast<std::int64_t>(cu_q[1]) - cu_q[0]);
    const bool first_kept = problem.cu_kv_tokens == nullptr || s.kv_first_token == cu_kv[0];
    const std::int64_t asked_end = problem.kv_lengths != nullptr     ? length[0]
                                   : problem.cu_kv_tokens != nullptr ? static_cast<std::int64_t>(cu_kv[1]) - cu_kv[0]
                                                                     : kCapacity;
    const bool pad_kept = problem.kv_left_pad == nullptr || s.kv_begin == pad[0];
    if (!q_kept || !first_kept || s.kv_end != asked_end || !pad_kept) {
      ASSERT_TRUE(s.clamped) << "a length was changed and nobody told";
    }
    reported += s.clamped ? 1 : 0;
  }
  EXPECT_GT(reported, rounds / 10);
  EXPECT_LT(reported, rounds) << "sound lengths must not be reported";
}

}  // namespace
}  // namespace lean
