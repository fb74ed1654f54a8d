// An embedding's device memory on a fake runtime: what it takes it gives back, whichever call fails.
#include <gtest/gtest.h>

#include <cstddef>
#include <string>

#include "cuda_host/fake_runtime.hpp"
#include "integrations/runtime/device.hpp"

namespace lean::cuda_host {
namespace {

using runtime::device::clear_workspaces;
using runtime::device::Error;
using runtime::device::Guard;
using runtime::device::scratch_for;
using runtime::device::workspace_for;

WorkspaceSize bytes(std::size_t state, std::size_t scratch) {
  return {.status = {}, .state_bytes = state, .scratch_bytes = scratch};
}

/// Two devices, the first of them current.
void on_two_devices() {
  clear_workspaces();
  runtime().begin();
  runtime().devices.resize(2);
  runtime().ordinal = 0;
}

TEST(DeviceMemory, R32_AWorkspaceThatCannotBeHadLeavesNothingBehind) {
  on_two_devices();
  const Workspace small = workspace_for(0, nullptr, bytes(100, 1000));
  ASSERT_EQ(runtime().memory.size(), 2U);
  int failures = 0;
  for (int at = 0;; ++at) {
    runtime().begin();
    runtime().fails_at = at;
    const std::size_t held = runtime().memory.size();
    bool had = true;
    try {
      static_cast<void>(workspace_for(0, nullptr, bytes(100, 3000)));
    } catch (const Error& error) {
      had = false;
      EXPECT_NE(std::string(error.what()).find("workspace: cuda"), std::string::npos) << error.what();
      EXPECT_NE(std::string(error.what()).find("made to fail"), std::string::npos) << error.what();
    }
    EXPECT_TRUE(runtime().streams.empty()) << at;
    EXPECT_EQ(runtime().capture_mode, cudaStreamCaptureModeGlobal) << at;
    EXPECT_EQ(runtime().memory.size(), held + (had ? 1 : 0)) << at;
    if (had) break;
    const Workspace still = workspace_for(0, nullptr, bytes(100, 1000));  // the one before is whole
    EXPECT_EQ(still.scratch, small.scratch);
    EXPECT_EQ(still.scratch_bytes, small.scratch_bytes);
    ++failures;
  }
  EXPECT_EQ(failures, 4);
  clear_workspaces();
  EXPECT_TRUE(runtime().memory.empty());
}

TEST(DeviceMemory, R38_MemoryOnceGivenOutStaysUntilItIsCleared) {
  on_two_devices();
  const Workspace first = workspace_for(0, nullptr, bytes(100, 1000));
  const Workspace same = workspace_for(0, nullptr, bytes(50, 1000));
  EXPECT_EQ(same.state, first.state);
  const Workspace grown = workspace_for(0, nullptr, bytes(100, 1001));
  EXPECT_EQ(grown.state, first.state);
  EXPECT_NE(grown.scratch, first.scratch);
  EXPECT_EQ(grown.scratch_bytes, 2000U);
  EXPECT_TRUE(runtime().memory.contains(first.scratch));
  const Workspace other = workspace_for(1, nullptr, bytes(100, 1000));
  EXPECT_NE(other.state, first.state);
  EXPECT_EQ(runtime().memory.size(), 5U);
  clear_workspaces();
  EXPECT_TRUE(runtime().memory.empty());
}

TEST(DeviceMemory, R38_ScratchBesideAWorkspaceIsOtherMemoryOfTheSameStreamAndStaysAsLong) {
  on_two_devices();
  const Workspace workspace = workspace_for(0, nullptr, bytes(100, 1000));
  void* const first = scratch_for(0, nullptr, 1000);
  EXPECT_NE(first, workspace.scratch);
  EXPECT_EQ(scratch_for(0, nullptr, 10), first);
  void* const grown = scratch_for(0, nullptr, 1001);
  EXPECT_NE(grown, first);
  EXPECT_TRUE(runtime().memory.contains(first));
  int stream = 0;
  EXPECT_NE(scratch_for(0, &stream, 10), grown);
  EXPECT_NE(scratch_for(1, nullptr, 10), grown);
  EXPECT_EQ(workspace_for(0, nullptr, bytes(100, 1000)).scratch, workspace.scratch);
  clear_workspaces();
  EXPECT_TRUE(runtime().memory.empty());
}

TEST(DeviceMemory, R47_TheDeviceBeforeIsCurrentAgain) {
  on_two_devices();
  {
    const Guard guard(1);
    EXPECT_EQ(runtime().ordinal, 1);
  }
  EXPECT_EQ(runtime().ordinal, 0);
  for (int at = 0; at < 2; ++at) {
    runtime().begin();
    runtime().fails_at = at;
    EXPECT_THROW(const Guard guard(1), Error) << at;
    EXPECT_EQ(runtime().ordinal, 0) << at;
  }
}

}  // namespace
}  // namespace lean::cuda_host
