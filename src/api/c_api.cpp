// The C interface: copies the caller's structs into the C++ ones, field by field, and calls the C++ interface.
// Enumerators pass through as integers; the preconditions refuse unknown ones with the argument's name.
#include <cstring>
#include <initializer_list>

#include "base/message.hpp"
#include "lean/dtypes.hpp"
#include "lean/lean.h"
#include "lean/lean.hpp"

namespace lean {
namespace {

/// Sizes of the structs in the first release: what every caller has at least.
constexpr std::size_t kProblemBytesV0 = offsetof(lean_problem, reserved2) + sizeof(std::int32_t);
constexpr std::size_t kOptionsBytesV0 = offsetof(lean_options, stream) + sizeof(void*);
/// More than a struct of any release has: a larger size was never set, and is not to be looked through.
constexpr std::size_t kMostBytes = 4096;
static_assert(sizeof(lean_problem) <= kMostBytes && sizeof(lean_options) <= kMostBytes && sizeof(lean_exchange) <= kMostBytes);
static_assert(LEAN_MAX_RANKS == Exchange::kMaxRanks && sizeof(lean_exchange_handle) == sizeof(ExchangeHandle));

static_assert(sizeof(lean_status) == sizeof(Status));
static_assert(LEAN_BACKEND_ERROR == static_cast<int>(StatusCode::kBackendError));
static_assert(LEAN_FLOAT8_E5M2 == static_cast<int>(DType::kFloat8E5M2) && LEAN_FLOAT8_E5M2 + 1 == kDTypeCount);
static_assert(LEAN_POLICY_FIXED_CHUNK == static_cast<int>(Policy::Kind::kFixedChunk));
static_assert(LEAN_HOST_BLOCK == static_cast<int>(Fixup::kHostBlock));
static_assert(LEAN_NOT_GUARANTEED == static_cast<int>(Determinism::kNotGuaranteed));
static_assert(LEAN_SCHEDULE_SVG == static_cast<int>(ScheduleFormat::kSvg));

lean_status to_c(const Status& status) noexcept {
  lean_status c{};
  c.code = static_cast<std::int32_t>(status.code);
  std::memcpy(c.message, status.message, sizeof(c.message));
  return c;
}

/// What messages call a struct and its size.
struct StructName {
  const char* whole;
  const char* size;
};
constexpr StructName kProblemName{"problem", "problem.struct_size"};
constexpr StructName kOptionsName{"options", "options.struct_size"};
constexpr StructName kExchangeName{"exchange", "exchange.struct_size"};
constexpr StructName kOtherName{"other", "other.struct_size"};

/// A caller's struct of any release, with defaults for fields its header did not have.
template <typename TStruct>
Status adopt(const StructName& name, const TStruct* given, std::size_t oldest_bytes, TStruct& adopted) noexcept {
  if (given == nullptr) return refuse(StatusCode::kInvalidArgument, name.whole, 0, "must not be null");
  const std::size_t bytes = given->struct_size;
  if (bytes < oldest_bytes) {
    return refuse(StatusCode::kInvalidArgument, name.size, static_cast<std::int64_t>(bytes),
                  "too small: set it with the struct's _init function");
  }
  if (bytes > kMostBytes) {
    return refuse(StatusCode::kInvalidArgument, name.size, static_cast<std::int64_t>(bytes),
                  "too large: set it with the struct's _init function");
  }
  if (bytes % alignof(TStruct) != 0) {  // it would end inside a field
    return refuse(StatusCode::kInvalidArgument, name.size, static_cast<std::int64_t>(bytes),
                  "no struct has that size: set it with the struct's _init function");
  }
  const auto* raw = reinterpret_cast<const unsigned char*>(given);
  for (std::size_t i = sizeof(TStruct); i < bytes; ++i) {
    if (raw[i] != 0) {
      return refuse(StatusCode::kUnsupported, name.size, static_cast<std::int64_t>(bytes),
                    "the caller's header is newer and uses a field this library does not know");
    }
  }
  std::memcpy(&adopted, given, bytes < sizeof(TStruct) ? bytes : sizeof(TStruct));
  return {};
}

Strides strides_of(const lean_tensor& t) noexcept { return {t.sequence_stride, t.head_stride, t.token_stride, t.dim_stride}; }
TensorView input(const lean_tensor& t) noexcept { return {t.data, static_cast<DType>(t.dtype), strides_of(t)}; }
OutputView output(const lean_tensor& t) noexcept { return {t.data, static_cast<DType>(t.dtype), strides_of(t)}; }

Scores scores_of(const lean_problem& c) noexcept {
  return {.scale = c.scale,
          .causal = c.causal != 0,
          .window_left = c.window_left,
          .window_right = c.window_right,
          .softcap = c.softcap,
          .alibi_slopes = c.alibi_slopes,
          .sinks = c.sinks,
          .mask = c.mask,
          .mask_dtype = static_cast<DType>(c.mask_dtype),
          .mask_is_boolean = c.mask_is_boolean != 0,
          .mask_strides = {c.mask_sequence_stride, c.mask_head_stride, c.mask_query_stride, c.mask_key_stride},
          .tree_mask = c.tree_mask,
          .alibi_sequence_stride = c.alibi_sequence_stride};
}

Problem to_cpp(const lean_problem& c) noexcept {
  return {.batch = c.batch,
          .q_heads = c.q_heads,
          .kv_heads = c.kv_heads,
          .head_dim = c.head_dim,
          .value_dim = c.value_dim,
          .q = input(c.q),
          .k = input(c.k),
          .v = input(c.v),
          .o = output(c.o),
          .lse = {c.lse, c.lse_sequence_stride, c.lse_head_stride, c.lse_token_stride},
          .q_tokens = c.q_tokens,
          .cu_q_tokens = c.cu_q_tokens,
          .total_q_tokens = c.total_q_tokens,
          .kv_capacity = c.kv_capacity,
          .kv_lengths = c.kv_lengths,
          .kv_left_pad = c.kv_left_pad,
          .cu_kv_tokens = c.cu_kv_tokens,
          .total_kv_tokens = c.total_kv_tokens,
          .pages = {c.page_tokens, c.page_count, c.block_table, c.block_table_stride, c.page_indptr, c.page_indices},
          .scores = scores_of(c),
          .append = {input(c.append_k), input(c.append_v), c.rotary_cos, c.rotary_sin, c.rotary_dim, c.rotary_interleaved != 0,
                     c.rotary_absolute != 0, c.append_cached_lengths},
          .k_scales = c.k_scales,
          .v_scales = c.v_scales,
          .scales_per_head = c.scales_per_head != 0};
}

Options to_cpp(const lean_options& c) noexcept {
  return {.backend = static_cast<Backend>(c.backend),
          .policy = {static_cast<Policy::Kind>(c.policy), c.splits, c.chunk_tokens},
          .fixup = static_cast<Fixup>(c.fixup),
          .determinism = static_cast<Determinism>(c.determinism),
          .workers = c.workers,
          .cpu_isa = static_cast<CpuIsa>(c.cpu_isa),
          .stream = c.stream,
          .dependent_launch = c.dependent_launch != 0,
          .check_workspace = c.check_workspace != 0};
}

/// An exchange as the C++ interface takes it; `status` says why not.
struct AdoptedExchange {
  Status status;
  Exchange exchange;

