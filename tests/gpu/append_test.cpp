// Tokens that calls append by a kernel ahead of their own, which starts while that one runs: what it writes, and what was written
// for it, is seen. All calls here append; conformance_tests holds them against the oracle.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <functional>

#include "gpu/device_run.hpp"
#include "gpu/test_kernels.hpp"
#include "support/reduced.hpp"
#include "support/tables.hpp"

namespace lean::gpu {
namespace {

using namespace std::chrono_literals;
using support::full_or_reduced;

constexpr int kSteps = 6;

/// Calls by bulk copies, by threads and by tensor copies, with and without a rotary embedding, what no decode step's variant
/// serves, and many outputs, which have two workers on a multiprocessor, end to end and in pages.
std::vector<Case> cases() {
  const Case step{.q_heads = 6,
                  .lens = {37, 600, 1009},
                  .causal = true,
                  .append = true,
                  .rotary_dim = 64,
                  .k_layout = "bhsd",
                  .v_layout = "bhsd",
                  .workers = 0};
  std::vector<Case> all(9, step);
  all[1].rotary_dim = 0;
  all[1].n_q = {3};
  all[2].k_layout = all[2].v_layout = "bshd";
  all[3].page_tokens = 16;
  all[4].page_tokens = 64;
  all[4].rotary_dim = 0;
  support::ask_for_fp8(all[5], support::KvType::kE4M3, support::KvScales::kHead);
  all[6].policy = Policy::fixed_chunk(128);  // workers ask for queries of chunks of old tokens
  all[6].workers = 3;
  all[7].fixup = Fixup::kTwoKernels;
  all[7].softcap = 1.5F;
  all[8].n_q = {33, 1, 3};  // two launches
  all[8].q_layout = "shd";
  Case many = step;
  many.lens = {37, 3, 160};
  all.push_back(of_many_outputs(many, cuda::Scope::kPairedStep));
  many.page_tokens = 16;
  all.push_back(of_many_outputs(many, cuda::Scope::kPairedTensorStep));
  return all;
}

std::int32_t q_tokens_of(const Case& c, std::size_t sequence) { return c.n_q[sequence % c.n_q.size()]; }

std::int32_t total_q_tokens(const Case& c) {
  std::int32_t tokens = 0;
  for (std::size_t b = 0; b < c.lens.size(); ++b) tokens += q_tokens_of(c, b);
  return tokens;
}

/// 32-bit words of q, and of o.
std::int32_t query_words(const Case& c) { return total_q_tokens(c) * c.q_heads * c.head_dim / 2; }

/// Lengths of calls behind each other, each of which appends to what the one before has left; the last ones are the case's.
class GrowingLengths {
 public:
  explicit GrowingLengths(const Case& c)
      : batch_(static_cast<std::int32_t>(c.lens.size())), table_(sizeof(std::int32_t) * c.lens.size() * kSteps) {
    std::vector<std::int32_t> lengths;
    for (std::int32_t step = 0; step < kSteps; ++step) {
      for (std::size_t b = 0; b < c.lens.size(); ++b) {
        lengths.push_back(std::max(q_tokens_of(c, b), c.lens[b] - (kSteps - 1 - step) * q_tokens_of(c, b)));
      }
    }
    table_.copy_from(lengths.data());
  }

  void choose(const DeviceRun& call, const Stream& stream, int step) const {
    copy_ints(stream, call.kv_lengths(), table_.as<std::int32_t>() + step * batch_, batch_);
  }

