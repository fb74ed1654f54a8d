// Errors: refused calls and failed ones leave the device usable; errors of others are told as theirs; a dirty state ends.
#include <gtest/gtest.h>

#include <cstring>

#include "fixup/workspace.hpp"
#include "gpu/device_run.hpp"
#include "gpu/test_kernels.hpp"
#include "support/tables.hpp"

namespace lean::gpu {
namespace {

using namespace std::chrono_literals;

const Case kCase{.q_heads = 6, .lens = {1511, 0, 97}, .workers = 7};

TEST(Errors, R30_ARefusedCallWritesNothingAndTheNextOneWorks) {
  const Stream stream;
  DeviceRun call(kCase);
  const auto bits = call.bits(stream.get());
  call.poison_outputs(stream.get());
  const auto poison = call.output_bytes(stream.get());
  Options options = call.options();
  options.stream = stream.get();
  const auto refuse = [&](auto change) {
    Problem problem = call.problem();
    Options changed = options;
    change(problem, changed);
    const Status status = decode(problem, changed, call.workspace());
    EXPECT_FALSE(status.ok());
    EXPECT_NE(std::strstr(status.message, " = "), nullptr) << status.message;
    EXPECT_EQ(call.output_bytes(stream.get()), poison);
  };
  refuse([](Problem& p, Options&) { p.q.dtype = p.k.dtype = p.v.dtype = p.o.dtype = DType::kFloat32; });
  refuse([](Problem& p, Options&) { p.head_dim = kMaxHeadDim + 1; });
  refuse([](Problem& p, Options&) { p.value_dim = kMaxHeadDim + 1; });
  refuse([](Problem& p, Options&) { p.k.data = static_cast<const std::byte*>(p.k.data) + 1; });
  refuse([](Problem& p, Options&) { p.append.k = p.k; });
  refuse([](Problem&, Options& o) { o.workers = 5000; });
  refuse([](Problem&, Options& o) { o.fixup = Fixup::kHostBlock, o.workers = multiprocessors() + 1; });
  EXPECT_EQ(cudaPeekAtLastError(), cudaSuccess);
  EXPECT_EQ(call.bits(stream.get()), bits);
  EXPECT_TRUE(call.clean());
}

TEST(Errors, R16_ABadWorkspaceIsRefusedAndNothingIsWritten) {
  const Stream stream;
  DeviceRun call(kCase);
  call.poison_outputs(stream.get());
  const auto poison = call.output_bytes(stream.get());
  Options options = call.options();
  options.stream = stream.get();
  const auto code_of = [&](auto change) {
    Workspace workspace = call.workspace();
    change(workspace);
    const StatusCode code = decode(call.problem(), options, workspace).code;
    EXPECT_EQ(call.output_bytes(stream.get()), poison);
    return code;
  };
  EXPECT_EQ(code_of([](Workspace& w) { w.state = nullptr; }), StatusCode::kWorkspaceTooSmall);
  EXPECT_EQ(code_of([](Workspace& w) { w.scratch = nullptr; }), StatusCode::kWorkspaceTooSmall);
  EXPECT_EQ(code_of([](Workspace& w) { --w.state_bytes; }), StatusCode::kWorkspaceTooSmall);
  EXPECT_EQ(code_of([](Workspace& w) { --w.scratch_bytes; }), StatusCode::kWorkspaceTooSmall);
  EXPECT_EQ(code_of([](Workspace& w) { w.scratch = static_cast<std::byte*>(w.scratch) + 128; }), StatusCode::kWorkspaceMisaligned);
  EXPECT_EQ(code_of([&](Workspace& w) { w.scratch = call.problem().o.data; }), StatusCode::kInvalidArgument);
  EXPECT_TRUE(call.clean());
}

/// A launch that the runtime refuses is told with its error, and neither the context nor the workspace suffers.
TEST(Errors, R32_AFailedLaunchIsToldAndTheNextOneWorks) {
  const Stream stream;
  DeviceRun call(kCase);
  const auto bits = call.bits(stream.get());
  // The legacy default stream would wait for a stream that is being captured, which is not allowed.
  cudaStream_t captured = nullptr;
  demand(cudaStreamCreate(&captured), "cudaStreamCreate");
  demand(cudaStreamBeginCapture(captured, cudaStreamCaptureModeGlobal), "cudaStreamBeginCapture");
  call.enqueue(captured);
  const Status status = decode(call.problem(), call.options(), call.workspace());
  cudaGraph_t graph = nullptr;
  static_cast<void>(cudaStreamEndCapture(captured, &graph));
  if (graph != nullptr) static_cast<void>(cudaGraphDestroy(graph));
  static_cast<void>(cudaStreamDestroy(captured));
  EXPECT_EQ(status.code, StatusCode::kBackendError);
  EXPECT_NE(std::strstr(status.message, "cuda"), nullptr) << status.message;
  static_cast<void>(cudaGetLastError());
  EXPECT_EQ(call.bits(stream.get()), bits);
  EXPECT_TRUE(call.clean());
}

/// An error that was there before the call is not the call's.
TEST(Errors, R34_AnEarlierErrorOfTheCallerIsNotOurs) {
  const Stream stream;
  const DeviceRun call(kCase);
  const auto bits = call.bits(stream.get());
  EXPECT_NE(cudaSetDevice(1 << 20), cudaSuccess);
  EXPECT_NE(cudaPeekAtLastError(), cudaSuccess);
  EXPECT_EQ(call.bits(stream.get()), bits);
  static_cast<void>(cudaGetLastError());
  EXPECT_TRUE(call.clean());
}

/// After a kernel that trapped every call gives its error: a Status, no crash. In a process of its own.
int exit_after_trap() {
  const Stream stream;
  const DeviceRun call(kCase);
  Options options = call.options();
  options.stream = stream.get();
  trap(stream);
  if (cudaStreamSynchronize(stream.get()) == cudaSuccess) return 2;
  const Status status = decode(call.problem(), options, call.workspace());
  if (status.ok() || status.message[0] == '\0') return 3;
  if (sticky_status(call.workspace(), options).ok()) return 4;
  return 0;
}

TEST(ErrorsDeathTest, R34_AfterATrapEveryCallSaysSo) {
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  EXPECT_EXIT(std::_Exit(exit_after_trap()), testing::ExitedWithCode(0), "");
}

/// What an aborted launch may leave: counters that are not 0. The call ends, whatever it computes, and a reset mends it.
TEST(Errors, R15_ADirtyStateEndsAndAResetMendsIt) {
  const Stream stream;
  for (const Policy& policy : {Policy::lean(), Policy::fixed_split(3)}) {
    for (const std::uint32_t dirt : {1U, 2U, 0xFFFFFFFFU, 0x80000000U}) {
      Case c = kCase;
      c.policy = policy;
      DeviceRun call(c);
      const auto bits = call.bits(stream.get());
      Options options = call.options();
      options.stream = stream.get();
      const Workspace workspace = call.workspace();
      const std::vector<std::uint32_t> words(workspace.state_bytes / 4, dirt);
      demand(cudaMemcpy(workspace.state, words.data(), workspace.state_bytes, cudaMemcpyHostToDevice), "cudaMemcpy");
      demand(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
      call.enqueue(stream.get());
      ASSERT_TRUE(stream.done_within(10s)) << "a dirty state hangs";
      ASSERT_TRUE(reset_workspace(workspace, options).ok());
      stream.wait();
      EXPECT_EQ(call.bits(stream.get()), bits);
      EXPECT_TRUE(call.clean());
    }
  }
}

/// With one worker a call touches no counter, so it may run on a dirty state.
TEST(Errors, R15_ACheckedCallReportsADirtyState) {
  const Stream stream;
  Case c = kCase;
  c.workers = 1;
  DeviceRun call(c);
  call.options().check_workspace = true;
  call.options().stream = stream.get();
  const Workspace workspace = call.workspace();
  const auto bits = call.bits(stream.get());
  ASSERT_TRUE(sticky_status(workspace, call.options()).ok());
  const std::uint32_t one = 1;
  demand(cudaMemcpy(static_cast<std::byte*>(workspace.state) + fixup::kStateHeaderBytes, &one, sizeof(one), cudaMemcpyHostToDevice),
         "cudaMemcpy");
  EXPECT_EQ(call.bits(stream.get()), bits);
  const Status status = sticky_status(workspace, call.options());
  EXPECT_EQ(status.code, StatusCode::kWorkspaceDirty) << status.message;
  EXPECT_NE(std::strstr(status.message, "workspace.state"), nullptr) << status.message;
  ASSERT_TRUE(reset_workspace(workspace, call.options()).ok());
  EXPECT_EQ(call.bits(stream.get()), bits);
  EXPECT_TRUE(sticky_status(workspace, call.options()).ok());
  EXPECT_TRUE(call.clean());
}

}  // namespace
}  // namespace lean::gpu
