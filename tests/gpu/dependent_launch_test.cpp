// Programmatic dependent launch: a call starts while the kernel ahead of it still runs, and reads nothing that one may still write.
#include <gtest/gtest.h>

#include "gpu/device_run.hpp"
#include "gpu/test_kernels.hpp"
#include "support/reduced.hpp"
#include "support/tables.hpp"

namespace lean::gpu {
namespace {

using namespace std::chrono_literals;
using support::full_or_reduced;

constexpr std::int32_t kCapacity = 1009;

/// A decode step by bulk copies, one by threads, one of many sequences, one with a rule of scores, one that no decode step's variant
/// serves, one whose chunk and few rows run side by side, one of a single request, of 16 rows and of more, fixed chunks, and calls of many
/// outputs, which have two workers on a multiprocessor.
std::vector<Case> cases() {
  const Case step{.q_heads = 6,
                  .lens = std::vector<std::int32_t>(5, kCapacity),
                  .q_layout = "bhsd",
                  .k_layout = "bhsd",
                  .v_layout = "bhsd",
                  .workers = 0};
  std::vector<Case> all(6, step);
  all[1].k_layout = all[1].v_layout = "bshd";
  all[2].lens.assign(40, kCapacity);
  all[3].softcap = 1.5F;
  all[4].policy = Policy::fixed_split(5);
  all[4].fixup = Fixup::kTwoKernels;
  all[5].n_q = {1, 200, 2, 1, 1};
  all[5].causal = true;
  all[5].q_layout = all[5].o_layout = all[5].lse_layout = "shd";
  const auto with = [&](const auto& change) {
    all.push_back(step);
    change(all.back());
  };
  with([](Case& c) { c.lens.assign(1, kCapacity); });
  with([](Case& c) { c.q_heads = 32; });
  with([](Case& c) {
    c.q_heads = 32;
    c.k_layout = c.v_layout = "bshd";
  });
  with([](Case& c) {
    c.n_q = {8};
    c.causal = true;
  });
  with([](Case& c) { c.policy = Policy::fixed_chunk(256); });
  Case few_sequences = step;  // of which a lane has one, planned ahead
  few_sequences.q_heads = 24;
  few_sequences.kv_heads = 8;
  few_sequences.lens.assign(20, kCapacity);
  all.push_back(of_many_outputs(few_sequences, cuda::Scope::kPairedStep));
  all.push_back(of_many_outputs(all[0], cuda::Scope::kPairedStep));
  all.push_back(of_many_outputs(all[1], cuda::Scope::kPairedTensorStep));
  return all;
}

/// Lengths and queries are wrong until the kernel ahead ends: it lets the call start, waits, and then writes both. What lengths are until
/// then, which the call may have been planned by, is none at all, others that are alike, and those of the other set.
TEST(DependentLaunch, R46_NothingIsReadBeforeTheKernelAheadEnds) {
  if (!launches_dependents()) GTEST_SKIP() << "needs compute capability 9.0";
  const Stream stream;
  for (const Case& c : cases()) {
    const auto batch = static_cast<std::int32_t>(c.lens.size());
    DeviceRun call(c);
    auto* const queries = static_cast<std::int32_t*>(const_cast<void*>(call.problem().q.data));
    std::int32_t query_tokens = 0;
    for (std::int32_t b = 0; b < batch; ++b) query_tokens += c.n_q[static_cast<std::size_t>(b) % c.n_q.size()];
    const std::int32_t query_words = query_tokens * c.q_heads * c.head_dim / 2;
    const DeviceBuffer kept_queries(sizeof(std::int32_t) * static_cast<std::size_t>(query_words));
    constexpr std::int32_t kSets = 4;  // the last two are never the call's
    const DeviceBuffer lengths(sizeof(std::int32_t) * static_cast<std::size_t>(kSets * batch));
    std::vector<std::int32_t> chosen(static_cast<std::size_t>(kSets * batch), kCapacity);
    for (std::int32_t b = 0; b < batch; ++b) {
      const auto in_set = [&](std::int32_t set) -> std::int32_t& { return chosen[static_cast<std::size_t>(set * batch + b)]; };
      in_set(0) = 1 + 37 * b % kCapacity;
      in_set(2) = 0;
      in_set(3) = kCapacity / 3;
    }
    lengths.copy_from(chosen.data());
    copy_ints(stream, kept_queries.as<std::int32_t>(), queries, query_words);

    call.options().dependent_launch = false;
    std::vector<std::uint8_t> bits[2];
    for (int set = 0; set < 2; ++set) {
      copy_ints(stream, call.kv_lengths(), lengths.as<std::int32_t>() + set * batch, batch);
      bits[set] = call.bits(stream.get());
    }
    EXPECT_TRUE(call.matches()) << support::to_text(c);  // the whole capacity, as in the case
    EXPECT_NE(bits[0], bits[1]);

    call.options().dependent_launch = true;
    for (int round = 0; round < full_or_reduced(200, 6); ++round) {
      const int set = round % 2;
      const int until_then = round / 2 % 3 == 0 ? 1 - set : 1 + round / 2 % 3;
      demand(cudaMemsetAsync(queries, 0xFF, kept_queries.size_bytes(), stream.get()), "cudaMemsetAsync");  // NaN
      copy_ints(stream, call.kv_lengths(), lengths.as<std::int32_t>() + until_then * batch, batch);
      call.poison_outputs(stream.get());
      copy_ints_late(stream, {call.kv_lengths(), lengths.as<std::int32_t>() + set * batch, batch},
                     {queries, kept_queries.as<std::int32_t>(), query_words}, 20us);
      call.enqueue(stream.get());
      ASSERT_EQ(call.output_bytes(stream.get()), bits[set])
          << "round " << round << ", lengths of set " << until_then << " first, " << support::to_text(c);
    }
    EXPECT_TRUE(call.clean());
  }
}

/// Calls that start early, one after the other on one workspace: counters and slots are still the one's ahead.
TEST(DependentLaunch, R46_CallsBehindEachOtherShareAWorkspace) {
  if (!launches_dependents()) GTEST_SKIP() << "needs compute capability 9.0";
  const Stream stream;
  for (const Case& c : cases()) {
    DeviceRun call(c);
    call.options().dependent_launch = false;
    const auto alone = call.bits(stream.get());
    call.options().dependent_launch = true;
    const Graph graph(stream, cudaStreamCaptureModeGlobal, [&] {
      for (int depth = 0; depth < 10; ++depth) call.enqueue(stream.get());
    });
    for (int round = 0; round < full_or_reduced(100, 3); ++round) {
      call.poison_outputs(stream.get());
      for (int depth = 0; depth < 10; ++depth) call.enqueue(stream.get());
      ASSERT_EQ(call.output_bytes(stream.get()), alone) << "round " << round << ", " << support::to_text(c);
      call.poison_outputs(stream.get());
      graph.launch(stream);
      ASSERT_EQ(call.output_bytes(stream.get()), alone) << "replay " << round << ", " << support::to_text(c);
    }
    EXPECT_TRUE(call.clean());
  }
}

/// Layer after layer: a call's queries are the outputs of the one ahead, which hold NaN until its last worker has written them.
TEST(DependentLaunch, R46_QueriesMayBeTheOutputsOfTheCallAhead) {
  if (!launches_dependents()) GTEST_SKIP() << "needs compute capability 9.0";
  const Stream stream;
  for (const Case& c : cases()) {
    DeviceRun ahead(c);
    DeviceRun call(c);
    call.problem().q.data = ahead.problem().o.data;
    call.problem().q.strides = ahead.problem().o.strides;
    ahead.options().dependent_launch = call.options().dependent_launch = false;
    const auto other = ahead.bits(stream.get());
    const auto alone = call.bits(stream.get());
    EXPECT_NE(alone, other);
    ahead.options().dependent_launch = call.options().dependent_launch = true;
    for (int round = 0; round < full_or_reduced(200, 5); ++round) {
      call.poison_outputs(stream.get());
      ahead.poison_outputs(stream.get());
      ahead.enqueue(stream.get());
      call.enqueue(stream.get());
      ASSERT_EQ(call.output_bytes(stream.get()), alone) << "round " << round << ", " << support::to_text(c);
    }
    EXPECT_TRUE(ahead.clean() && call.clean());
  }
}

}  // namespace
}  // namespace lean::gpu
