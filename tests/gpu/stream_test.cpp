// Calls beside each other and beside other work: several in flight, first calls that race, multiprocessors that are taken,
// memory that is busy. The bits are those of a call that is alone.
#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <memory>
#include <thread>

#include "gpu/device_run.hpp"
#include "gpu/test_kernels.hpp"
#include "support/random.hpp"
#include "support/reduced.hpp"
#include "support/tables.hpp"

namespace lean::gpu {
namespace {

using namespace std::chrono_literals;
using support::full_or_reduced;

Case ragged_case(std::uint64_t seed = 1) {
  return {
      .q_heads = 6, .lens = {3001, 0, 613, 67, 1}, .k_layout = "bhsd", .input = support::Input::kPeaks, .seed = seed, .workers = 0};
}

/// The same of many outputs, by bulk copies and by tensor copies: two workers on a multiprocessor.
std::vector<Case> cases_of_many_outputs() {
  Case by_runs = ragged_case(1);
  by_runs.v_layout = "bhsd";
  return {of_many_outputs(by_runs, cuda::Scope::kPairedStep), of_many_outputs(ragged_case(2), cuda::Scope::kPairedTensorStep)};
}

TEST(Streams, R35_EightStreamsGetTheSerialBits) {
  constexpr int kStreams = 8;
  const Stream streams[kStreams];
  std::vector<std::unique_ptr<DeviceRun>> calls;
  std::vector<std::vector<std::uint8_t>> alone;
  for (int i = 0; i < kStreams; ++i) {
    Case c = ragged_case(static_cast<std::uint64_t>(i + 1));
    c.head_dim = i % 2 == 0 ? 64 : 128;
    c.workers = i % 3 == 0 ? 0 : 17 * i;
    calls.push_back(std::make_unique<DeviceRun>(c));
    alone.push_back(calls.back()->bits(streams[i].get()));
    EXPECT_TRUE(calls.back()->matches());
  }
  for (int round = 0; round < full_or_reduced(200, 5); ++round) {
    for (int i = 0; i < kStreams; ++i) {
      calls[static_cast<std::size_t>(i)]->poison_outputs(streams[i].get());
      calls[static_cast<std::size_t>(i)]->enqueue(streams[i].get());
    }
    for (int i = 0; i < kStreams; ++i) {
      const auto at = static_cast<std::size_t>(i);
      ASSERT_EQ(calls[at]->output_bytes(streams[i].get()), alone[at]) << "stream " << i << ", round " << round;
    }
  }
  for (const auto& call : calls) EXPECT_TRUE(call->clean());
}

/// Two calls on the same inputs and outputs' shapes, each with its own state and scratch, many deep on two streams.
void expect_bits_in_flight(const Case& first, const Case& second) {
  const Stream streams[2];
  DeviceRun calls[2] = {DeviceRun(first), DeviceRun(second)};
  const std::vector<std::uint8_t> alone[2] = {calls[0].bits(streams[0].get()), calls[1].bits(streams[1].get())};
  EXPECT_NE(alone[0], alone[1]);
  for (int round = 0; round < full_or_reduced(50, 3); ++round) {
    for (int depth = 0; depth < 20; ++depth) {
      for (int i = 0; i < 2; ++i) calls[i].enqueue(streams[i].get());
    }
    for (int i = 0; i < 2; ++i) ASSERT_EQ(calls[i].output_bytes(streams[i].get()), alone[i]) << "round " << round;
  }
  for (const DeviceRun& call : calls) EXPECT_TRUE(call.clean());
}

/// Of many outputs too, where a multiprocessor may have a worker of either call.
TEST(Streams, R35_TwoWorkspacesInFlight) {
  expect_bits_in_flight(ragged_case(1), ragged_case(2));
  const std::vector<Case> many = cases_of_many_outputs();
  expect_bits_in_flight(many[0], many[1]);
}

/// One worker touches no counter, so two calls may share a state here without harm; that they do is told.
TEST(Streams, R36_ACheckedCallReportsAWorkspaceInUse) {
  const Stream streams[2];
  DeviceRun slow({.q_heads = 1, .kv_heads = 1, .lens = {400'000}, .workers = 1});  // milliseconds
  DeviceRun quick({.q_heads = 1, .kv_heads = 1, .lens = {37}, .workers = 1});
  slow.options().check_workspace = quick.options().check_workspace = true;
  const auto slow_bits = slow.bits(streams[0].get());
  const auto quick_bits = quick.bits(streams[1].get());
  Options options = quick.options();
  const Workspace shared = slow.workspace();
  const auto share_on = [&](const Stream& stream) {
    slow.enqueue(streams[0].get());
    options.stream = stream.get();
    demand(decode(quick.problem(), options, shared));
    streams[0].wait();
    return sticky_status(shared, options);
  };
  EXPECT_TRUE(share_on(streams[0]).ok()) << "one after the other";
  const Status status = share_on(streams[1]);
  EXPECT_EQ(status.code, StatusCode::kWorkspaceInUse) << status.message;
  EXPECT_NE(std::strstr(status.message, "workspace.state"), nullptr) << status.message;
  ASSERT_TRUE(reset_workspace(shared, options).ok());
  EXPECT_TRUE(share_on(streams[0]).ok()) << "after a reset";
  EXPECT_EQ(slow.output_bytes(streams[0].get()), slow_bits);
  EXPECT_EQ(quick.output_bytes(streams[1].get()), quick_bits);
  EXPECT_TRUE(slow.clean());
}

/// Alone in its process under tools/gpu_test.py, these are the first calls.
TEST(Streams, R37_FirstCallsOfEightThreadsMayRace) {
  constexpr int kThreads = 8;
  std::atomic<int> ready{0};
  std::atomic<int> faults{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&, i] {
      try {
        const Stream stream;
        Case c = ragged_case(static_cast<std::uint64_t>(i + 1));
        c.workers = 5 + i;  // asks the device only in decode()
        DeviceRun call(c);
        ++ready;
        while (ready < kThreads) std::this_thread::yield();
        const auto first = call.bits(stream.get());
        for (int repeat = 0; repeat < 20; ++repeat) faults += call.bits(stream.get()) == first ? 0 : 1;
        faults += call.matches() ? 0 : 1;
      } catch (const std::exception& fault) {
        ADD_FAILURE() << fault.what();
        ++ready;
        ++faults;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(faults, 0);
}

TEST(Streams, R43_RunToRunBitsUnderLoad) {
  const Stream stream;
  const Stream busy;
  const Signals signals;
  const DeviceBuffer memory(std::size_t{1} << 30);
  for (const Policy& policy : {Policy::lean(), Policy::fixed_split(5)}) {
    Case c = ragged_case();
    c.policy = policy;
    const DeviceRun call(c);
    const auto alone = call.bits(stream.get());
    hog_bandwidth(busy, memory, signals, 35s);
    const auto end = std::chrono::steady_clock::now() + 30s;  // a call waits long for its turn beside the load
    int loaded = 0;
    for (; loaded < full_or_reduced(500, 10) && std::chrono::steady_clock::now() < end; ++loaded) {
      ASSERT_EQ(call.bits(stream.get()), alone) << "call " << loaded;
    }
    EXPECT_FALSE(busy.done()) << "the load ended before the calls did";
    EXPECT_GE(loaded, full_or_reduced(100, 10));
    EXPECT_TRUE(call.clean());
    signals.stop();
    busy.wait();
    signals.reset();
  }
}

/// Holds some multiprocessors while it lives.
class Taken {
 public:
  Taken(std::int32_t count, std::chrono::milliseconds limit) {
    occupy(stream_, count, signals_, limit);
    const auto end = std::chrono::steady_clock::now() + 5s;
    while (signals_.started() < static_cast<std::uint32_t>(count) && std::chrono::steady_clock::now() < end) {
      std::this_thread::sleep_for(100us);
    }
    EXPECT_EQ(signals_.started(), static_cast<std::uint32_t>(count)) << "multiprocessors were not free to take";
  }
  ~Taken() { release(); }
  Taken(const Taken&) = delete;
  Taken& operator=(const Taken&) = delete;

  [[nodiscard]] bool holds() const { return !stream_.done(); }
  void release() const {
    signals_.stop();
    static_cast<void>(cudaStreamSynchronize(stream_.get()));
  }

 private:
  Stream stream_;
  Signals signals_;
};

TEST(Streams, R40_EndsOnTheMultiprocessorsThatAreLeft) {
  const Stream stream;
  std::vector<Case> cases = cases_of_many_outputs();
  for (const Fixup fixup : {Fixup::kLastArriver, Fixup::kTwoKernels}) {
    for (const Policy& policy : {Policy::lean(), Policy::fixed_split(7), Policy::data_parallel()}) {
      cases.push_back(ragged_case());
      cases.back().policy = policy;
      cases.back().fixup = fixup;
    }
  }
  for (const Case& c : cases) {
    const DeviceRun call(c);
    const auto alone = call.bits(stream.get());
    for (const std::int32_t left : {1, 3, 64}) {
      if (left >= multiprocessors()) continue;
      const Taken taken(multiprocessors() - left, 20s);
      call.poison_outputs(stream.get());
      call.enqueue(stream.get());
      const bool ended = stream.done_within(10s);
      EXPECT_TRUE(ended && taken.holds()) << left << " multiprocessors left, " << support::to_text(c);
      taken.release();
      EXPECT_EQ(call.output_bytes(stream.get()), alone) << left << " multiprocessors left";
      EXPECT_TRUE(call.clean());
    }
  }
}

TEST(Streams, R40_WithNothingLeftItWaitsAndThenEnds) {
  const Stream stream;
  const DeviceRun call(ragged_case());
  const auto alone = call.bits(stream.get());
  const Taken taken(multiprocessors(), 20s);
  call.poison_outputs(stream.get());
  call.enqueue(stream.get());
  EXPECT_FALSE(stream.done_within(50ms));
  taken.release();
  EXPECT_TRUE(stream.done_within(10s));
  EXPECT_EQ(call.output_bytes(stream.get()), alone);
  EXPECT_TRUE(call.clean());
}

/// A cooperative launch starts when all its workers can: the host never waits for one that cannot come.
TEST(Streams, R40_HostBlockWaitsForAllItsMultiprocessors) {
  const Stream stream;
  Case c = ragged_case();
  c.fixup = Fixup::kHostBlock;
  DeviceRun call(c);
  const auto alone = call.bits(stream.get());
  EXPECT_TRUE(call.matches());
  for (const std::int32_t left : {1, 64}) {
    if (left >= multiprocessors()) continue;
    const Taken taken(multiprocessors() - left, 5s);
    call.poison_outputs(stream.get());
    call.enqueue(stream.get());
    std::this_thread::sleep_for(50ms);
    taken.release();
    EXPECT_TRUE(stream.done_within(10s));
    EXPECT_EQ(call.output_bytes(stream.get()), alone);
    EXPECT_TRUE(call.clean());
  }
}

TEST(Streams, R45_HostBlockWithMoreWorkersThanMultiprocessorsIsRefused) {
  Case c = ragged_case();
  const DeviceRun call(c);
  Options options = call.options();
  options.fixup = Fixup::kHostBlock;
  options.workers = multiprocessors();
  EXPECT_TRUE(supports(call.problem(), options).ok());
  options.workers = multiprocessors() + 1;
  const Status status = supports(call.problem(), options);
  EXPECT_EQ(status.code, StatusCode::kUnsupported);
  EXPECT_NE(std::strstr(status.message, "options.workers"), nullptr) << status.message;
}

/// Which CTAs start first, and how many at a time, is drawn anew for every call.
TEST(Streams, R41_OrderOfAdmissionChangesNoBit) {
  const Stream stream;
  const DeviceRun call(ragged_case());
  const auto alone = call.bits(stream.get());
  support::Stream random(41);
  for (int repeat = 0; repeat < full_or_reduced(200, 5); ++repeat) {
    const Taken taken(static_cast<std::int32_t>(random.between(1, multiprocessors() - 1)),
                      std::chrono::milliseconds(random.between(1, 3)));  // may end while the call runs
    call.poison_outputs(stream.get());
    call.enqueue(stream.get());
    ASSERT_TRUE(stream.done_within(10s));
    ASSERT_EQ(call.output_bytes(stream.get()), alone) << "call " << repeat;
  }
  EXPECT_TRUE(call.clean());
}

TEST(Streams, R47_TheCurrentDeviceIsTheOneThatComputes) {
  int devices = 0;
  demand(cudaGetDeviceCount(&devices), "cudaGetDeviceCount");
  if (devices < 2) GTEST_SKIP() << "one device";
  for (int device = devices - 1; device >= 0; --device) {
    demand(cudaSetDevice(device), "cudaSetDevice");
    const Stream stream;
    DeviceRun call(ragged_case());
    EXPECT_FALSE(call.bits(stream.get()).empty());
    EXPECT_TRUE(call.matches()) << "device " << device;
    int current = -1;
    demand(cudaGetDevice(&current), "cudaGetDevice");
    EXPECT_EQ(current, device);
  }
}

}  // namespace
}  // namespace lean::gpu
