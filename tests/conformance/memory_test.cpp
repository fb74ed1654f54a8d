// Memory: what may be read, what must be written, what a workspace must be. Guards of every buffer are checked in each
// test of the suite; here they are put where a fault is likeliest.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cstring>

#include "backends/cpu/tile_kernels.hpp"
#include "backends/reference/load.hpp"
#include "support/reduced.hpp"
#include "support/run_and_check.hpp"
#include "support/tables.hpp"
#include "support/target.hpp"

namespace lean::support {
namespace {

TEST(Conformance, R13_GapsOfStridedOutputsStayUntouchedAndNoPoisonIsLeft) {
  for (const DType dtype : dtypes()) {
    for (const CpuIsa isa : available_isas()) {
      for (const char* o : {"bhsd~gap7", "bshd~gap1", "bhsd~inner2", "bhds~gap3", "bhsd~negd", "bshd~negs~gap5", "shd~gap9"}) {
        for (const std::int32_t dv : {64, 21}) {
          Case c{.dtype = dtype, .value_dim = dv, .lens = {101, 0, 37}, .n_q = {3, 0, 2}, .isa = isa};
          c.q_layout = is_packed(o) ? "shd" : "bshd";
          c.o_layout = o;
          c.lse_layout = "bhsd~gap3";
          EXPECT_TRUE(run_and_check(c));
        }
      }
    }
  }
}

TEST(Conformance, R13_LseIsOptional) {
  for (const Policy& policy : all_policies()) {
    EXPECT_TRUE(run_and_check({.lens = {101, 0, 613}, .lse = false, .policy = policy, .workers = 5}));
  }
}

TEST(Conformance, R14_ScratchContentsChangeNoBit) {
  for (const Policy& policy : all_policies()) {
    for (const Fixup fixup : kFixups) {
      if (!pairs(policy, fixup)) continue;
      const Case c{.lens = {1511, 0, 97, 613}, .policy = policy, .fixup = fixup, .workers = 40};  // two merge levels
      const TestExecutor executor(c.executor);
      TestProblem built(c);
      if (!served(built, options_of(c, executor))) continue;
      ASSERT_TRUE(run_and_check(built, reference::decode(built.problem()), options_of(c, executor)));
      const auto bits = built.output_bits();
      for (const Fill fill : {Fill::kZero, Fill::kInfinity}) {
        ASSERT_TRUE(run(built, options_of(c, executor), fill));
        EXPECT_EQ(built.output_bits(), bits) << reproducer(c);
      }
    }
  }
}

TEST(Conformance, R14_AWorkspaceServesCallAfterCall) {
  const Case small{.lens = {97, 31}, .workers = 7};
  const Case large{.lens = {1511, 613}, .workers = 7};
  const TestExecutor executor(small.executor);
  TestProblem a(small);
  TestProblem b(large);
  const TestWorkspace workspace(b.problem(), options_of(large, executor));
  ASSERT_TRUE(run(a, options_of(small, executor)));
  ASSERT_TRUE(run(b, options_of(large, executor)));
  const auto bits_a = a.output_bits();
  const auto bits_b = b.output_bits();
  for (int call = 0; call < 10; ++call) {
    a.poison_outputs();
    b.poison_outputs();
    ASSERT_TRUE(decode_and_wait(a.problem(), options_of(small, executor), workspace.get()).ok());
    ASSERT_TRUE(decode_and_wait(b.problem(), options_of(large, executor), workspace.get()).ok());
    EXPECT_EQ(a.output_bits(), bits_a);
    EXPECT_EQ(b.output_bits(), bits_b);
  }
}

// ---- the workspace ----------------------------------------------------------------------------------------------------

struct WorkspaceFault {
  const char* name;
  StatusCode expected;
  void (*break_it)(Workspace& workspace, const TestProblem& built);
};

constexpr WorkspaceFault kWorkspaceFaults[] = {
    {"state null", StatusCode::kWorkspaceTooSmall, [](Workspace& w, const TestProblem&) { w.state = nullptr; }},
    {"scratch null", StatusCode::kWorkspaceTooSmall, [](Workspace& w, const TestProblem&) { w.scratch = nullptr; }},
    {"state one byte short", StatusCode::kWorkspaceTooSmall, [](Workspace& w, const TestProblem&) { --w.state_bytes; }},
    {"scratch one byte short", StatusCode::kWorkspaceTooSmall, [](Workspace& w, const TestProblem&) { --w.scratch_bytes; }},
    {"state misaligned", StatusCode::kWorkspaceMisaligned,
     [](Workspace& w, const TestProblem&) { w.state = static_cast<std::byte*>(w.state) + 64; }},
    {"scratch misaligned", StatusCode::kWorkspaceMisaligned,
     [](Workspace& w, const TestProblem&) { w.scratch = static_cast<std::byte*>(w.scratch) + 128; }},
    {"scratch is o", StatusCode::kInvalidArgument,
     [](Workspace& w, const TestProblem& built) { w.scratch = built.problem().o.data; }},
    {"state is o", StatusCode::kInvalidArgument, [](Workspace& w, const TestProblem& built) { w.state = built.problem().o.data; }},
    {"scratch is k", StatusCode::kInvalidArgument,
     [](Workspace& w, const TestProblem& built) { w.scratch = const_cast<void*>(built.problem().k.data); }},
    {"scratch is state", StatusCode::kInvalidArgument, [](Workspace& w, const TestProblem&) { w.scratch = w.state; }},
};

TEST(Conformance, R16_ABadWorkspaceIsRefusedAndNothingIsWritten) {
  const Case c{.lens = {1511, 97}};
  const TestExecutor executor(c.executor);
  const Options options = options_of(c, executor);
  for (const WorkspaceFault& fault : kWorkspaceFaults) {
    SCOPED_TRACE(fault.name);
    TestProblem built(c);
    const TestWorkspace workspace(built.problem(), options);
    Workspace broken = workspace.get();
    fault.break_it(broken, built);
    const Status status = decode(built.problem(), options, broken);
    EXPECT_EQ(status.code, fault.expected) << status.message;
    EXPECT_NE(std::strstr(status.message, "workspace"), nullptr) << status.message;
    EXPECT_TRUE(built.outputs_untouched());
    EXPECT_TRUE(workspace.intact());
  }
}

TEST(Conformance, R16_WorkspaceSizeDependsOnCapacityNotOnLengths) {
  const Case full{.lens = {1511, 1511, 1511}};
  Case ragged{.lens = {1, 0, 97}, .capacity = 1511};
  const TestExecutor executor(full.executor);
  for (const Policy& policy : all_policies()) {
    Options options = options_of(full, executor);
    options.policy = policy;
    const WorkspaceSize a = workspace_size(TestProblem(full, Contents::kFill).problem(), options);
    const WorkspaceSize b = workspace_size(TestProblem(ragged, Contents::kFill).problem(), options);
    EXPECT_EQ(a.state_bytes, b.state_bytes);
    EXPECT_EQ(a.scratch_bytes, b.scratch_bytes);
    EXPECT_LE(a.state_bytes, 64U * 1024U);
  }
}

TEST(Conformance, R17_NothingIsWrittenPastTheWorkspace) {
  for (const Policy& policy : all_policies()) {
    for (const Fixup fixup : kFixups) {
      if (!pairs(policy, fixup)) continue;
      for (const std::int32_t workers : {1, 5, 80}) {
        Case c{.lens = {1511, 97, 0, 300}, .n_q = {5}, .policy = policy, .fixup = fixup, .workers = workers};
        const TestExecutor executor(c.executor);
        const Options options = options_of(c, executor);
        TestProblem built(c);
        if (!served(built, options)) continue;
        if (on_cuda()) {  // device memory has canaries, and compute-sanitizer
          EXPECT_TRUE(run(built, options));
          continue;
        }
        const WorkspaceSize need = workspace_size(built.problem(), options);
        ASSERT_TRUE(need.status.ok());
        // Multiples of the alignment, so that each can end exactly at an inaccessible page and still be aligned.
        const auto rounded = [](std::size_t bytes) {
          return (bytes + kWorkspaceAlignment - 1) / kWorkspaceAlignment * kWorkspaceAlignment;
        };
        const GuardedBuffer state(rounded(need.state_bytes), Guard::kPage);
        const GuardedBuffer scratch(rounded(need.scratch_bytes), Guard::kPage);
        state.fill(std::byte{0});
        ASSERT_TRUE(decode(built.problem(), options, {state.data(), need.state_bytes, scratch.data(), need.scratch_bytes}).ok());
        EXPECT_TRUE(state.intact() && scratch.intact());
        EXPECT_EQ(built.memory_faults(), "");
      }
    }
  }
}

// ---- reads --------------------------------------------------------------------------------------------------------------

TEST(Conformance, R18_NothingIsReadPastTheTensors) {
  for (const DType dtype : dtypes()) {
    for (const CpuIsa isa : available_isas()) {
      for (const auto& [k, v] : {std::pair{"bshd", "bhsd"}, {"bhsd", "bshd~gap3"}, {"hsd", "shd"}, {"bhds", "bhsd~inner3"}}) {
        for (const std::int32_t d : {1, 7, 8, 24, 63, 64, 100, 128}) {
          Case c{.dtype = dtype, .head_dim = d, .value_dim = d > 60 ? 0 : 37, .lens = {3, 0, 101}, .k_layout = k, .v_layout = v};
          c.guard = Guard::kPage;
          c.isa = isa;
          EXPECT_TRUE(run_and_check(c));
        }
      }
    }
  }
}

TEST(Conformance, R18_NothingIsReadPastTensorsWithAlignedRows) {
  EveryNth some(5);
  for (const DType dtype : dtypes()) {
    for (const auto& [k, v] : {std::pair{"bshd", "bhsd"}, {"hsd", "hsd"}, {"bhsd~gap8", "bshd"}, {"bhsd", "bhsd~negs"}}) {
      for (std::int32_t d = 8; d <= 256; d += 8) {
        if (some.skips()) continue;
        Case c{.dtype = dtype, .head_dim = d, .lens = {3, 0, 101, 257}, .k_layout = k, .v_layout = v, .guard = Guard::kPage};
        EXPECT_TRUE(run_and_check(c));
      }
    }
  }
}

/// The elements of `tensor` copied to other strides in memory that exists only where it is touched.
class SparseCopy {
 public:
  SparseCopy(const TestProblem& built, const TensorView& tensor, const Strides& strides, std::int64_t data_element)
      : bytes_(kBytes), memory_(mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)) {
    if (memory_ == MAP_FAILED) throw std::bad_alloc();
    const Problem& p = built.problem();
    view = {.data = static_cast<std::byte*>(memory_) + data_element * bytes_of(tensor.dtype),
            .dtype = tensor.dtype,
            .strides = strides};
    const auto offset = [](const Strides& s, std::int64_t b, std::int64_t h, std::int64_t t, std::int64_t i) {
      return b * s.sequence + h * s.head + t * s.token + i * s.dim;
    };
    for (std::int64_t b = 0; b < p.batch; ++b) {
      for (std::int64_t h = 0; h < p.kv_heads; ++h) {
        for (std::int64_t t = 0; t < p.kv_lengths[b]; ++t) {
          for (std::int64_t i = 0; i < p.head_dim; ++i) {
            const double x = reference::load_element(tensor.data, tensor.dtype, offset(tensor.strides, b, h, t, i));
            reference::store_element(const_cast<void*>(view.data), tensor.dtype, offset(strides, b, h, t, i), x);
          }
        }
      }
    }
  }
  ~SparseCopy() { munmap(memory_, bytes_); }
  SparseCopy(const SparseCopy&) = delete;
  SparseCopy& operator=(const SparseCopy&) = delete;

