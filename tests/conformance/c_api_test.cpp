// The C interface gives what the C++ one gives, and survives what a C caller may do to it: null pointers, structs of
// other sizes, bytes of chance.
#include "lean/lean.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <cstring>
#include <string>

#include "support/reduced.hpp"
#include "support/run_and_check.hpp"
#include "support/target.hpp"

namespace lean::support {
namespace {

lean_tensor tensor_of(const void* data, DType dtype, const Strides& s) {
  return {const_cast<void*>(data), static_cast<std::int32_t>(dtype), 0, s.sequence, s.head, s.token, s.dim};
}

lean_problem to_c(const Problem& p) {
  lean_problem c;
  lean_problem_init(&c);
  c.batch = p.batch;
  c.q_heads = p.q_heads;
  c.kv_heads = p.kv_heads;
  c.head_dim = p.head_dim;
  c.value_dim = p.value_dim;
  c.q = tensor_of(p.q.data, p.q.dtype, p.q.strides);
  c.k = tensor_of(p.k.data, p.k.dtype, p.k.strides);
  c.v = tensor_of(p.v.data, p.v.dtype, p.v.strides);
  c.o = tensor_of(p.o.data, p.o.dtype, p.o.strides);
  c.lse = p.lse.data;
  c.lse_sequence_stride = p.lse.sequence_stride;
  c.lse_head_stride = p.lse.head_stride;
  c.lse_token_stride = p.lse.token_stride;
  c.q_tokens = p.q_tokens;
  c.kv_capacity = p.kv_capacity;
  c.total_q_tokens = p.total_q_tokens;
  c.total_kv_tokens = p.total_kv_tokens;
  c.cu_q_tokens = p.cu_q_tokens;
  c.kv_lengths = p.kv_lengths;
  c.kv_left_pad = p.kv_left_pad;
  c.cu_kv_tokens = p.cu_kv_tokens;
  c.scale = p.scores.scale;
  c.causal = p.scores.causal ? 1 : 0;
  return c;
}

/// A problem, its options and a workspace that fits, as a C caller has them.
class CApi : public testing::Test {
 protected:
  CApi() : executor_(ExecutorKind::kPool, 2), built_(case_), workspace_(built_.problem(), options_of(case_, executor_)) {
    problem_ = to_c(built_.problem());
    lean_options_init(&options_);
    options_.backend = static_cast<std::int32_t>(target());
    const Executor& executor = *executor_.get();
    c_executor_ = {executor.context, executor.run, executor.worker_count, executor.descending_or_concurrent ? 1 : 0};
    options_.executor = &c_executor_;
    options_.workers = case_.workers;
    const Workspace w = workspace_.get();
    c_workspace_ = {w.state, w.state_bytes, w.scratch, w.scratch_bytes};
  }

  /// lean_decode(), and the target's work done.
  [[nodiscard]] lean_status decode(const lean_problem& problem, const lean_options& options) const {
    const lean_status status = lean_decode(&problem, &options, &c_workspace_);
    EXPECT_TRUE(wait_for_target().ok());
    return status;
  }