 private:
  std::int32_t batch_;
  DeviceBuffer table_;
};

/// The outputs of all steps, each by calls that `call_once` puts on the stream; nothing waits in between.
std::vector<std::uint8_t> outputs_of_steps(const DeviceRun& call, const Case& c, const Stream& stream,
                                           const std::function<void()>& call_once) {
  const GrowingLengths lengths(c);
  const std::int32_t words = query_words(c);
  const DeviceBuffer kept(sizeof(std::int32_t) * static_cast<std::size_t>(words) * kSteps);
  call.poison_outputs(stream.get());
  for (int step = 0; step < kSteps; ++step) {
    lengths.choose(call, stream, step);
    call_once();
    copy_ints(stream, kept.as<std::int32_t>() + step * words, static_cast<const std::int32_t*>(call.problem().o.data), words);
  }
  stream.wait();
  std::vector<std::uint8_t> outputs(kept.size_bytes());
  kept.copy_to(outputs.data());
  return outputs;
}

/// The outputs of calls that are alone. Each is made twice: the second finds its tokens in the cache, whatever the first saw of
/// them.
std::vector<std::uint8_t> outputs_of_calls_alone(const DeviceRun& call, const Case& c, const Stream& stream) {
  const GrowingLengths lengths(c);
  const auto bytes = static_cast<std::ptrdiff_t>(sizeof(std::int32_t)) * query_words(c);
  std::vector<std::uint8_t> outputs;
  for (int step = 0; step < kSteps; ++step) {
    lengths.choose(call, stream, step);
    const auto first = call.bits(stream.get());
    const auto second = call.bits(stream.get());
    EXPECT_EQ(first, second) << "step " << step << ", " << support::to_text(c);
    outputs.insert(outputs.end(), second.begin(), second.begin() + bytes);
  }
  return outputs;
}

/// Two at a step, as plain calls and as replays of a graph.
TEST(Append, R46_CallsBehindEachOtherGiveTheBitsOfCallsAlone) {
  const Stream stream;
  for (const Case& c : cases()) {
    const auto alone = outputs_of_calls_alone(DeviceRun(c), c, stream);
    for (unsigned way = 0; way < 8; ++way) {
      const bool dependent = (way & 1U) != 0;
      const bool checked = (way & 2U) != 0;
      const bool captured = (way & 4U) != 0;
      if (dependent && !launches_dependents()) continue;
      for (int round = 0; round < full_or_reduced(10, 1); ++round) {
        DeviceRun call(c);  // whose cache lacks the new tokens
        call.options().dependent_launch = dependent;
        call.options().check_workspace = checked;
        const auto enqueue_twice = [&] {
          call.enqueue(stream.get());
          call.enqueue(stream.get());
        };
        const Graph graph(stream, cudaStreamCaptureModeGlobal, enqueue_twice);
        const auto replay = [&] { graph.launch(stream); };
        ASSERT_EQ(captured ? outputs_of_steps(call, c, stream, replay) : outputs_of_steps(call, c, stream, enqueue_twice), alone)
            << "dependent " << dependent << ", checked " << checked << ", captured " << captured << ", " << support::to_text(c);
        ASSERT_TRUE(call.clean()) << support::to_text(c);
      }
    }
  }
}

/// Host blocks wait for each other, so their launch has no kernel ahead that still runs.
TEST(Append, HostBlocksFollowTheKernelThatAppends) {
  const Stream stream;
  Case c = cases()[0];
  c.fixup = Fixup::kHostBlock;
  const auto alone = outputs_of_calls_alone(DeviceRun(c), c, stream);
  const DeviceRun call(c);
  EXPECT_EQ(outputs_of_steps(call, c, stream, [&] { call.enqueue(stream.get()); }), alone);
  EXPECT_TRUE(call.clean());
}

/// Sequences of the same length, all of whose tokens are new: of few outputs, and of many.
std::vector<Case> cases_of_new_tokens() {
  std::vector<Case> all;
  for (const std::int32_t rotary_dim : {0, 64}) {
    Case c{.q_heads = 6,
           .lens = std::vector<std::int32_t>(5, 7),
           .n_q = {7},
           .causal = true,
           .append = true,
           .rotary_dim = rotary_dim,
           .k_layout = "bhsd",
           .v_layout = "bhsd",
           .workers = 0};
    all.push_back(c);
    c.lens = c.n_q = {2};
    all.push_back(of_many_outputs(c, cuda::Scope::kPairedStep));
  }
  return all;
}

/// Lengths and queries are wrong until the kernel ahead ends, which lets dependents start first. The cache is NaN.
TEST(Append, R46_NothingIsReadBeforeTheKernelAheadEnds) {
  const Stream stream;
  for (const Case& c : cases_of_new_tokens()) {
    const auto batch = static_cast<std::int32_t>(c.lens.size());
    DeviceRun call(c);
    const auto bits = call.bits(stream.get());
    EXPECT_TRUE(call.matches()) << support::to_text(c);
    auto* const queries = static_cast<std::int32_t*>(const_cast<void*>(call.problem().q.data));
    const DeviceBuffer kept_queries(sizeof(std::int32_t) * static_cast<std::size_t>(query_words(c)));
    const DeviceBuffer lengths(sizeof(std::int32_t) * c.lens.size());
    copy_ints(stream, kept_queries.as<std::int32_t>(), queries, query_words(c));
    copy_ints(stream, lengths.as<std::int32_t>(), call.kv_lengths(), batch);
    const std::size_t cache_bytes = static_cast<std::size_t>(bytes_of(c.dtype) * c.lens[0] * batch * c.kv_heads * c.head_dim);
    for (const bool dependent : {false, true}) {
      if (dependent && !launches_dependents()) continue;
      call.options().dependent_launch = dependent;
      for (int round = 0; round < full_or_reduced(200, 5); ++round) {
        const auto spoil = [&](const void* memory, std::size_t size) {
          demand(cudaMemsetAsync(const_cast<void*>(memory), 0xFF, size, stream.get()), "cudaMemsetAsync");
        };
        spoil(queries, kept_queries.size_bytes());
        spoil(call.problem().k.data, cache_bytes);
        spoil(call.problem().v.data, cache_bytes);
        demand(cudaMemsetAsync(call.kv_lengths(), 0, lengths.size_bytes(), stream.get()), "cudaMemsetAsync");
        call.poison_outputs(stream.get());
        copy_ints_late(stream, {call.kv_lengths(), lengths.as<std::int32_t>(), batch},
                       {queries, kept_queries.as<std::int32_t>(), query_words(c)}, 20us);
        call.enqueue(stream.get());
        ASSERT_EQ(call.output_bytes(stream.get()), bits) << "round " << round << ", " << support::to_text(c);
      }
    }
    EXPECT_TRUE(call.clean());
  }
}

/// By the plain kernel: the queries' rows, rotated, lie in the output.
TEST(Append, R23_OutputsBetweenWordsAreServedWithARotaryEmbedding) {
  const DeviceRun call(cases()[0]);
  Problem problem = call.problem();
  problem.o.data = static_cast<std::byte*>(problem.o.data) + 2;
  EXPECT_TRUE(supports(problem, call.options()).ok());
  problem.append.rotary_dim = 0;
  EXPECT_TRUE(supports(problem, call.options()).ok());
}

}  // namespace
}  // namespace lean::gpu
