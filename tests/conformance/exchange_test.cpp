// What exchange_states() refuses, by name, in any build: before a backend is asked.
#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <string>
#include <tuple>
#include <vector>

#include "lean/lean.hpp"

namespace lean {
namespace {

alignas(256) std::byte g_memory[4096];
std::uint32_t g_fault = 0;

struct Asked {
  Exchange exchange;
  ExchangedStates states;
  Options options;
};

Asked asked() {
  Asked call;
  call.exchange = {.rank = 1, .ranks = 2, .memory_bytes = exchange_bytes(2, 3, 64, DType::kFloat16), .fault = &g_fault};
  call.exchange.memory[0] = call.exchange.memory[1] = g_memory;
  call.states = {.o = g_memory,
                 .lse = reinterpret_cast<const float*>(g_memory + 1024),
                 .merged_o = g_memory,
                 .merged_lse = reinterpret_cast<float*>(g_memory + 2048),
                 .rows = 3,
                 .value_dim = 64,
                 .dtype = DType::kFloat16};
  return call;
}

TEST(ExchangeStates, R47_WhatDoesNotFitIsRefusedByName) {
  const std::vector<std::pair<const char*, std::function<void(Asked&)>>> refused = {
      {"rows = -1: ", [](Asked& a) { a.states.rows = -1; }},
      {"value_dim = 0: ", [](Asked& a) { a.states.value_dim = 0; }},
      {"value_dim = 577: ", [](Asked& a) { a.states.value_dim = 577; }},
      {"dtype = 3: ", [](Asked& a) { a.states.dtype = DType::kFloat8E4M3; }},
      {"o = 0: ", [](Asked& a) { a.states.o = nullptr; }},
      {"lse = 0: ", [](Asked& a) { a.states.lse = nullptr; }},
      {"merged_o = 2: ", [](Asked& a) { a.states.merged_o = g_memory + 1; }},
      {"merged_lse = ", [](Asked& a) { a.states.merged_lse = const_cast<float*>(a.states.lse); }},
      {"merged_lse = ", [](Asked& a) { a.states.merged_lse = const_cast<float*>(a.states.lse) + 1; }},
      {"merged_o = ", [](Asked& a) { a.states.merged_o = const_cast<std::byte*>(static_cast<const std::byte*>(a.states.o)) + 4; }},
      {"merged_o = ", [](Asked& a) { a.states.merged_o = a.states.merged_lse; }},
      {"exchange.ranks = 17: allowed 1 to 16", [](Asked& a) { a.exchange.ranks = 17; }},
      {"exchange.ranks = 0: ", [](Asked& a) { a.exchange.ranks = 0; }},
      {"exchange.rank = 2: ", [](Asked& a) { a.exchange.rank = 2; }},
      {"exchange.limit_ns = -1: ", [](Asked& a) { a.exchange.limit_ns = -1; }},
      {"exchange.fault = 0: ", [](Asked& a) { a.exchange.fault = nullptr; }},
      {"exchange.memory[0] = 0: ", [](Asked& a) { a.exchange.memory[0] = nullptr; }},
      {"exchange.memory[1] = 256: ", [](Asked& a) { a.exchange.memory[1] = g_memory + 16; }},
      {"exchange.memory_bytes = ", [](Asked& a) { --a.exchange.memory_bytes; }},
      {"exchange.memory_bytes = ", [](Asked& a) { a.states.rows = 100; }},
      {"options.backend = 0: peer memory is of GPUs", [](Asked&) {}},
  };
  for (const auto& [message, change] : refused) {
    Asked call = asked();
    change(call);
    const Status status = exchange_states(call.exchange, call.states, call.options);
    EXPECT_FALSE(status.ok());
    EXPECT_EQ(std::string(status.message).find(message), 0U) << message << " and not " << status.message;
  }
}

TEST(ExchangeStates, R47_MemoryGrowsWithRowsAndRanks) {
  const std::size_t none = exchange_bytes(2, 0, 128, DType::kBFloat16);  // the header
  const std::size_t block = exchange_bytes(2, 1, 128, DType::kBFloat16) - none;
  EXPECT_GT(none, 0U);
  EXPECT_GT(block, 0U);
  EXPECT_EQ(exchange_bytes(2, 8, 128, DType::kBFloat16), none + block);  // 8 x 32 words: a block
  EXPECT_EQ(exchange_bytes(2, 9, 128, DType::kBFloat16), none + 2 * block);
  EXPECT_EQ(exchange_bytes(2, 8, 128, DType::kFloat32), none + 2 * block);
  EXPECT_EQ(exchange_bytes(16, 8, 128, DType::kBFloat16), none + 8 * block);
  for (const auto& [ranks, rows, dim, dtype] :
       {std::tuple{0, 1L, 128, DType::kFloat32}, std::tuple{17, 1L, 128, DType::kFloat32}, std::tuple{2, -1L, 128, DType::kFloat32},
        std::tuple{2, 1L, 577, DType::kFloat32}, std::tuple{2, 1L, 128, DType::kFloat8E5M2}}) {
    EXPECT_EQ(exchange_bytes(ranks, rows, dim, dtype), 0U);
  }
}

TEST(ExchangeStates, R47_ACallOnACpuIsNoPartOfAnExchange) {
  Problem problem{.batch = 1, .q_heads = 1, .kv_heads = 1, .head_dim = 64, .kv_capacity = 1};
  for (auto* tensor : {&problem.q, &problem.k, &problem.v}) *tensor = {g_memory, DType::kFloat32, {64, 64, 64, 1}};
  problem.o = {g_memory + 2048, DType::kFloat32, {64, 64, 64, 1}};
  const Asked call = asked();
  EXPECT_TRUE(supports(problem, {}).ok()) << supports(problem, {}).message;
  const Status status = supports(problem, {.exchange = &call.exchange});
  EXPECT_EQ(status.code, StatusCode::kUnsupported);
  EXPECT_EQ(std::string(status.message).find("options.exchange = 2: "), 0U) << status.message;
}

TEST(ShardLengths, R47_EveryTokenIsHeldByOneRank) {
  constexpr std::int32_t kTokens = 200;
  std::vector<std::int32_t> tokens;
  for (std::int32_t n = 0; n <= kTokens; ++n) tokens.push_back(n);
  for (const std::int32_t ranks : {1, 2, 3, 7}) {
    for (const std::int32_t block : {1, 3, 16}) {
      for (std::int32_t rank = 0; rank < ranks; ++rank) {
        std::vector<std::int32_t> held(tokens.size());
        const TokenShard shard{.rank = rank, .ranks = ranks, .block_tokens = block};
        ASSERT_TRUE(shard_lengths(tokens.data(), held.data(), kTokens + 1, shard, {}).ok());
        std::int32_t expected = 0;  // one after the other
        for (std::int32_t n = 0; n <= kTokens; ++n) {
          ASSERT_EQ(held[static_cast<std::size_t>(n)], expected)
              << n << " tokens, rank " << rank << " of " << ranks << ", " << block;
          if (n / block % ranks == rank) ++expected;
        }
      }
    }
  }
  const std::int32_t extremes[] = {-5, 2'147'483'647};
  std::int32_t held[2] = {};
  ASSERT_TRUE(shard_lengths(extremes, held, 2, {.rank = 0, .ranks = 1, .block_tokens = 2'147'483'647}, {}).ok());
  EXPECT_EQ(held[0], 0);
  EXPECT_EQ(held[1], 2'147'483'647);
}

TEST(ShardLengths, R47_WhatIsNoShardIsRefusedByName) {
  std::int32_t tokens = 5, held = -1;
  const auto refusal = [&](std::int64_t count, const TokenShard& shard, const std::int32_t* from) {
    return std::string(shard_lengths(from, &held, count, shard, {}).message);
  };
  EXPECT_EQ(refusal(-1, {}, &tokens).find("count = -1: "), 0U);
  EXPECT_EQ(refusal(1, {}, nullptr).find("tokens = 0: "), 0U);
  EXPECT_EQ(refusal(1, {.rank = 2, .ranks = 2}, &tokens).find("shard.rank = 2: "), 0U);
  EXPECT_EQ(refusal(1, {.ranks = 0}, &tokens).find("shard.ranks = 0: "), 0U);
  EXPECT_EQ(refusal(1, {.block_tokens = 0}, &tokens).find("shard.block_tokens = 0: "), 0U);
  EXPECT_EQ(held, -1);
}

TEST(ExchangeStates, R47_TheFaultWordSaysWhichRank) {
  std::uint32_t fault = 0;
  const Exchange exchange{.fault = &fault};
  EXPECT_TRUE(exchange_status(exchange).ok());
  fault = 1 + (3U << 8);
  EXPECT_STREQ(exchange_status(exchange).message, "exchange.rank = 3: did not come within the limit; rows that need it are NaN");
  fault = 2;
  EXPECT_EQ(std::string(exchange_status(exchange).message).find("exchange.rank = 0: is in a later call"), 0U);
  fault = 77;
  EXPECT_EQ(std::string(exchange_status(exchange).message).find("exchange.fault = 77"), 0U);
  EXPECT_FALSE(exchange_status({}).ok());
}

}  // namespace
}  // namespace lean