  AdoptedExchange() noexcept = default;
  AdoptedExchange(const StructName& name, const lean_exchange* exchange_c) noexcept {
    lean_exchange e;
    lean_exchange_init(&e);
    status = adopt(name, exchange_c, sizeof(lean_exchange), e);
    if (!status.ok()) return;
    exchange = {.rank = e.rank,
                .ranks = e.ranks,
                .memory_bytes = e.memory_bytes,
                .limit_ns = e.limit_ns,
                .fault = e.fault,
                .device = e.device,
                .opened = e.opened};
    std::memcpy(exchange.memory, e.memory, sizeof(e.memory));
  }
};

/// All but the size, which is the caller's.
void write(const Exchange& from, lean_exchange& to) noexcept {
  to.rank = from.rank;
  to.ranks = from.ranks;
  std::memcpy(to.memory, from.memory, sizeof(to.memory));
  to.memory_bytes = from.memory_bytes;
  to.limit_ns = from.limit_ns;
  to.fault = from.fault;
  to.device = from.device;
  to.opened = from.opened;
}

/// `change(Exchange&)` of a caller's, written back whatever came of it.
template <typename TChange>
lean_status changed(lean_exchange* exchange_c, TChange&& change) noexcept {
  AdoptedExchange adopted(kExchangeName, exchange_c);
  if (!adopted.status.ok()) return to_c(adopted.status);
  const Status status = change(adopted.exchange);
  write(adopted.exchange, *exchange_c);
  return to_c(status);
}

/// A problem and options as the C++ interface takes them; `status` says why not.
struct Adopted {
  Status status;
  Problem problem;
  Options options;
  Executor executor;
  AdoptedExchange exchange;

