// CUDA graphs: captured once, replayed while lengths change on the device, two alive at a time; what a call enqueues.
#include <gtest/gtest.h>

#include "backends/reference/load.hpp"
#include "gpu/device_run.hpp"
#include "gpu/test_kernels.hpp"
#include "support/random.hpp"
#include "support/reduced.hpp"
#include "support/tables.hpp"

namespace lean::gpu {
namespace {

using support::full_or_reduced;

constexpr std::int32_t kCapacity = 1009;
constexpr std::int32_t kBatch = 5;

/// Keys and values exist up to the capacity; how many count is up to the lengths.
Case full_case() {
  return {.q_heads = 6,
          .lens = std::vector<std::int32_t>(kBatch, kCapacity),
          .n_q = {2},
          .causal = true,
          .k_layout = "bhsd",
          .v_layout = "bhsd",
          .workers = 0};
}

/// Lengths that a server might see one after the other, with the answers and bits of plain calls.
class LengthSets {
 public:
  LengthSets(DeviceRun& call, const Stream& stream)
      : batch_(static_cast<std::int32_t>(call.problem().batch)),
        table_(sizeof(std::int32_t) * static_cast<std::size_t>(batch_ * kSets)) {
    support::Stream random(38);
    for (int set = 0; set < kSets; ++set) {
      for (int b = 0; b < batch_; ++b) lengths_.push_back(length_of(set, b, random));
    }
    table_.copy_from(lengths_.data());
    for (int set = 0; set < kSets; ++set) {
      for (int b = 0; b < batch_; ++b) call.built().kv_lengths()[b] = lengths_[static_cast<std::size_t>(set * batch_ + b)];
      call.built().remember();
      choose(call, stream, set);
      bits_.push_back(call.bits(stream.get()));
      EXPECT_TRUE(call.matches()) << "lengths " << set;
    }
  }

  static constexpr int kSets = 12;
  /// The device's lengths become those of a set.
  void choose(const DeviceRun& call, const Stream& stream, int set) const {
    copy_ints(stream, call.kv_lengths(), table_.as<std::int32_t>() + set * batch_, batch_);
  }
  [[nodiscard]] const std::vector<std::uint8_t>& bits(int set) const { return bits_[static_cast<std::size_t>(set)]; }

 private:
  /// No keys, all there are, a long sequence among empty ones and those of a token or two, or whatever is drawn.
  [[nodiscard]] std::int32_t length_of(int set, std::int32_t sequence, support::Stream& random) const {
    switch (set) {
      case 1: return 0;
      case 2: return kCapacity;
      case 3: return sequence == batch_ / 2 ? kCapacity : sequence % 3;
      default: return static_cast<std::int32_t>(random.between(0, set % 3 == 0 ? kCapacity : 130));
    }
  }

