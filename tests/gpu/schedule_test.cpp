// Worker counts, arrivals and batches of sizes that only a GPU makes practical.
#include <gtest/gtest.h>

#include <utility>

#include "gpu/device_run.hpp"
#include "support/random.hpp"
#include "support/reduced.hpp"
#include "support/tables.hpp"

namespace lean::gpu {
namespace {

using support::full_or_reduced;

/// The answer, and the same bits once more, on as many workers.
void expect_on_workers(Case c, std::int32_t workers, const reference::Answer& answer, const Stream& stream) {
  c.workers = workers;
  DeviceRun call(c);
  const auto bits = call.bits(stream.get());
  ASSERT_TRUE(call.matches(answer)) << "workers " << workers;
  ASSERT_TRUE(call.clean()) << "workers " << workers;
  ASSERT_EQ(call.bits(stream.get()), bits) << "workers " << workers;
}

/// More workers than multiprocessors run one after the other; more than there is work for leave.
TEST(Schedule, R04_EveryWorkerCountToTwiceTheMultiprocessors) {
  const Stream stream;
  for (const Policy& policy : {Policy::lean(), Policy::fixed_split(), Policy::fixed_split(5), Policy::data_parallel()}) {
    const Case c{.q_heads = 6, .lens = {1999, 0, 313, 67, 1}, .k_layout = "bhsd", .policy = policy};
    const reference::Answer answer = reference::decode(support::TestProblem(c).problem(), 8);
    const std::int32_t step = policy.kind == Policy::Kind::kLean ? 1 : 11;
    for (std::int32_t workers = 1; workers <= 2 * multiprocessors(); workers += full_or_reduced(step, 37)) {
      ASSERT_NO_FATAL_FAILURE(expect_on_workers(c, workers, answer, stream));
    }
  }
}

/// Chunks on fewer workers than row blocks, as many and more, which have them whole, in equal parts or cut anywhere
/// (schedule/level_line.hpp): of one sequence, of more than the lanes of a warp, and of more keys than the L2 holds for several row
/// blocks, where rests of two fifths are cut too.
TEST(Schedule, R04_RowBlocksOfChunksOnAnyNumberOfWorkers) {
  const Stream stream;
  Case one{.dtype = DType::kBFloat16, .q_heads = 8, .kv_heads = 2, .head_dim = 128, .lens = {2300}, .n_q = {301}, .causal = true};
  Case many = one;
  many.lens = {900, 1, 0};
  many.lens.resize(40, 300);
  many.n_q = {70};
  Case far = one;
  far.kv_heads = 1;
  far.lens = {66'000};
  far.n_q = {70};
  for (const auto& [c, step] : {std::pair{one, 7}, {many, 37}, {far, 2}}) {
    const reference::Answer answer = reference::decode(support::TestProblem(c).problem(), 8);
    const std::int32_t most = c.lens[0] > 60'000 ? 9 : 2 * multiprocessors();
    for (std::int32_t workers = 1; workers <= most; workers += full_or_reduced(step, 61)) {
      ASSERT_NO_FATAL_FAILURE(expect_on_workers(c, workers, answer, stream));
    }
  }
}

/// Nothing on a GPU checks the arrival protocol, so it is asked very often: every output is shared by two workers or more.
TEST(Schedule, R42_AMillionArrivalsGiveTheSameBits) {
  const Stream stream;
  for (const std::int32_t splits : {2, 3, 40}) {
    Case c{.q_heads = 1, .kv_heads = 1, .head_dim = 8, .policy = Policy::fixed_split(splits), .workers = 0};
    const std::int32_t batch = full_or_reduced(4096, 128) / splits;
    c.lens.assign(static_cast<std::size_t>(batch), splits * 128);  // a LeanTile for every split
    c.k_layout = c.v_layout = "bhsd";
    DeviceRun call(c);
    const auto bits = call.bits(stream.get());
    ASSERT_TRUE(call.matches());
    const int calls = full_or_reduced(1000000 / (batch * splits) + 1, 2);
    for (int repeat = 0; repeat < calls; ++repeat) ASSERT_EQ(call.bits(stream.get()), bits) << splits << " splits, call " << repeat;
    EXPECT_TRUE(call.clean());
  }
}

/// Tiny problems through lean's slots, where hosts and peers of neighbouring outputs meet in one worker.
TEST(Schedule, R42_TinyProblemsAgainAndAgain) {
  const Stream stream;
  Case c{.q_heads = 2, .kv_heads = 1, .head_dim = 8, .lens = {700, 1, 900, 130, 64}, .k_layout = "bhsd", .workers = 23};
  for (const Fixup fixup : support::kFixups) {
    c.fixup = fixup;
    DeviceRun call(c);
    const auto bits = call.bits(stream.get());
    ASSERT_TRUE(call.matches());
    for (int repeat = 0; repeat < full_or_reduced(5000, 20); ++repeat) {
      call.poison_outputs(stream.get());
      for (int depth = 0; depth < 10; ++depth) call.enqueue(stream.get());
      ASSERT_EQ(call.output_bytes(stream.get()), bits) << "call " << repeat;
    }
    EXPECT_TRUE(call.clean());
  }
}

TEST(Schedule, SixtyFiveThousandShortSequences) {
  const Stream stream;
  Case c{.q_heads = 2, .kv_heads = 1, .head_dim = 32, .k_layout = "shd", .workers = 0};
  const std::int64_t batch = full_or_reduced(65536, 1000);
  c.lens.clear();
  for (std::int64_t b = 0; b < batch; ++b) {
    c.lens.push_back(static_cast<std::int32_t>(support::pick(static_cast<std::uint64_t>(b), 24)));
  }
  c.lens[static_cast<std::size_t>(batch / 3)] = 5003;  // one that is not
  c.v_layout = "bhsd";
  const reference::Answer answer = reference::decode(support::TestProblem(c).problem(), 8);
  for (const Policy& policy : {Policy::lean(), Policy::fixed_split(), Policy::data_parallel()}) {
    c.policy = policy;
    DeviceRun call(c);
    EXPECT_FALSE(call.bits(stream.get()).empty());
    EXPECT_TRUE(call.matches(answer));
    EXPECT_TRUE(call.clean());
  }
}

TEST(Schedule, R52_AHundredThousandCallsDoNotGrow) {
  const Stream stream;
  const DeviceRun call({.q_heads = 2, .kv_heads = 1, .head_dim = 64, .lens = {300, 5}, .workers = 4});
  const auto free_bytes = [] {
    std::size_t free = 0;
    std::size_t total = 0;
    demand(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
    return free;
  };
  const auto calls = [&](int count) {
    for (int i = 0; i < count; ++i) {
      call.enqueue(stream.get());
      if (i % 512 == 511) stream.wait();
    }
    stream.wait();
  };
  calls(full_or_reduced(2000, 50));
  const auto bits = call.bits(stream.get());
  const std::size_t before = free_bytes();
  calls(full_or_reduced(100000, 200));
  EXPECT_GE(free_bytes(), before);
  EXPECT_EQ(call.bits(stream.get()), bits);
  EXPECT_TRUE(call.clean());
}

}  // namespace
}  // namespace lean::gpu