  Adopted(const lean_problem* problem_c, const lean_options* options_c) noexcept {
    lean_problem p;
    lean_options o;
    lean_problem_init(&p);
    lean_options_init(&o);
    status = adopt(kProblemName, problem_c, kProblemBytesV0, p);
    if (status.ok()) status = adopt(kOptionsName, options_c, kOptionsBytesV0, o);
    if (!status.ok()) return;
    problem = to_cpp(p);
    options = to_cpp(o);
    if (o.executor != nullptr) {
      executor = {o.executor->context, o.executor->run, o.executor->worker_count, o.executor->descending_or_concurrent != 0};
      options.executor = &executor;
    }
    if (o.exchange == nullptr) return;
    exchange = AdoptedExchange(kExchangeName, o.exchange);
    status = exchange.status;
    options.exchange = &exchange.exchange;
  }
  Adopted(const Adopted&) = delete;
  Adopted& operator=(const Adopted&) = delete;
};

/// Options alone, as the calls about a workspace take them; null means the defaults.
struct AdoptedOptions {
  Status status;
  Options options;

  explicit AdoptedOptions(const lean_options* options_c) noexcept {
    lean_options o;
    lean_options_init(&o);
    if (options_c != nullptr) status = adopt(kOptionsName, options_c, kOptionsBytesV0, o);
    if (status.ok()) options = to_cpp(o);
  }
};

Workspace to_cpp(const lean_workspace* c) noexcept {
  return c == nullptr ? Workspace{} : Workspace{c->state, c->state_bytes, c->scratch, c->scratch_bytes};
}

}  // namespace
}  // namespace lean

