#include "gpu/device_run.hpp"

#include <algorithm>

#include "backends/cuda/cuda_backend.hpp"
#include "backends/cuda/kernel_rows.hpp"
#include "backends/reference/error_bound.hpp"
#include "support/run_and_check.hpp"

namespace lean::gpu {
namespace {

Problem copy_to_device(const support::TestProblem& built, std::map<const support::GuardedBuffer*, DeviceBuffer>& copies) {
  return built.placed([&copies](const support::GuardedBuffer& buffer) {
    const auto [place, fresh] = copies.try_emplace(&buffer, buffer.size_bytes());
    if (fresh) place->second.copy_from(buffer.data());
    return place->second.data();
  });
}

/// Two CTAs of a decode step have room on a multiprocessor, each with 64 KB of stages and what it has beside them.
bool holds_pairs() { return launches_dependents() && device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin) >= 200 * 1024; }

}  // namespace

Options options_of(const Case& c, cudaStream_t stream) {
  return {.backend = Backend::kCuda,
          .policy = c.policy,
          .fixup = c.fixup,
          .determinism = c.determinism,
          .workers = c.workers,
          .stream = stream};
}

Case of_many_outputs(Case c, cuda::Scope scope) {
  const std::size_t sequences = c.lens.size();
  while (c.batch() * c.kv_heads * 100 < std::int64_t{cuda::kPairedRule.outputs_percent} * multiprocessors()) {
    c.lens.push_back(c.lens[c.lens.size() - sequences]);
  }
  if (!holds_pairs()) return c;
  const support::TestProblem built(c, support::Contents::kFill);
  cuda::CallPlan plan;
  demand(cuda::decide(built.problem(), options_of(c), plan));
  const cuda::KernelEntry* const kernel = plan.launches[0].kernel;
  EXPECT_TRUE(kernel != nullptr && kernel->config.scope == scope)
      << "served by another kernel than '" << cuda::traits_of(scope).name << "': " << support::to_text(c);
  return c;
}

DeviceRun::DeviceRun(const Case& c)
    : built_(c), problem_(copy_to_device(built_, copies_)), options_(options_of(c)), workspace_(problem_, options_, c.scratch) {
  demand(workspace_.status());
  demand(cudaDeviceSynchronize(), "cudaDeviceSynchronize");  // the tests' streams do not wait for these copies
}

void DeviceRun::poison_outputs(cudaStream_t stream) const {
  for (const support::GuardedBuffer* output : {&built_.o_buffer(), &built_.lse_buffer()}) {
    const auto copy = copies_.find(output);
    if (copy == copies_.end() || copy->second.size_bytes() == 0) continue;
    demand(cudaMemsetAsync(copy->second.data(), static_cast<int>(support::kPoison), copy->second.size_bytes(), stream),
           "cudaMemsetAsync");
  }
}

void DeviceRun::enqueue(cudaStream_t stream) const {
  Options options = options_;
  options.stream = stream;
  demand(decode(problem_, options, workspace_.get()));
}

std::vector<std::uint8_t> DeviceRun::output_bytes(cudaStream_t stream) const {
  std::vector<std::uint8_t> bytes;
  for (const support::GuardedBuffer* output : {&built_.o_buffer(), &built_.lse_buffer()}) {
    const auto copy = copies_.find(output);
    if (copy == copies_.end() || copy->second.size_bytes() == 0) continue;
    const std::size_t begin = bytes.size();
    bytes.resize(begin + copy->second.size_bytes());
    demand(cudaMemcpyAsync(bytes.data() + begin, copy->second.data(), copy->second.size_bytes(), cudaMemcpyDeviceToHost, stream),
           "cudaMemcpyAsync");
  }
  demand(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  return bytes;
}

std::vector<std::uint8_t> DeviceRun::bits(cudaStream_t stream) const {
  poison_outputs(stream);
  enqueue(stream);
  return output_bytes(stream);
}

testing::AssertionResult DeviceRun::matches() { return matches(reference::decode(built_.problem(), 8)); }

testing::AssertionResult DeviceRun::matches(const reference::Answer& answer) {
  demand(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  std::vector<const support::GuardedBuffer*> written{&built_.o_buffer(), &built_.lse_buffer()};
  if (built_.description().append) written.insert(written.end(), {&built_.k_buffer(), &built_.v_buffer()});
  for (const support::GuardedBuffer* output : written) {
    const auto copy = copies_.find(output);
    if (copy != copies_.end()) copy->second.copy_to(output->data());
  }
  const std::string repeat = "repeat: " + support::reproducer(built_.description()) + "\n  ";
  if (const std::string faults = built_.memory_faults(); !faults.empty()) return testing::AssertionFailure() << repeat << faults;
  const reference::Rounding rounding = support::rounding_of(built_.problem(), options_);
  const reference::ErrorReport report = reference::compare(built_.problem(), answer, rounding);
  if (!report.passes()) return testing::AssertionFailure() << repeat << reference::describe(report);
  return testing::AssertionSuccess();
}

testing::AssertionResult DeviceRun::clean() const {
  demand(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  if (!workspace_.intact()) return testing::AssertionFailure() << "memory beside the workspace was written";
  const auto state = workspace_.state().contents();
  if (std::any_of(state.begin(), state.end(), [](std::byte b) { return b != std::byte{0}; })) {
    return testing::AssertionFailure() << "the state is not all zero";
  }
  return testing::AssertionSuccess();
}

}  // namespace lean::gpu
