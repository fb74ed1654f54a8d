// Exchanges over peer memory on a fake runtime: how the kernel is launched, and the memory of an embedding's ranks, which is given back
// whichever call fails.
#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "cuda_host/calls.hpp"
#include "cuda_host/fake_runtime.hpp"
#include "fixup/exchange.hpp"
#include "integrations/runtime/device.hpp"
#include "integrations/runtime/peer_memory.hpp"
#include "lean/lean.h"
#include "lean/lean.hpp"

namespace lean::cuda_host {
namespace {

using runtime::PeerMemory;
using runtime::device::Error;

/// Rows that the host never looks at.
ExchangedStates states_of(std::int64_t rows, std::int32_t value_dim = 128, DType dtype = DType::kBFloat16) {
  return {.o = address(1),
          .lse = static_cast<const float*>(address(2)),
          .merged_o = address(1),
          .merged_lse = static_cast<float*>(address(3)),
          .rows = rows,
          .value_dim = value_dim,
          .dtype = dtype};
}

Exchange exchange_of(std::int32_t ranks, const ExchangedStates& states, std::uint32_t& fault) {
  Exchange exchange{.rank = ranks - 1, .ranks = ranks, .fault = &fault};
  for (std::int32_t rank = 0; rank < ranks; ++rank) exchange.memory[rank] = address(static_cast<std::uintptr_t>(10 + rank));
  exchange.memory_bytes = exchange_bytes(ranks, states.rows, states.value_dim, states.dtype);
  return exchange;
}

TEST(CudaHostExchange, R47_ACallIsOneKernelThatMayStartEarlyAndFitsTheDevice) {
  std::uint32_t fault = 0;
  for (const FakeDevice& device : kDevices) {
    for (const auto& [rows, dtype, grid] : {std::tuple{std::int64_t{32}, DType::kBFloat16, 4U},  // 32 x 32 words of 4 elements
                                            std::tuple{std::int64_t{33}, DType::kFloat32, 9U},   // 33 x 64 words of 2
                                            std::tuple{std::int64_t{1} << 20, DType::kFloat16, 0U}}) {
      to_a_new_device(device);
      const ExchangedStates states = states_of(rows, 128, dtype);
      const Status status = exchange_states(exchange_of(2, states, fault), states, cuda_options());
      ASSERT_TRUE(status.ok()) << status.message;
      const std::vector<Call> launches = runtime().launches();
      ASSERT_EQ(launches.size(), 1U);
      EXPECT_NE(launches[0].kernel.find("exchange_kernel"), std::string_view::npos);
      EXPECT_EQ(launches[0].threads, static_cast<unsigned>(fixup::ExchangeLayout::kBlockWords));
      EXPECT_EQ(launches[0].grid, grid > 0 ? grid : 4U * static_cast<unsigned>(device.multiprocessors));
      EXPECT_EQ(launches[0].dependent, device.major >= 9);
    }
  }
}

TEST(CudaHostExchange, R47_ADecodeStepExchangesInItsOwnLaunchAndOthersAreRefused) {
  to_a_new_device();
  std::uint32_t fault = 0;
  const auto status_of = [&](const Shape& shape, Options options, std::size_t missing_bytes = 0, std::int32_t q_tokens = 1) {
    Exchange exchange{.rank = 1, .ranks = 2, .fault = &fault};
    for (std::uintptr_t rank : {0U, 1U}) exchange.memory[rank] = address(10 + rank);
    Asked asked{"", problem_of(shape), options};
    exchange.memory_bytes = exchange_bytes(2, 1000, shape.head_dim, DType::kBFloat16) - missing_bytes;
    asked.options.exchange = &exchange;
    asked.problem.q_tokens = q_tokens;
    lay_out_outputs(asked.problem);
    return supports(asked.problem, asked.options);
  };
  for (const std::int32_t head_dim : {64, 128}) {
    for (const std::int32_t group : {1, 8, 16}) {
      const Status status = status_of({.batch = 3, .q_heads = 2 * group, .head_dim = head_dim}, cuda_options());
      EXPECT_TRUE(status.ok()) << status.message;
    }
  }
  Options chunks = cuda_options();
  chunks.policy = Policy::fixed_chunk();
  Options passes = cuda_options();
  passes.fixup = Fixup::kTwoKernels;
  const std::tuple<Shape, Options> refused[] = {{{.head_dim = 256}, cuda_options()},
                                                {{.head_dim = 80}, cuda_options()},
                                                {{.q_heads = 64, .head_dim = 128}, cuda_options()},
                                                {{.head_dim = 128, .kv_dtype = DType::kFloat8E4M3}, cuda_options()},
                                                {{.head_dim = 128, .token_major = true}, cuda_options()},
                                                {{.head_dim = 128}, chunks},
                                                {{.head_dim = 128}, passes}};
  const auto expect_refused = [](const Status& status) {
    EXPECT_EQ(status.code, StatusCode::kUnsupported);
    EXPECT_EQ(std::string(status.message).find("options.exchange = 2: "), 0U) << status.message;
  };
  for (const auto& [shape, options] : refused) expect_refused(status_of(shape, options));
  expect_refused(status_of({.head_dim = 128}, cuda_options(), 0, 2));
  const Status small = status_of({.head_dim = 128}, cuda_options(), exchange_bytes(2, 999, 128, DType::kBFloat16));
  EXPECT_EQ(small.code, StatusCode::kWorkspaceTooSmall) << small.message;
}

TEST(CudaHostExchange, R47_LengthsOfAShardAreOneKernelThatMayStartEarly) {
  for (const FakeDevice& device : kDevices) {
    to_a_new_device(device);
    const Status status = shard_lengths(static_cast<const std::int32_t*>(address(1)), static_cast<std::int32_t*>(address(2)), 300,
                                        {.rank = 1, .ranks = 2}, cuda_options());
    ASSERT_TRUE(status.ok()) << status.message;
    const std::vector<Call> launches = runtime().launches();
    ASSERT_EQ(launches.size(), 1U);
    EXPECT_NE(launches[0].kernel.find("shard_lengths_kernel"), std::string_view::npos);
    EXPECT_EQ(launches[0].grid, 3U);
    EXPECT_EQ(launches[0].dependent, device.major >= 9);
  }
}

TEST(CudaHostExchange, R32_AFailedLaunchIsTold) {
  std::uint32_t fault = 0;
  const ExchangedStates states = states_of(10);
  for (int at = 0;; ++at) {
    to_a_new_device();
    runtime().fails_at = at;
    const Status status = exchange_states(exchange_of(2, states, fault), states, cuda_options());
    if (static_cast<int>(runtime().calls.size()) <= at) {
      EXPECT_TRUE(status.ok()) << status.message;
      break;
    }
    EXPECT_NE(std::strstr(status.message, "made to fail"), nullptr) << status.message;
  }
}

TEST(CudaHostExchange, R47_RanksOpenEachOthersMemoryAndGiveItBack) {
  to_a_new_device();
  runtime::device::clear_workspaces();
  const std::size_t bytes = exchange_bytes(2, 100, 128, DType::kFloat32);
  {
    std::vector<std::unique_ptr<PeerMemory>> ranks;
    for (const std::int32_t rank : {0, 1}) {
      ranks.push_back(std::make_unique<PeerMemory>(
          PeerMemory::Asked{.device_index = runtime().ordinal, .rank = rank, .ranks = 2, .bytes = bytes, .limit_ns = 7}));
    }
    ranks[0]->open(1, ranks[1]->handle());
    ranks[1]->open(0, ranks[0]->handle());
    for (const std::int32_t rank : {0, 1}) {
      const Exchange& exchange = ranks[static_cast<std::size_t>(rank)]->exchange();
      EXPECT_EQ(exchange.memory[0], ranks[0]->exchange().memory[0]);
      EXPECT_EQ(exchange.memory[1], ranks[1]->exchange().memory[1]);
      EXPECT_NE(exchange.memory[0], exchange.memory[1]);
      EXPECT_GE(exchange.memory_bytes, bytes);
      EXPECT_EQ(exchange.limit_ns, 7);
      EXPECT_TRUE(exchange_status(exchange).ok());
      *exchange.fault = fixup::fault_word({.fault = fixup::ExchangeFault::kPeerLate, .rank = 1 - rank});
      static_cast<char*>(exchange.memory[rank])[100] = 1;
      const Status late = exchange_status(exchange);
      EXPECT_EQ(late.code, StatusCode::kBackendError);
      EXPECT_EQ(std::string(late.message).find("exchange.rank = " + std::to_string(1 - rank)), 0U) << late.message;
      ranks[static_cast<std::size_t>(rank)]->clear();
      EXPECT_TRUE(exchange_status(exchange).ok());
      EXPECT_EQ(static_cast<char*>(exchange.memory[rank])[100], 0);
    }
    EXPECT_THROW(ranks[0]->open(2, ranks[1]->handle()), Error);
    EXPECT_THROW(PeerMemory(PeerMemory::Asked{.ranks = Exchange::kMaxRanks + 1}), Error);
    EXPECT_EQ(runtime().opened.size(), 2U);
  }
  EXPECT_TRUE(runtime().opened.empty());
  EXPECT_TRUE(runtime().memory.empty());
}

/// A process with a rank on each of two devices, by the C interface, which the C++ one lies under.
class TwoRanks {
 public:
  TwoRanks() {
    to_a_new_device();
    runtime().reaches_peers = true;
    const int first = runtime().ordinal;
    to_a_new_device();
    devices_ = {first, runtime().ordinal};
    for (lean_exchange& exchange : exchanges) lean_exchange_init(&exchange);
  }
  lean_status create(int rank) {
    runtime().ordinal = devices_[static_cast<std::size_t>(rank)];
    return lean_exchange_create(&of(rank), rank, 2, lean_exchange_bytes(2, 10, 128, LEAN_BFLOAT16), nullptr);
  }
  lean_exchange& of(int rank) { return exchanges[static_cast<std::size_t>(rank)]; }
  std::array<lean_exchange, 2> exchanges{};

