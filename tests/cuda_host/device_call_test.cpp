// Where a kernel's parameters lie.
#include "backends/cuda/kernel/device_call.hpp"

#include <gtest/gtest.h>

#include <cstddef>
#include <set>

namespace lean::cuda_host {
namespace {

/// Lines of 64 bytes of a kernel's constants. Its parameters begin at byte 0x210 of them on an H100 and an H200 (cuobjdump --dump-sass).
class Lines {
 public:
  void add(std::size_t begin, std::size_t end) {
    for (std::size_t line = (kFirst + begin) / kBytes; line <= (kFirst + end - 1) / kBytes; ++line) lines_.insert(line);
  }
  [[nodiscard]] std::size_t count() const { return lines_.size(); }

 private:
  static constexpr std::size_t kFirst = 0x210;
  static constexpr std::size_t kBytes = 64;
  std::set<std::size_t> lines_;
};

/// Each line that a decode step's first copy waits for is a trip to the L2 for every CTA.
TEST(CudaHost, ADecodeStepsFirstCopyNeedsSixLinesOfConstants) {
  using Call = cuda::DeviceCall;
  Lines lines;
  const auto add = [&lines](std::size_t first, std::size_t last, std::size_t size) { lines.add(first, last + size); };
  add(offsetof(Call, load), offsetof(Call, load), sizeof(Call::load));
  add(offsetof(Call, problem.q_tokens), offsetof(Call, problem.kv_left_pad), sizeof(Problem::kv_left_pad));
  add(offsetof(Call, problem.append.cached_lengths), offsetof(Call, shape), sizeof(Call::shape));
  add(offsetof(Call, launch), offsetof(Call, plan.queries), sizeof(cuda::PlanArgs::queries));
  EXPECT_LE(lines.count(), 6U);
}

}  // namespace
}  // namespace lean::cuda_host
