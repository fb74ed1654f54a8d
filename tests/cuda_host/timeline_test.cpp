// What a launch is handed of a timeline's memory: compiled with LEAN_TIMELINE, beside a launch.cpp that is. No kernel runs.
#include <gtest/gtest.h>

#include <vector>

#include "cuda_host/calls.hpp"
#include "cuda_host/fake_runtime.hpp"
#include "timeline/hook.hpp"

namespace lean::cuda_host {
namespace {

static_assert(timeline::kBuilt);

std::vector<Call> launches_of(const Options& options) {
  to_a_new_device();
  const Asked asked{"a decode step", problem_of({}), options};
  const Workspace workspace = workspace_for(asked);
  runtime().begin();
  const Status status = decode(asked.problem, asked.options, workspace);
  EXPECT_TRUE(status.ok()) << status.message;
  return runtime().launches();
}

TEST(CudaHostTimeline, EveryLaunchIsHandedTheMemoryThatIsInstalledAndItsSize) {
  const timeline::Target target{.tracks = static_cast<timeline::Track*>(address(9)),
                                .events = static_cast<timeline::Event*>(address(10)),
                                .workers = 132,
                                .capacity = timeline::events_of_segments(3)};
  for (const Fixup fixup : {Fixup::kLastArriver, Fixup::kTwoKernels, Fixup::kHostBlock}) {
    Options options = cuda_options();
    options.fixup = fixup;
    {
      const timeline::Installed installed(target);
      const std::vector<Call> launches = launches_of(options);
      ASSERT_EQ(launches.size(), fixup == Fixup::kTwoKernels ? 2U : 1U);
      for (const Call& launch : launches) {
        EXPECT_TRUE(launch.decodes());
        EXPECT_EQ(launch.timeline, target);
        EXPECT_LE(static_cast<std::int32_t>(launch.grid), launch.timeline.workers);
      }
    }
    for (const Call& launch : launches_of(options)) EXPECT_EQ(launch.timeline, timeline::Target{});
  }
}

}  // namespace
}  // namespace lean::cuda_host