 private:
  std::array<int, 2> devices_{};
};

TEST(CudaHostExchange, R47_RanksOfOneProcessReachEachOthersDevicesThroughC) {
  TwoRanks ranks;
  ranks.of(0).limit_ns = 5;
  for (const int rank : {0, 1}) ASSERT_EQ(ranks.create(rank).code, LEAN_OK);
  EXPECT_EQ(ranks.of(0).limit_ns, 5);
  EXPECT_EQ(ranks.of(1).limit_ns, 1'000'000'000);
  for (int again = 0; again < 2; ++again) {  // a second exchange finds the access there
    for (const int rank : {0, 1}) ASSERT_EQ(lean_exchange_join(&ranks.of(rank), &ranks.of(1 - rank)).code, LEAN_OK);
    EXPECT_EQ(ranks.of(0).memory[1], ranks.of(1).memory[1]);
    EXPECT_EQ(ranks.of(1).memory[0], ranks.of(0).memory[0]);
    const lean_status twice = lean_exchange_join(&ranks.of(0), &ranks.of(1));
    EXPECT_EQ(std::string(twice.message).find("rank = 1: its memory is there already"), 0U) << twice.message;
    ranks.of(0).memory[1] = ranks.of(1).memory[0] = nullptr;
  }
  EXPECT_EQ(runtime().peers.size(), 2U);
  runtime().reaches_peers = false;
  const lean_status far = lean_exchange_join(&ranks.of(0), &ranks.of(1));
  EXPECT_EQ(far.code, LEAN_UNSUPPORTED) << far.message;
  EXPECT_NE(std::string(far.message).find("does not reach"), std::string::npos) << far.message;
  EXPECT_EQ(lean_exchange_join(&ranks.of(0), &ranks.of(0)).code, LEAN_INVALID_ARGUMENT);
  *ranks.of(0).fault = 1 + (1U << 8);
  EXPECT_EQ(lean_exchange_status(&ranks.of(0)).code, LEAN_BACKEND_ERROR);
  EXPECT_EQ(lean_exchange_clear(&ranks.of(0)).code, LEAN_OK);
  EXPECT_EQ(lean_exchange_status(&ranks.of(0)).code, LEAN_OK);
  const int current = runtime().ordinal;
  for (const int rank : {0, 1}) EXPECT_EQ(lean_exchange_close(&ranks.of(rank)).code, LEAN_OK);
  for (const int rank : {0, 1}) EXPECT_EQ(lean_exchange_close(&ranks.of(rank)).code, LEAN_OK);  // of an empty one: nothing
  EXPECT_EQ(runtime().ordinal, current);
  EXPECT_EQ(ranks.of(0).memory[0], nullptr);
  EXPECT_TRUE(runtime().memory.empty());
  EXPECT_TRUE(runtime().streams.empty());
}

TEST(CudaHostExchange, R32_WhicheverCallFailsTheMemoryOfARankIsTakenWholeOrNotAtAll) {
  TwoRanks ranks;
  int failures = 0;
  for (int at = 0;; ++at) {
    runtime().begin();
    runtime().fails_at = at;
    const lean_status status = ranks.create(0);
    const bool all_called = static_cast<int>(runtime().calls.size()) <= at;
    runtime().begin();
    const bool had = status.code == LEAN_OK;  // also where only going back to the device before has failed
    EXPECT_TRUE(had || std::strstr(status.message, "made to fail") != nullptr) << status.message;
    EXPECT_EQ(ranks.of(0).memory[0] != nullptr, had) << at;
    EXPECT_EQ(runtime().memory.size(), had ? 2U : 0U) << at;
    EXPECT_TRUE(runtime().streams.empty()) << at;
    EXPECT_EQ(lean_exchange_close(&ranks.of(0)).code, LEAN_OK);
    if (all_called) break;
    failures += had ? 0 : 1;
  }
  EXPECT_GE(failures, 9);
  EXPECT_TRUE(runtime().memory.empty());
}

TEST(CudaHostExchange, R32_MemoryThatCannotBeHadOrOpenedLeavesNothingBehind) {
  to_a_new_device();
  runtime::device::clear_workspaces();
  int failures = 0;
  for (int at = 0;; ++at) {
    runtime().begin();
    runtime().fails_at = at;
    bool had = true;
    try {
      PeerMemory memory(PeerMemory::Asked{.device_index = runtime().ordinal, .rank = 0, .ranks = 2, .bytes = 1000});
      memory.open(1, memory.handle());
    } catch (const Error& error) {
      had = false;
      EXPECT_NE(std::string(error.what()).find("made to fail"), std::string::npos) << error.what();
    }
    runtime().fails_at = -1;
    EXPECT_TRUE(runtime().memory.empty()) << at;
    EXPECT_TRUE(runtime().opened.empty()) << at;
    EXPECT_TRUE(runtime().streams.empty()) << at;
    if (static_cast<int>(runtime().calls.size()) <= at) {  // each has failed once; those that give back without a word
      EXPECT_TRUE(had);
      break;
    }
    failures += had ? 0 : 1;
  }
  EXPECT_GE(failures, 9);  // more where the device is asked what it is, which is once
}

}  // namespace
}  // namespace lean::cuda_host