  std::int32_t batch_;
  std::vector<std::int32_t> lengths_;
  DeviceBuffer table_;
  std::vector<std::vector<std::uint8_t>> bits_;
};

void expect_replays_match(const Case& c, int replays) {
  const Stream stream;
  DeviceRun call(c);
  const LengthSets sets(call, stream);
  const Graph graph(stream, cudaStreamCaptureModeGlobal, [&] { call.enqueue(stream.get()); });
  for (int replay = 0; replay < replays; ++replay) {
    const int set = static_cast<int>(support::pick(static_cast<std::uint64_t>(replay), LengthSets::kSets));
    sets.choose(call, stream, set);
    call.poison_outputs(stream.get());
    graph.launch(stream);
    ASSERT_EQ(call.output_bytes(stream.get()), sets.bits(set)) << "replay " << replay << ", " << support::to_text(c);
    ASSERT_TRUE(call.clean()) << "replay " << replay << ", " << support::to_text(c);
  }
}

TEST(Graph, R38_AThousandReplaysWithLengthsThatChange) { expect_replays_match(full_case(), full_or_reduced(1000, 20)); }

TEST(Graph, R38_EveryPolicyAndFixupReplays) {
  for (const Policy& policy : support::all_policies()) {
    for (const Fixup fixup : support::kFixups) {
      if (!support::pairs(policy, fixup)) continue;
      for (const std::int32_t workers : {7, 0}) {
        Case c = full_case();
        c.policy = policy;
        c.fixup = fixup;
        c.workers = workers;
        expect_replays_match(c, full_or_reduced(50, 3));
        if (HasFailure()) return;
      }
    }
  }
}

/// Two workers on a multiprocessor, by bulk copies and by tensor copies.
TEST(Graph, R38_CallsOfManyOutputsReplay) {
  const Case by_runs = full_case();
  Case by_boxes = by_runs;
  by_boxes.k_layout = by_boxes.v_layout = "bshd";
  for (const Case& c :
       {of_many_outputs(by_runs, cuda::Scope::kPairedStep), of_many_outputs(by_boxes, cuda::Scope::kPairedTensorStep)}) {
    expect_replays_match(c, full_or_reduced(100, 5));
  }
}

/// The kernel that serves what no variant does: dims of any number, in pages of any size, and lengths that change.
TEST(Graph, R38_ThePlainKernelReplays) {
  for (const std::int32_t page_tokens : {0, 7}) {
    Case c = full_case();
    c.head_dim = 59;
    c.page_tokens = page_tokens;
    expect_replays_match(c, full_or_reduced(100, 5));
  }
}

TEST(Graph, R38_TwoGraphsAlive) {
  Case other = full_case();
  other.dtype = DType::kFloat16;
  other.head_dim = 128;
  other.n_q = {1};
  other.workers = 33;
  const Stream streams[2];
  DeviceRun calls[2] = {DeviceRun(full_case()), DeviceRun(other)};
  const LengthSets sets[2] = {{calls[0], streams[0]}, {calls[1], streams[1]}};
  const Graph first(streams[0], cudaStreamCaptureModeGlobal, [&] { calls[0].enqueue(streams[0].get()); });
  const Graph second(streams[1], cudaStreamCaptureModeGlobal, [&] { calls[1].enqueue(streams[1].get()); });
  for (int replay = 0; replay < full_or_reduced(500, 10); ++replay) {
    int chosen[2];
    for (int i = 0; i < 2; ++i) {  // both in flight
      chosen[i] = static_cast<int>(support::pick(static_cast<std::uint64_t>(2 * replay + i), LengthSets::kSets));
      sets[i].choose(calls[i], streams[i], chosen[i]);
      calls[i].poison_outputs(streams[i].get());
      (i == 0 ? first : second).launch(streams[i]);
    }
    for (int i = 0; i < 2; ++i) {
      ASSERT_EQ(calls[i].output_bytes(streams[i].get()), sets[i].bits(chosen[i])) << "graph " << i << ", replay " << replay;
      ASSERT_TRUE(calls[i].clean()) << "graph " << i << ", replay " << replay;
    }
  }
}

/// A server's loop: every replay appends one token, and the next ones attend to it.
TEST(Graph, R38_ReplaysAppendTokenAfterToken) {
  const int replays = full_or_reduced(300, 20);
  const std::vector<std::int32_t> first = {37, 600, 1};  // tokens after the first replay
  std::vector<std::int32_t> last;                        // and after the last one: so many have pages
  for (const std::int32_t length : first) last.push_back(length + replays - 1);
  for (const std::int32_t page_tokens : {0, 16}) {
    Case c{.q_heads = 6, .lens = last, .page_tokens = page_tokens, .capacity = kCapacity, .append = true, .workers = 0};
    const Stream stream;
    DeviceRun call(c);
    support::TestProblem& built = call.built();
    const Append& append = built.problem().append;
    const auto batch = static_cast<std::int32_t>(c.lens.size());
    std::vector<std::int32_t> lengths;
    for (int replay = 0; replay < replays; ++replay) {
      for (const std::int32_t length : first) lengths.push_back(length + replay);
    }
    DeviceBuffer table(lengths.size() * sizeof(std::int32_t));
    table.copy_from(lengths.data());
    const Graph graph(stream, cudaStreamCaptureModeGlobal, [&] { call.enqueue(stream.get()); });
    for (int replay = 0; replay < replays; ++replay) {
      copy_ints(stream, call.kv_lengths(), table.as<std::int32_t>() + replay * batch, batch);
      call.poison_outputs(stream.get());
      graph.launch(stream);
    }
    ASSERT_TRUE(call.clean());
    const auto appended = [](const TensorView& view, std::int64_t sequence, std::int32_t head, std::int32_t i) {
      const Strides& s = view.strides;
      return reference::load_element(view.data, view.dtype, sequence * s.sequence + head * s.head + i * s.dim);
    };
    for (std::int32_t b = 0; b < batch; ++b) {  // what the oracle finds in the cache before the last replay
      for (std::int32_t head = 0; head < c.kv_heads; ++head) {
        for (std::int64_t t = first[static_cast<std::size_t>(b)] - 1; t < last[static_cast<std::size_t>(b)] - 1; ++t) {
          for (std::int32_t i = 0; i < c.head_dim; ++i) {
            built.set_k({b, head, t, i}, appended(append.k, b, head, i));
            built.set_v({b, head, t, i}, appended(append.v, b, head, i));
          }
        }
      }
    }
    built.remember();
    EXPECT_TRUE(call.matches());
  }
}

TEST(Graph, R39_EveryCaptureModeTakesACall) {
  const Stream stream;
  DeviceRun call(full_case());
  const auto bits = call.bits(stream.get());
  for (const auto mode : {cudaStreamCaptureModeGlobal, cudaStreamCaptureModeThreadLocal, cudaStreamCaptureModeRelaxed}) {
    const Graph graph(stream, mode, [&] { call.enqueue(stream.get()); });
    call.poison_outputs(stream.get());
    graph.launch(stream);
    EXPECT_EQ(call.output_bytes(stream.get()), bits) << "mode " << mode;
  }
}

/// The graph of a call shows all it enqueues.
TEST(Graph, R01_ACallIsOneLaunchAndAnEmptyBatchNone) {
  const Stream stream;
  const auto nodes_of = [&stream](const DeviceRun& call) {
    return Graph(stream, cudaStreamCaptureModeGlobal, [&] { call.enqueue(stream.get()); }).nodes();
  };
  Case c = full_case();
  for (const Policy& policy : support::all_policies()) {
    c.policy = policy;
    c.fixup = Fixup::kLastArriver;
    EXPECT_EQ(nodes_of(DeviceRun(c)), 1U);
    c.fixup = Fixup::kTwoKernels;
    EXPECT_EQ(nodes_of(DeviceRun(c)), 2U);
  }
  c.policy = {};
  c.fixup = Fixup::kHostBlock;
  EXPECT_EQ(nodes_of(DeviceRun(c)), 1U);
  c.append = true;  // by a kernel ahead
  EXPECT_EQ(nodes_of(DeviceRun(c)), 2U);
  DeviceRun empty(full_case());
  const auto before = empty.output_bytes(stream.get());
  empty.problem().batch = 0;
  EXPECT_EQ(nodes_of(empty), 0U);
  EXPECT_EQ(empty.output_bytes(stream.get()), before);
}

}  // namespace
}  // namespace lean::gpu
