// Lengths that another thread writes while a call runs: the result is that of some lengths, and nothing is read or written
// outside the tensors, whatever the lengths are in between.
#include <gtest/gtest.h>

#include <atomic>
#include <limits>
#include <thread>
#include <vector>

#include "support/random.hpp"
#include "support/reduced.hpp"
#include "support/run_and_check.hpp"
#include "support/tables.hpp"

namespace lean::support {
namespace {

/// Copies of length arrays; a thread writes nonsense into them and takes it back, all the time.
class Scribbler {
 public:
  Scribbler() = default;
  Scribbler(const Scribbler&) = delete;
  Scribbler& operator=(const Scribbler&) = delete;
  ~Scribbler() {
    stop_ = true;
    if (thread_.joinable()) thread_.join();
  }

  /// Puts a copy in the place of an array of the problem; `kept`: entries at its end that stay as they are.
  void take(const std::int32_t*& array, std::int64_t count, std::int64_t kept = 0) {
    if (array == nullptr) return;
    copies_.push_back({std::vector<std::int32_t>(array, array + count), std::vector<std::int32_t>(array, array + count), kept});
    array = copies_.back().changing.data();
  }
  void start() {
    thread_ = std::thread([this] { scribble(); });
  }

 private:
  struct Copy {
    std::vector<std::int32_t> right;
    std::vector<std::int32_t> changing;
    std::int64_t kept;
  };

  void scribble() {
    Stream random(71);
    while (!stop_) {
      Copy& copy = copies_[static_cast<std::size_t>(random.between(0, static_cast<std::int64_t>(copies_.size()) - 1))];
      const std::int64_t last = static_cast<std::int64_t>(copy.right.size()) - 1 - copy.kept;
      const auto at = static_cast<std::size_t>(random.between(0, last));
      const auto nonsense = static_cast<std::int32_t>(random.one_of<std::int64_t>(
          {random.between(-9, 700), 0, std::numeric_limits<std::int32_t>::min(), std::numeric_limits<std::int32_t>::max()}));
      std::atomic_ref<std::int32_t>(copy.changing[at])
          .store(random.chance(40) ? copy.right[at] : nonsense, std::memory_order_relaxed);
    }
  }

  std::vector<Copy> copies_;
  std::atomic<bool> stop_ = false;
  std::thread thread_;
};

void expect_calls_stay_within_tensors(const Case& c) {
  const TestExecutor executor(c.executor);
  TestProblem built(c);
  Problem problem = built.problem();
  Scribbler scribbler;
  scribbler.take(problem.kv_lengths, problem.batch);
  scribbler.take(problem.kv_left_pad, problem.batch);
  scribbler.take(problem.cu_kv_tokens, problem.batch + 1);
  scribbler.take(problem.pages.page_indptr, problem.batch + 1, 1);  // the last says how many ids there are
#if !defined(__SANITIZE_THREAD__)
  scribbler.take(problem.cu_q_tokens, problem.batch + 1);  // sequences may share an output for a while, and race for it
#endif
  scribbler.start();
  for (const Fixup fixup : kFixups) {
    Options options = options_of(c, executor);
    options.fixup = fixup;
    const TestWorkspace workspace(problem, options);
    for (int call = 0; call < full_or_reduced(1500, 100); ++call) {
      const Status status = decode(problem, options, workspace.get());
      ASSERT_TRUE(status.ok()) << status.message;
    }
    EXPECT_TRUE(workspace.intact());
  }
  built.poison_outputs();
  const TestWorkspace workspace(built.problem(), options_of(c, executor));
  ASSERT_TRUE(decode(built.problem(), options_of(c, executor), workspace.get()).ok());  // of lengths that stay: writes all there is
  EXPECT_EQ(built.memory_faults(), "");
}

TEST(Conformance, R25_LengthsThatChangeDuringACallLeadNowhere) {
  if (on_cuda()) GTEST_SKIP() << "a device's lengths change between kernels";
  const Case ragged{.q_heads = 2, .kv_heads = 1, .head_dim = 8, .lens = {600, 3, 77, 0, 250}, .workers = 7};
  Case packed = ragged;
  packed.n_q = {1, 3, 2};
  packed.pad = {5, 0, 70, 0, 0};
  packed.capacity = 9;
  packed.q_layout = packed.k_layout = "shd";
  packed.guard = Guard::kPage;
  Case paged = ragged;
  ask_for_pages(paged, 16);
  paged.csr = true;
  paged.guard = Guard::kPage;
  Case plain = ragged;
  plain.policy = Policy::fixed_chunk(64);
  plain.guard = Guard::kPage;
  for (const Case& c : {packed, paged, plain}) expect_calls_stay_within_tensors(c);
}

}  // namespace
}  // namespace lean::support
