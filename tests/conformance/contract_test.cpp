// The contract: what supports() says is what decode() does, for every point of a sweep over types, policies, modes and
// features; sizes that do not fit are refused before anything wraps; unknown enumerators have no meaning.
#include <gtest/gtest.h>

#include <climits>
#include <cstring>
#include <functional>
#include <string>

#include "api/backends.hpp"
#include "support/reduced.hpp"
#include "support/run_and_check.hpp"
#include "support/tables.hpp"
#include "support/target.hpp"

namespace lean::support {
namespace {

/// supports(), workspace_size() and decode() agree; a refused call writes nothing and names an argument.
void expect_agreement(TestProblem& built, const Options& options) {
  const Status said = supports(built.problem(), options);
  EXPECT_EQ(workspace_size(built.problem(), options).status.code, said.code);
  if (said.ok()) {
    EXPECT_TRUE(run_and_check(built, reference::decode(built.problem()), options));
    return;
  }
  EXPECT_TRUE(said.code == StatusCode::kUnsupported || said.code == StatusCode::kInvalidArgument ||
              said.code == StatusCode::kTooLarge)
      << name_of(said.code);
  EXPECT_NE(std::strstr(said.message, " = "), nullptr) << said.message;
  const WorkspaceBuffer state(1 << 16);
  const WorkspaceBuffer scratch(1 << 20);
  state.fill(0);
  const Status status = decode(built.problem(), options, {state.data(), state.size_bytes(), scratch.data(), scratch.size_bytes()});
  EXPECT_EQ(status.code, said.code) << status.message;
  EXPECT_TRUE(built.outputs_untouched());
}

TEST(Conformance, R30_SupportsAgreesWithDecodeForEveryMode) {
  const Case c{.lens = {97, 5}, .workers = 5};
  int served = 0;
  for (const ExecutorKind kind : {ExecutorKind::kPool, ExecutorKind::kAscending}) {
    if (reduced() && kind != ExecutorKind::kPool) continue;
    const TestExecutor executor(kind, 2);
    for (const Policy::Kind policy :
         {Policy::Kind::kLean, Policy::Kind::kFixedSplit, Policy::Kind::kDataParallel, Policy::Kind::kFixedChunk}) {
      for (const int number : {-1, 0, 7, 129}) {
        for (const Fixup fixup : kFixups) {
          for (const Determinism determinism :
               {Determinism::kRunToRun, Determinism::kBatchInvariant, Determinism::kNotGuaranteed}) {
            for (int isa = 0; isa <= 5; isa += full_or_reduced(1, 5)) {
              TestProblem built(c);
              Options options{
                  .backend = target(), .policy = {.kind = policy}, .fixup = fixup, .determinism = determinism, .workers = 5};
              (policy == Policy::Kind::kFixedSplit ? options.policy.splits : options.policy.chunk_tokens) = number;
              options.cpu_isa = static_cast<CpuIsa>(isa);
              options.executor = executor.get();
              expect_agreement(built, options);
              served += supports(built.problem(), options).ok() ? 1 : 0;
            }
          }
        }
      }
    }
  }
  EXPECT_GT(served, full_or_reduced(50, 10));
}

TEST(Conformance, R30_SupportsAgreesWithDecodeForEveryType) {
  const TestExecutor executor(ExecutorKind::kPool, 2);
  const Case c{.lens = {37}};
  int served = 0;
  for (int q = 0; q < 5; ++q) {
    for (int k = 0; k < 5; ++k) {
      for (int v = 0; v < 5; ++v) {
        for (int o = 0; o < 5; ++o) {
          Case typed = c;
          const bool same_kv = q < 3 && o == q && v == k && (k == q || k >= 3);
          typed.dtype = same_kv ? static_cast<DType>(q) : DType::kFloat32;  // else buffers wide enough for all
          if (same_kv && k >= 3) typed.kv_type = k == 3 ? KvType::kE4M3 : KvType::kE5M2;
          TestProblem built(typed);
          built.problem().q.dtype = static_cast<DType>(q);
          built.problem().k.dtype = static_cast<DType>(k);
          built.problem().v.dtype = static_cast<DType>(v);
          built.problem().o.dtype = static_cast<DType>(o);
          const bool expected = same_kv && !(on_cuda() && q == 0);
          EXPECT_EQ(supports(built.problem(), options_of(c, executor)).ok(), expected);
          expect_agreement(built, options_of(c, executor));
          served += expected ? 1 : 0;
        }
      }
    }
  }
  EXPECT_EQ(served, on_cuda() ? 6 : 9);
}

TEST(Conformance, R30_EveryHeadDimAndHeadCountIsServedOrRefusedByName) {
  const TestExecutor executor(ExecutorKind::kPool, 2);
  const TestProblem built(Case{.q_heads = 12, .kv_heads = 12, .head_dim = 256, .lens = {1}});
  constexpr Strides apart{.head = kMaxHeadDim};  // room for the widest rows
  for (std::int32_t d = -1; d <= kMaxHeadDim + 2; ++d) {
    Problem problem = built.problem();
    problem.o.strides = apart;
    problem.head_dim = d;
    const Status status = supports(problem, options_of(Case{}, executor));
    EXPECT_EQ(status.ok(), d >= 1 && d <= kMaxHeadDim) << d;
    EXPECT_EQ(std::strstr(status.message, "head_dim") != nullptr, !status.ok()) << status.message;
  }
  for (std::int32_t dv = -1; dv <= kMaxHeadDim + 2; ++dv) {
    Problem problem = built.problem();
    problem.o.strides = apart;
    problem.value_dim = dv;
    EXPECT_EQ(supports(problem, options_of(Case{}, executor)).ok(), dv >= 0 && dv <= kMaxHeadDim) << dv;
  }
  for (std::int32_t q_heads = -1; q_heads <= 12; ++q_heads) {
    for (std::int32_t kv_heads = -1; kv_heads <= 12; ++kv_heads) {
      Problem problem = built.problem();
      problem.q_heads = q_heads;
      problem.kv_heads = kv_heads;
      const bool served = q_heads >= 1 && kv_heads >= 1 && q_heads % kv_heads == 0;
      EXPECT_EQ(supports(problem, options_of(Case{}, executor)).ok(), served) << q_heads << " " << kv_heads;
    }
  }
}

/// The CPU serves every feature; a GPU may decline one, and then says which.
TEST(Conformance, R30_EveryFeatureIsServedOrRefusedByName) {
  for (const Feature& feature : features()) {
    SCOPED_TRACE(feature.argument);
    Case c{.lens = {37, 211}, .n_q = {2}};
    feature.ask(c);
    const TestExecutor executor(c.executor);
    TestProblem built(c);
    const Status status = supports(built.problem(), options_of(c, executor));
    if (status.ok()) {
      EXPECT_TRUE(run_and_check(c));
      continue;
    }
    EXPECT_TRUE(on_cuda());
    EXPECT_EQ(status.code, StatusCode::kUnsupported);
    EXPECT_NE(std::strstr(status.message, feature.argument), nullptr) << status.message;
    expect_agreement(built, options_of(c, executor));
  }
}

// ---- sizes --------------------------------------------------------------------------------------------------------------

TEST(Conformance, R20_SizesThatDoNotFitAreRefusedAndNeverWrap) {
  const Case c{.lens = {37}};
  const TestExecutor executor(c.executor);
  const auto code_of = [&](auto change) {
    TestProblem built(c);
    change(built.problem());
    const Options options = options_of(c, executor);
    const Status status = supports(built.problem(), options);
    EXPECT_EQ(workspace_size(built.problem(), options).status.code, status.code);
    return status.code;
  };
  EXPECT_EQ(code_of([](Problem& p) { p.batch = INT64_MAX; }), StatusCode::kInvalidArgument);
  EXPECT_EQ(code_of([](Problem& p) { p.batch = -1; }), StatusCode::kInvalidArgument);
  EXPECT_EQ(code_of([](Problem& p) {
              p.batch = INT32_MAX;
              p.q_heads = p.kv_heads = 1 << 20;
              p.kv_capacity = INT32_MAX;
            }),
            StatusCode::kTooLarge);
  EXPECT_EQ(code_of([](Problem& p) {
              p.q_tokens = INT32_MAX;
              p.q_heads = INT32_MAX - 1;
              p.kv_heads = 2;
              p.kv_capacity = INT32_MAX;
            }),
            StatusCode::kTooLarge);
  for (const std::int64_t stride : {INT64_MAX, INT64_MIN, INT64_MAX / 2, INT64_MIN + 1}) {
    EXPECT_EQ(code_of([stride](Problem& p) { p.k.strides.token = stride; }), StatusCode::kTooLarge);
    EXPECT_EQ(code_of([stride](Problem& p) { p.v.strides.dim = stride; }), StatusCode::kTooLarge);
    EXPECT_EQ(code_of([stride](Problem& p) { p.q.strides.head = stride; }), StatusCode::kTooLarge);
    EXPECT_EQ(code_of([stride](Problem& p) { p.o.strides.head = stride; }), StatusCode::kTooLarge);
    EXPECT_EQ(code_of([stride](Problem& p) { p.lse.head_stride = stride; }), StatusCode::kTooLarge);
  }
  // A million sequences of a million tokens are fine: 2^45 tokens never wrap, and the workspace does not grow with them.
  EXPECT_EQ(code_of([](Problem& p) {
              p.batch = 1 << 20;
              p.kv_capacity = 1 << 20;
              for (Strides* s : {&p.q.strides, &p.k.strides, &p.v.strides, &p.o.strides}) s->sequence = std::int64_t{1} << 36;
            }),
            StatusCode::kOk);
}

TEST(Conformance, R20_WorkersAndSplitsAreLimitedByName) {
  const Case c{.lens = {37}};
  const TestExecutor executor(c.executor);
  const TestProblem built(c);
  for (const std::int32_t workers : {-1, INT32_MIN, INT32_MAX}) {
    Options options = options_of(c, executor);
    options.workers = workers;
    const Status status = supports(built.problem(), options);
    EXPECT_EQ(status.code, StatusCode::kInvalidArgument);
    EXPECT_NE(std::strstr(status.message, "workers"), nullptr) << status.message;
  }
}

// ---- enumerators ------------------------------------------------------------------------------------------------------

TEST(Conformance, R31_UnknownEnumeratorsAreRefused) {
  const Case c{.lens = {37}};
  const TestExecutor executor(c.executor);
  for (const int unknown : {-1, 7, 77, INT_MIN, INT_MAX}) {
    SCOPED_TRACE(unknown);
    const auto refused = [&](auto change) {
      TestProblem built(c);
      Options options = options_of(c, executor);
      change(built.problem(), options);
      expect_agreement(built, options);
      return !supports(built.problem(), options).ok();
    };
    EXPECT_TRUE(refused([&](Problem&, Options& o) { o.backend = static_cast<Backend>(unknown); }));
    EXPECT_TRUE(refused([&](Problem&, Options& o) { o.policy.kind = static_cast<Policy::Kind>(unknown); }));
    EXPECT_TRUE(refused([&](Problem&, Options& o) { o.fixup = static_cast<Fixup>(unknown); }));
    EXPECT_TRUE(refused([&](Problem&, Options& o) { o.determinism = static_cast<Determinism>(unknown); }));
    EXPECT_TRUE(refused([&](Problem&, Options& o) { o.cpu_isa = static_cast<CpuIsa>(unknown); }));
    EXPECT_TRUE(refused([&](Problem& p, Options&) { p.q.dtype = static_cast<DType>(unknown); }));
    EXPECT_TRUE(refused([&](Problem& p, Options&) { p.k.dtype = static_cast<DType>(unknown); }));
    EXPECT_TRUE(refused([&](Problem& p, Options&) { p.o.dtype = static_cast<DType>(unknown); }));
  }
}

TEST(Conformance, R31_UnknownCallsOfOtherFunctionsAreRefused) {
  const Case c{.lens = {37}};
  const TestExecutor executor(c.executor);
  const TestProblem built(c);
  Options cuda = options_of(c, executor);
  cuda.backend = Backend::kCuda;
  if (backend_of(Backend::kCuda) == nullptr) {
    EXPECT_EQ(supports(built.problem(), cuda).code, StatusCode::kUnsupported);
    EXPECT_EQ(merge_states(nullptr, nullptr, nullptr, nullptr, 0, 8, DType::kFloat32, cuda).code, StatusCode::kUnsupported);
  }
  EXPECT_FALSE(reset_workspace({}, options_of(c, executor)).ok());
  EXPECT_FALSE(sticky_status({}, options_of(c, executor)).ok());
  EXPECT_FALSE(merge_states(nullptr, nullptr, nullptr, nullptr, 1, 8).ok());
  EXPECT_TRUE(merge_states(nullptr, nullptr, nullptr, nullptr, 0, 8).ok());
  float numbers[8] = {};
  for (const int dtype : {-1, 3, 4, 5}) {
    EXPECT_EQ(merge_states(numbers, numbers, numbers, numbers, 1, 8, static_cast<DType>(dtype)).code, StatusCode::kInvalidArgument);
  }
  const auto message_of = [](void* o_a, void* lse_a, std::int64_t rows) {
    float other[16] = {};
    return std::string(merge_states(o_a, static_cast<float*>(lse_a), other, other + 8, rows, 8).message);
  };
  char* const odd = reinterpret_cast<char*>(numbers) + 1;
  EXPECT_EQ(message_of(odd, numbers, 1).rfind("o_a = ", 0), 0U);
  EXPECT_EQ(message_of(numbers, odd, 1).rfind("lse_a = ", 0), 0U);
  EXPECT_EQ(message_of(numbers, numbers, INT64_MAX / 8).rfind("rows = ", 0), 0U);  // its bytes leave 64 bits
  Problem broken = built.problem();
  broken.head_dim = 0;
  char text[8] = "";
  EXPECT_EQ(explain_schedule(broken, options_of(c, executor), ScheduleFormat::kText, text, sizeof(text)), 0U);
}

}  // namespace
}  // namespace lean::support