  TensorView view;

 private:
  static constexpr std::size_t kBytes = std::size_t{3} << 33;  // 24 GiB of addresses
  std::size_t bytes_;
  void* memory_;
};

TEST(Conformance, R19_OffsetsBeyondTwoToTheThirtyOneElements) {
  if (on_cuda()) GTEST_SKIP() << "addresses without memory: gpu_tests use device memory";
  for (const DType dtype : {DType::kBFloat16, DType::kFloat32}) {
    const Case c{.dtype = dtype, .head_dim = 40, .lens = {5, 7}, .workers = 2};
    const TestExecutor executor(c.executor);
    TestProblem built(c);
    const reference::Answer answer = reference::decode(built.problem());
    ASSERT_TRUE(run(built, options_of(c, executor)));
    const auto bits = built.output_bits();
    constexpr std::int64_t kFar = (std::int64_t{1} << 31) + 40;  // elements
    const std::int64_t reach = std::int64_t{5} << 30;            // elements: where a negative stride starts from
    for (const auto& [k, v] : {std::pair{Strides{kFar, 400, 40, 1}, Strides{40, kFar, 80, 1}},     // 2^31 by sequence, by head
                               {Strides{400, 4000, kFar / 4, 1}, Strides{40, 4000, kFar / 3, 1}},  // by token
                               {Strides{400, 4000, 40, kFar / 20}, Strides{40, 4000, 80, 1}}}) {   // by dim
      const SparseCopy far_k(built, built.problem().k, k, 0);
      const SparseCopy far_v(built, built.problem().v, v, 0);
      TestProblem moved(c);
      moved.problem().k = far_k.view;
      moved.problem().v = far_v.view;
      const Options options = options_of(c, executor);
      ASSERT_TRUE(run_and_check(moved, answer, options));
      // Elements that do not lie side by side are copied to fp32 first: an instruction set that multiplies bf16 does not get them.
      if (k.dim == 1 || !cpu::rounds_probabilities(options, built.problem())) {
        EXPECT_EQ(moved.output_bits(), bits);
      }
    }
    const SparseCopy back_k(built, built.problem().k, {-kFar, 400, 40, 1}, reach);
    TestProblem moved(c);
    moved.problem().k = back_k.view;
    ASSERT_TRUE(run(moved, options_of(c, executor)));
    EXPECT_EQ(moved.output_bits(), bits);
  }
}

TEST(Conformance, R19_OutputsBeyondTwoToTheThirtyOneElements) {
  if (on_cuda()) GTEST_SKIP() << "addresses without memory: gpu_tests use device memory";
  const Case c{.dtype = DType::kFloat32, .head_dim = 40, .lens = {5, 7}, .workers = 2};
  const TestExecutor executor(c.executor);
  const Options options = options_of(c, executor);
  TestProblem built(c);
  ASSERT_TRUE(run(built, options));
  const std::size_t bytes = std::size_t{3} << 32;
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  ASSERT_NE(memory, MAP_FAILED);
  Problem far = built.problem();
  far.o.data = memory;
  far.o.strides.sequence = (std::int64_t{1} << 31) + 4096;
  const TestWorkspace workspace(far, options);
  ASSERT_TRUE(decode(far, options, workspace.get()).ok());
  for (std::int32_t head = 0; head < c.q_heads; ++head) {
    for (std::int32_t i = 0; i < c.head_dim; ++i) {
      const std::int64_t offset = far.o.strides.sequence + head * far.o.strides.head + i;
      EXPECT_EQ(static_cast<double>(static_cast<const float*>(memory)[offset]), built.o({1, head, 0, i}));
    }
  }
  munmap(memory, bytes);
}

// ---- strides, alignment, aliases --------------------------------------------------------------------------------------

TEST(Conformance, R21_NegativeZeroAndNonUnitStrides) {
  const char* const layouts[] = {"bhsd~negs",   "bshd~negd",   "bhsd~inner2",      "bhsd~inner3~gap1", "bshd~bcasth",
                                 "bhsd~bcastb", "bshd~bcasts", "bhsd~negs~inner2", "bhds~negd",        "bhsd~bcastb~bcasth"};
  for (const DType dtype : dtypes()) {
    for (const CpuIsa isa : available_isas()) {
      for (const char* layout : layouts) {
        for (int tensor = 0; tensor < 3; ++tensor) {
          Case c{.dtype = dtype, .head_dim = 24, .lens = {101, 0, 37}, .n_q = {2}, .isa = isa};
          (tensor == 0 ? c.q_layout : (tensor == 1 ? c.k_layout : c.v_layout)) = layout;
          EXPECT_TRUE(run_and_check(c));
        }
      }
    }
  }
}

TEST(Conformance, R21_OutputsThatOverlapThemselvesAreRefused) {
  const TestExecutor executor(ExecutorKind::kPool, 2);
  for (const char* layout : {"bhsd~bcasth", "bhsd~bcastb", "bhsd~bcasts"}) {
    const Case c{.lens = {37, 5}, .n_q = {2}, .o_layout = layout};
    const TestProblem built(c);
    EXPECT_EQ(supports(built.problem(), options_of(c, executor)).code, StatusCode::kInvalidArgument) << layout;
  }
}

TEST(Conformance, R23_EveryElementAlignmentIsServed) {
  for (const DType dtype : dtypes()) {
    for (const CpuIsa isa : available_isas()) {
      for (int offset = 0; offset < 16; ++offset) {
        const auto name = [&](const char* order, int step) {
          return std::string(order) + "~off" + std::to_string((offset * step) % 16);
        };
        Case c{.dtype = dtype,
               .lens = {101, 37},
               .q_layout = name("bshd", 3),
               .k_layout = name("bshd", 1),
               .v_layout = name("bhsd", 5)};
        c.o_layout = name("bhsd", 7);
        c.lse_layout = name("bhsd", 1);
        c.isa = isa;
        EXPECT_TRUE(run_and_check(c));
        c.q_layout = name("bshd", 2);  // the same where K and V are aligned to 16 bytes
        c.k_layout = "bshd~off8";
        c.v_layout = "bhsd";
        EXPECT_TRUE(run_and_check(c));
      }
    }
  }
}

TEST(Conformance, R23_DataBetweenElementsIsRefusedByName) {
  const Case c{.lens = {37}};
  const TestExecutor executor(c.executor);
  const auto shifted = [](const void* data) { return static_cast<const void*>(static_cast<const std::byte*>(data) + 1); };
  const auto expect_refused = [&](const char* argument, auto shift) {
    TestProblem built(c);
    shift(built.problem());
    const Status status = supports(built.problem(), options_of(c, executor));
    EXPECT_EQ(status.code, StatusCode::kInvalidArgument);
    EXPECT_NE(std::strstr(status.message, argument), nullptr) << status.message;
  };
  expect_refused("q.data", [&](Problem& p) { p.q.data = shifted(p.q.data); });
  expect_refused("k.data", [&](Problem& p) { p.k.data = shifted(p.k.data); });
  expect_refused("v.data", [&](Problem& p) { p.v.data = shifted(p.v.data); });
  expect_refused("o.data", [&](Problem& p) { p.o.data = const_cast<void*>(shifted(p.o.data)); });
  expect_refused("lse.data",
                 [&](Problem& p) { p.lse.data = reinterpret_cast<float*>(reinterpret_cast<std::byte*>(p.lse.data) + 2); });
}

TEST(Conformance, R29_KeysMayBeTheValues) {
  for (const DType dtype : dtypes()) {
    const Case c{.dtype = dtype, .lens = {1511, 97}, .v_layout = "bshd"};
    const TestExecutor executor(c.executor);
    TestProblem built(c);
    built.problem().v = built.problem().k;
    EXPECT_TRUE(run_and_check(built, reference::decode(built.problem()), options_of(c, executor)));
  }
}

TEST(Conformance, R29_OutputsMayNotBeInputs) {
  const Case c{.lens = {37}};
  const TestExecutor executor(c.executor);
  for (int tensor = 0; tensor < 3; ++tensor) {
    TestProblem built(c);
    Problem& p = built.problem();
    p.o.data = const_cast<void*>(tensor == 0 ? p.q.data : (tensor == 1 ? p.k.data : p.v.data));
    const TestWorkspace workspace(TestProblem(c).problem(), options_of(c, executor));
    const Status status = decode(p, options_of(c, executor), workspace.get());
    EXPECT_EQ(status.code, StatusCode::kInvalidArgument);
    EXPECT_NE(std::strstr(status.message, "o.data"), nullptr) << status.message;
    EXPECT_TRUE(built.outputs_untouched());
  }
}

}  // namespace
}  // namespace lean::support