  Case case_{.lens = {613, 0, 97}, .n_q = {2}, .pad = {5, 0, 0}, .causal = true, .k_layout = "shd"};
  TestExecutor executor_;
  TestProblem built_;
  TestWorkspace workspace_;
  lean_problem problem_;
  lean_options options_;
  lean_executor c_executor_;
  lean_workspace c_workspace_;
};

TEST_F(CApi, GivesTheBitsOfTheCppInterface) {
  ASSERT_TRUE(run_and_check(built_, reference::decode(built_.problem()), options_of(case_, executor_)));
  const auto bits = built_.output_bits();
  std::size_t state_bytes = 0;
  std::size_t scratch_bytes = 0;
  EXPECT_EQ(lean_supports(&problem_, &options_).code, LEAN_OK);
  EXPECT_EQ(lean_workspace_size(&problem_, &options_, &state_bytes, &scratch_bytes).code, LEAN_OK);
  EXPECT_EQ(state_bytes, workspace_.size().state_bytes);
  EXPECT_EQ(scratch_bytes, workspace_.size().scratch_bytes);
  EXPECT_EQ(lean_check_lengths(&problem_).code, LEAN_OK);
  built_.poison_outputs();
  const lean_status status = decode(problem_, options_);
  EXPECT_EQ(status.code, LEAN_OK) << status.message;
  EXPECT_EQ(built_.output_bits(), bits);
  EXPECT_EQ(lean_sticky_status(&c_workspace_, &options_).code, LEAN_OK);
  EXPECT_EQ(lean_reset_workspace(&c_workspace_, &options_).code, LEAN_OK);
}

TEST_F(CApi, R25_TheStickyMessageNamesTheEntry) {
  ASSERT_NE(problem_.cu_kv_tokens, nullptr);
  const_cast<std::int32_t*>(problem_.cu_kv_tokens)[2] = 5;
  ASSERT_EQ(decode(problem_, options_).code, LEAN_OK);
  const lean_status status = lean_sticky_status(&c_workspace_, &options_);
  EXPECT_EQ(status.code, LEAN_BAD_LENGTHS);
  if (target() == Backend::kCpu) {
    EXPECT_STREQ(status.message, "cu_kv_tokens[2] = 5: must not be smaller than the entry before; it was clamped");
  }
  EXPECT_EQ(lean_reset_workspace(&c_workspace_, &options_).code, LEAN_OK);
  EXPECT_EQ(lean_sticky_status(&c_workspace_, &options_).code, LEAN_OK);
}

TEST_F(CApi, TokensBeforeTheCallGoWithAppendedOnes) {
  const std::int32_t before[] = {1, 0, 1};
  problem_.append_cached_lengths = before;
  const lean_status status = lean_supports(&problem_, &options_);
  EXPECT_EQ(status.code, LEAN_INVALID_ARGUMENT);
  EXPECT_EQ(std::string(status.message).rfind("append.cached_lengths = ", 0), 0U) << status.message;
}

TEST_F(CApi, R31_NullPointersAreRefused) {
  std::size_t bytes = 0;
  EXPECT_EQ(lean_supports(nullptr, &options_).code, LEAN_INVALID_ARGUMENT);
  EXPECT_EQ(lean_workspace_size(nullptr, &options_, &bytes, &bytes).code, LEAN_INVALID_ARGUMENT);
  EXPECT_EQ(lean_workspace_size(&problem_, &options_, nullptr, &bytes).code, LEAN_INVALID_ARGUMENT);
  EXPECT_EQ(lean_workspace_size(&problem_, &options_, &bytes, nullptr).code, LEAN_INVALID_ARGUMENT);
  EXPECT_EQ(lean_decode(nullptr, &options_, &c_workspace_).code, LEAN_INVALID_ARGUMENT);
  EXPECT_NE(lean_decode(&problem_, &options_, nullptr).code, LEAN_OK);
  EXPECT_NE(lean_reset_workspace(nullptr, &options_).code, LEAN_OK);
  EXPECT_NE(lean_sticky_status(nullptr, &options_).code, LEAN_OK);
  EXPECT_EQ(lean_check_lengths(nullptr).code, LEAN_INVALID_ARGUMENT);
  EXPECT_EQ(lean_explain_schedule(nullptr, &options_, LEAN_SCHEDULE_TEXT, nullptr, 0), 0U);
  lean_problem_init(nullptr);
  lean_options_init(nullptr);
  EXPECT_TRUE(built_.outputs_untouched());
}

TEST_F(CApi, R31_StructsOfOtherSizesAreTakenOnlyWhenTheirMeaningIsKnown) {
  for (const std::size_t size : {std::size_t{0}, std::size_t{8}, offsetof(lean_problem, reserved2)}) {
    problem_.struct_size = size;
    EXPECT_EQ(lean_decode(&problem_, &options_, &c_workspace_).code, LEAN_INVALID_ARGUMENT);
  }
  for (const std::size_t size : {std::size_t{4097}, std::size_t{1} << 31, SIZE_MAX}) {  // nothing behind the struct is looked at
    problem_.struct_size = size;
    EXPECT_EQ(lean_decode(&problem_, &options_, &c_workspace_).code, LEAN_INVALID_ARGUMENT);
  }
  for (std::size_t size = offsetof(lean_problem, alibi_sequence_stride) + 1; size < sizeof(lean_problem); ++size) {
    if (size % alignof(lean_problem) == 0) continue;  // else it ends inside a field
    problem_.struct_size = size;
    EXPECT_EQ(lean_decode(&problem_, &options_, &c_workspace_).code, LEAN_INVALID_ARGUMENT) << size;
  }
  for (const std::size_t size : {std::size_t{0}, std::size_t{3}, SIZE_MAX}) {
    lean_options options = options_;
    options.struct_size = size;
    EXPECT_EQ(lean_reset_workspace(&c_workspace_, &options).code, LEAN_INVALID_ARGUMENT);
    EXPECT_EQ(lean_sticky_status(&c_workspace_, &options).code, LEAN_INVALID_ARGUMENT);
  }
  EXPECT_EQ(std::string(lean_supports(&problem_, &options_).message).rfind("problem.struct_size = ", 0), 0U);
  {
    lean_options options = options_;
    options.struct_size = 7;
    lean_problem problem = problem_;
    problem.struct_size = sizeof(problem);
    EXPECT_STREQ(lean_supports(&problem, &options).message,
                 "options.struct_size = 7: too small: set it with the struct's _init function");
  }
  // A caller of a later release: more fields, of which none is used.
  struct {
    lean_problem known;
    std::int64_t later[2];
  } longer{problem_, {0, 0}};
  longer.known.struct_size = sizeof(longer);
  EXPECT_EQ(decode(longer.known, options_).code, LEAN_OK);
  longer.later[1] = 1;
  EXPECT_EQ(lean_decode(&longer.known, &options_, &c_workspace_).code, LEAN_UNSUPPORTED);
  problem_.struct_size = sizeof(problem_);
  options_.struct_size = 4;
  EXPECT_EQ(lean_decode(&problem_, &options_, &c_workspace_).code, LEAN_INVALID_ARGUMENT);
  // A caller of the first release: what was added since has its default, whatever lies behind the struct.
  static const float kSlopes[64] = {};
  options_.struct_size = sizeof(options_);
  problem_.alibi_slopes = kSlopes;
  problem_.alibi_sequence_stride = -1;
  EXPECT_EQ(lean_supports(&problem_, &options_).code, LEAN_INVALID_ARGUMENT);
  problem_.struct_size = offsetof(lean_problem, alibi_sequence_stride);
  EXPECT_EQ(lean_supports(&problem_, &options_).code, LEAN_OK);
  problem_.struct_size = sizeof(problem_), problem_.alibi_slopes = nullptr;
  EXPECT_EQ(options_.dependent_launch != 0, Options{}.dependent_launch);
  const lean_exchange exchange{};
  options_.exchange = &exchange;
  options_.struct_size = offsetof(lean_options, exchange);
  EXPECT_EQ(decode(problem_, options_).code, LEAN_OK);
  options_.struct_size = sizeof(options_);
  EXPECT_NE(lean_decode(&problem_, &options_, &c_workspace_).code, LEAN_OK);
}

TEST_F(CApi, R31_UnknownEnumeratorsAreRefused) {
  const auto refused = [&](auto change) {
    lean_problem problem = problem_;
    lean_options options = options_;
    change(problem, options);
    built_.poison_outputs();
    const lean_status status = decode(problem, options);
    EXPECT_TRUE(built_.outputs_untouched());
    EXPECT_NE(std::strstr(status.message, " = "), nullptr) << status.message;
    return status.code == LEAN_INVALID_ARGUMENT || status.code == LEAN_UNSUPPORTED;
  };
  for (const std::int32_t unknown : {-1, 99, INT32_MIN, INT32_MAX}) {
    EXPECT_TRUE(refused([&](lean_problem& p, lean_options&) { p.q.dtype = unknown; }));
    EXPECT_TRUE(refused([&](lean_problem& p, lean_options&) { p.o.dtype = unknown; }));
    EXPECT_TRUE(refused([&](lean_problem&, lean_options& o) { o.backend = unknown; }));
    EXPECT_TRUE(refused([&](lean_problem&, lean_options& o) { o.policy = unknown; }));
    EXPECT_TRUE(refused([&](lean_problem&, lean_options& o) { o.fixup = unknown; }));
    EXPECT_TRUE(refused([&](lean_problem&, lean_options& o) { o.determinism = unknown; }));
    EXPECT_TRUE(refused([&](lean_problem&, lean_options& o) { o.cpu_isa = unknown; }));
    EXPECT_EQ(lean_explain_schedule(&problem_, &options_, unknown, nullptr, 0), 0U);
    EXPECT_NE(lean_status_name(unknown), nullptr);
  }
}

/// Chance in every field that is no pointer: an answer, never a crash, and nothing beside the tensors is written. Strides
/// stay as they are, because their reach is the caller's word.
TEST_F(CApi, R31_RandomFieldsGiveAnAnswer) {
  Stream random(31);
  int refused = 0;
  const int calls = full_or_reduced(20000, 2000);
  for (int call = 0; call < calls; ++call) {
    lean_problem problem = problem_;
    lean_options options = options_;
    const auto chance = [&](std::int32_t& field) {
      if (random.chance(15))
        field = static_cast<std::int32_t>(random.chance(50) ? random.between(-2, 5) : random.between(INT32_MIN, INT32_MAX));
    };
    for (std::int32_t* field : {&problem.q.dtype, &problem.o.dtype, &problem.causal, &problem.page_tokens, &problem.window_left,
                                &problem.window_right, &problem.mask_dtype, &problem.mask_is_boolean, &problem.rotary_dim,
                                &problem.rotary_absolute, &problem.scales_per_head, &options.backend, &options.policy,
                                &options.splits, &options.chunk_tokens, &options.fixup, &options.determinism, &options.cpu_isa}) {
      chance(*field);
    }
    if (random.chance(10)) problem.struct_size = static_cast<std::size_t>(random.between(0, sizeof(lean_problem)));
    if (options.policy == LEAN_POLICY_LEAN) options.policy = static_cast<std::int32_t>(random.between(0, 3));
    if (options.backend == LEAN_CPU || options.backend == LEAN_CUDA) options.backend = options_.backend;  // whose memory it is
    const lean_status status = decode(problem, options);
    EXPECT_NE(lean_status_name(status.code), std::string("unknown"));
    refused += status.code == LEAN_OK ? 0 : 1;
  }
  EXPECT_TRUE(workspace_.intact() && built_.o_buffer().intact() && built_.lse_buffer().intact());
  EXPECT_GT(refused, calls / 4);
  EXPECT_LT(refused, calls);
}

TEST(CApiExchange, R47_WithoutAGpuEveryEntrySaysWhyOrWhatItWasGiven) {
  lean_exchange exchange;
  lean_exchange_init(&exchange);
  EXPECT_EQ(exchange.struct_size, sizeof(exchange));
  EXPECT_EQ(exchange.limit_ns, Exchange{}.limit_ns);
  EXPECT_EQ(exchange.device, -1);
  EXPECT_EQ(lean_exchange_bytes(2, 100, 128, LEAN_FLOAT16), exchange_bytes(2, 100, 128, DType::kFloat16));
  EXPECT_EQ(lean_exchange_bytes(17, 100, 128, LEAN_FLOAT16), 0U);
  EXPECT_EQ(lean_exchange_close(&exchange).code, LEAN_OK);
  const auto begins = [](const lean_status& status, const char* with) {
    return std::string(status.message).find(with) == 0 ? testing::AssertionSuccess()
                                                       : testing::AssertionFailure() << status.message;
  };
  lean_exchange_handle handle{};
  lean_exchanged_states states{};
  EXPECT_TRUE(begins(lean_exchange_create(&exchange, 2, 2, 1, &handle), "rank = 2: "));
  EXPECT_TRUE(begins(lean_exchange_create(&exchange, 0, 17, 1, &handle), "ranks = 17: "));
  EXPECT_TRUE(begins(lean_exchange_create(&exchange, 0, 2, 0, &handle), "memory_bytes = 0: "));
  EXPECT_TRUE(begins(lean_exchange_create(nullptr, 0, 2, 1, &handle), "exchange = 0: "));
  EXPECT_TRUE(begins(lean_exchange_open(&exchange, 1, &handle), "exchange.device = -1: "));
  EXPECT_TRUE(begins(lean_exchange_open(&exchange, 1, nullptr), "handle = 0: "));
  EXPECT_TRUE(begins(lean_exchange_join(&exchange, nullptr), "other = 0: "));
  EXPECT_TRUE(begins(lean_exchange_join(&exchange, &exchange), "exchange.device = -1: "));
  EXPECT_TRUE(begins(lean_exchange_clear(&exchange), "exchange.device = -1: "));
  EXPECT_TRUE(begins(lean_exchange_states(&exchange, nullptr, nullptr), "states = 0: "));
  EXPECT_TRUE(begins(lean_exchange_states(&exchange, &states, nullptr), "value_dim = 0: "));
  EXPECT_TRUE(begins(lean_exchange_status(&exchange), "exchange.fault = 0: "));
  EXPECT_TRUE(begins(lean_exchange_create(&exchange, 0, 2, SIZE_MAX, &handle), "memory_bytes = -1: "));
  lean_exchange written = exchange;  // over what create left
  written.device = 0;
  EXPECT_TRUE(begins(lean_exchange_create(&written, 0, 2, 1, &handle), "exchange.device = 0: holds memory already"));
  written.ranks = 100;
  EXPECT_TRUE(begins(lean_exchange_open(&written, 99, &handle), "exchange.ranks = 100: "));
  EXPECT_TRUE(begins(lean_exchange_clear(&written), "exchange.ranks = 100: "));
  EXPECT_TRUE(begins(lean_exchange_close(&written), "exchange.ranks = 100: "));
  written.ranks = 2;
  written.rank = -1;
  EXPECT_TRUE(begins(lean_exchange_close(&written), "exchange.rank = -1: "));
  written.rank = 0;
  EXPECT_TRUE(begins(lean_exchange_open(&written, 1, &handle), "exchange.memory[0] = 0: "));
  written.memory[0] = &handle;
  EXPECT_TRUE(begins(lean_exchange_clear(&written), "exchange.fault = 0: "));
  lean_exchange small = exchange;
  small.struct_size = 8;
  EXPECT_TRUE(begins(lean_exchange_status(&small), "exchange.struct_size = 8: "));
}

TEST(CApiExchange, R47_LengthsOfAShardAreThoseOfTheCppInterface) {
  const std::int32_t tokens[] = {0, 1, 16, 17, 100};
  std::int32_t held[5] = {}, expected[5] = {};
  const lean_token_shard shard{.rank = 1, .ranks = 2, .block_tokens = 16};
  ASSERT_EQ(lean_shard_lengths(tokens, held, 5, &shard, nullptr).code, LEAN_OK);
  ASSERT_TRUE(shard_lengths(tokens, expected, 5, {.rank = 1, .ranks = 2, .block_tokens = 16}, {}).ok());
  for (int i = 0; i < 5; ++i) EXPECT_EQ(held[i], expected[i]);
  EXPECT_EQ(held[3], 1);
  EXPECT_EQ(lean_shard_lengths(tokens, held, 5, nullptr, nullptr).code, LEAN_INVALID_ARGUMENT);
}

}  // namespace
}  // namespace lean::support