extern "C" {

const char* lean_version(void) { return LEAN_VERSION_STRING; }

const char* lean_status_name(std::int32_t code) { return lean::name_of(static_cast<lean::StatusCode>(code)); }

void lean_problem_init(lean_problem* problem) {
  if (problem == nullptr) return;
  std::memset(problem, 0, sizeof(*problem));
  problem->struct_size = sizeof(*problem);
  problem->q_tokens = 1;
  problem->window_left = -1;
  problem->window_right = -1;
  for (lean_tensor* t : {&problem->q, &problem->k, &problem->v, &problem->o, &problem->append_k, &problem->append_v})
    t->dim_stride = 1;
}

void lean_options_init(lean_options* options) {
  if (options == nullptr) return;
  std::memset(options, 0, sizeof(*options));
  options->struct_size = sizeof(*options);
  options->dependent_launch = lean::Options{}.dependent_launch ? 1 : 0;
}

lean_status lean_supports(const lean_problem* problem, const lean_options* options) {
  const lean::Adopted call(problem, options);
  return lean::to_c(call.status.ok() ? lean::supports(call.problem, call.options) : call.status);
}

lean_status lean_workspace_size(const lean_problem* problem, const lean_options* options, std::size_t* state_bytes,
                                std::size_t* scratch_bytes) {
  const lean::Adopted call(problem, options);
  if (!call.status.ok()) return lean::to_c(call.status);
  if (state_bytes == nullptr || scratch_bytes == nullptr) {
    return lean::to_c(lean::refuse(lean::StatusCode::kInvalidArgument, "state_bytes, scratch_bytes", 0, "must not be null"));
  }
  const lean::WorkspaceSize size = lean::workspace_size(call.problem, call.options);
  *state_bytes = size.state_bytes;
  *scratch_bytes = size.scratch_bytes;
  return lean::to_c(size.status);
}

lean_status lean_decode(const lean_problem* problem, const lean_options* options, const lean_workspace* workspace) {
  const lean::Adopted call(problem, options);
  if (!call.status.ok()) return lean::to_c(call.status);
  return lean::to_c(lean::decode(call.problem, call.options, lean::to_cpp(workspace)));
}

lean_status lean_reset_workspace(const lean_workspace* workspace, const lean_options* options) {
  const lean::AdoptedOptions adopted(options);
  return lean::to_c(adopted.status.ok() ? lean::reset_workspace(lean::to_cpp(workspace), adopted.options) : adopted.status);
}

lean_status lean_sticky_status(const lean_workspace* workspace, const lean_options* options) {
  const lean::AdoptedOptions adopted(options);
  return lean::to_c(adopted.status.ok() ? lean::sticky_status(lean::to_cpp(workspace), adopted.options) : adopted.status);
}

lean_status lean_check_lengths(const lean_problem* problem) {
  lean_options options;
  lean_options_init(&options);
  const lean::Adopted call(problem, &options);
  return lean::to_c(call.status.ok() ? lean::check_lengths(call.problem) : call.status);
}

lean_status lean_merge_states(void* o_a, float* lse_a, const void* o_b, const float* lse_b, std::int64_t rows,
                              std::int32_t value_dim, std::int32_t dtype, const lean_options* options) {
  const lean::AdoptedOptions adopted(options);
  if (!adopted.status.ok()) return lean::to_c(adopted.status);
  return lean::to_c(lean::merge_states(o_a, lse_a, o_b, lse_b, rows, value_dim, static_cast<lean::DType>(dtype), adopted.options));
}

void lean_exchange_init(lean_exchange* exchange) {
  if (exchange == nullptr) return;
  std::memset(exchange, 0, sizeof(*exchange));
  exchange->struct_size = sizeof(*exchange);
  lean::write(lean::Exchange{}, *exchange);
}

std::size_t lean_exchange_bytes(std::int32_t ranks, std::int64_t rows, std::int32_t value_dim, std::int32_t dtype) {
  return lean::exchange_bytes(ranks, rows, value_dim, static_cast<lean::DType>(dtype));
}

lean_status lean_exchange_create(lean_exchange* exchange, std::int32_t rank, std::int32_t ranks, std::size_t memory_bytes,
                                 lean_exchange_handle* handle) {
  return lean::changed(exchange, [&](lean::Exchange& e) {
    lean::ExchangeHandle told;
    const std::int64_t limit_ns = e.limit_ns;
    const lean::Status status = lean::create_exchange(rank, ranks, memory_bytes, e, &told);
    e.limit_ns = limit_ns;
    if (status.ok() && handle != nullptr) std::memcpy(handle->bytes, told.bytes, sizeof(told.bytes));
    return status;
  });
}

lean_status lean_exchange_open(lean_exchange* exchange, std::int32_t rank, const lean_exchange_handle* handle) {
  if (handle == nullptr) return lean::to_c(lean::refuse(lean::StatusCode::kInvalidArgument, "handle", 0, "must not be null"));
  lean::ExchangeHandle given;
  std::memcpy(given.bytes, handle->bytes, sizeof(given.bytes));
  return lean::changed(exchange, [&](lean::Exchange& e) { return lean::open_exchange(e, rank, given); });
}

lean_status lean_exchange_join(lean_exchange* exchange, const lean_exchange* other) {
  const lean::AdoptedExchange adopted(lean::kOtherName, other);
  if (!adopted.status.ok()) return lean::to_c(adopted.status);
  return lean::changed(exchange, [&](lean::Exchange& e) { return lean::join_exchange(e, adopted.exchange); });
}

lean_status lean_exchange_clear(lean_exchange* exchange) { return lean::changed(exchange, lean::clear_exchange); }

lean_status lean_exchange_close(lean_exchange* exchange) { return lean::changed(exchange, lean::close_exchange); }

lean_status lean_exchange_states(const lean_exchange* exchange, const lean_exchanged_states* states, const lean_options* options) {
  const lean::AdoptedExchange adopted(lean::kExchangeName, exchange);
  const lean::AdoptedOptions adopted_options(options);
  if (!adopted.status.ok()) return lean::to_c(adopted.status);
  if (!adopted_options.status.ok()) return lean::to_c(adopted_options.status);
  if (states == nullptr) return lean::to_c(lean::refuse(lean::StatusCode::kInvalidArgument, "states", 0, "must not be null"));
  const lean::ExchangedStates given{.o = states->o,
                                    .lse = states->lse,
                                    .merged_o = states->merged_o,
                                    .merged_lse = states->merged_lse,
                                    .rows = states->rows,
                                    .value_dim = states->value_dim,
                                    .dtype = static_cast<lean::DType>(states->dtype)};
  return lean::to_c(lean::exchange_states(adopted.exchange, given, adopted_options.options));
}

lean_status lean_exchange_status(const lean_exchange* exchange) {
  const lean::AdoptedExchange adopted(lean::kExchangeName, exchange);
  return lean::to_c(adopted.status.ok() ? lean::exchange_status(adopted.exchange) : adopted.status);
}

lean_status lean_shard_lengths(const std::int32_t* tokens, std::int32_t* held, std::int64_t count, const lean_token_shard* shard,
                               const lean_options* options) {
  const lean::AdoptedOptions adopted(options);
  if (!adopted.status.ok()) return lean::to_c(adopted.status);
  if (shard == nullptr) return lean::to_c(lean::refuse(lean::StatusCode::kInvalidArgument, "shard", 0, "must not be null"));
  const lean::TokenShard given{.rank = shard->rank, .ranks = shard->ranks, .block_tokens = shard->block_tokens};
  return lean::to_c(lean::shard_lengths(tokens, held, count, given, adopted.options));
}

std::size_t lean_explain_schedule(const lean_problem* problem, const lean_options* options, std::int32_t format, char* buffer,
                                  std::size_t buffer_bytes) {
  const lean::Adopted call(problem, options);
  if (!call.status.ok()) return 0;
  try {
    return lean::explain_schedule(call.problem, call.options, static_cast<lean::ScheduleFormat>(format), buffer, buffer_bytes);
  } catch (...) {  // out of memory: the one call that allocates
    return 0;
  }
}

}  // extern "C"
