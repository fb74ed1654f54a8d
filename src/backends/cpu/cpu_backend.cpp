#include "backends/cpu/cpu_backend.hpp"

#include <atomic>
#include <cstring>
#include <memory>

#include "backends/cpu/executor.hpp"
#include "backends/cpu/score_rules.hpp"
#include "backends/cpu/tile_kernels.hpp"
#include "backends/cpu/worker.hpp"
#include "base/int_math.hpp"
#include "base/message.hpp"
#include "fixup/workspace.hpp"
#include "fixup/workspace_size.hpp"
#include "problem/append.hpp"
#include "problem/pages.hpp"
#include "problem/preconditions.hpp"
#include "schedule/plan.hpp"
#include "schedule/segments.hpp"
#include "softmax/scale.hpp"

namespace lean::cpu {
namespace {

using P = const Problem&;

/// K and V of one LeanTile: large enough to amortise a tile's fixed work, small enough for the L2 (sweep in docs/schedule.md).
constexpr std::int64_t kTileBytes = 64 * 1024;
constexpr std::int32_t kMinTileTokens = 16;
constexpr std::int32_t kMaxTileTokens = 256;

std::int32_t pad(std::int32_t dims) noexcept { return static_cast<std::int32_t>(round_up(dims, kLaneMultiple)); }

/// Everything workspace_size() and decode() must agree on.
struct Sizes {
  WorkerMemoryLayout memory;
  fixup::WorkspaceLayout workspace;
  std::int32_t workers = 1;
  std::int64_t batch = 0;

  // Scratch: the fix-up's, the lengths, what each worker has done, the memory of each worker.
  [[nodiscard]] std::int64_t lengths_begin() const noexcept { return workspace.scratch_bytes(); }
  [[nodiscard]] std::int64_t done_begin() const noexcept { return lengths_begin() + array_bytes<Sequence>(batch); }
  [[nodiscard]] std::int64_t memory_begin() const noexcept { return done_begin() + array_bytes<Done>(workers); }
  [[nodiscard]] std::int64_t scratch_bytes() const noexcept { return memory_begin() + workers * memory.bytes(); }

 private:
  template <typename T>
  [[nodiscard]] static std::int64_t array_bytes(std::int64_t count) noexcept {
    return round_up(count * static_cast<std::int64_t>(sizeof(T)), fixup::kAlignmentBytes);
  }
};

Sizes sizes_of(P problem, const Options& options) noexcept {
  const tile::TileConfig config = select_tile(problem);
  Sizes sizes;
  sizes.workers = worker_count(options);
  sizes.batch = problem.batch;
  sizes.workspace = fixup::workspace_layout(problem, options.policy, config, sizes.workers);
  sizes.memory = {.config = config,
                  .packs_tiles = problem.k.strides.dim != 1 || problem.v.strides.dim != 1,
                  .tables = hides_tokens(problem.scores) || is_paged(problem.pages) || appends(problem)};
  if (appends(problem)) sizes.memory.new_rows = static_cast<std::int32_t>(min_of(config.tile_tokens, problem.q_tokens));
  if (options.policy.kind == Policy::Kind::kFixedChunk) sizes.memory.accumulators = sizes.workspace.nodes_per_slot + 1;
  return sizes;
}

/// Holds the workspace for one call: refuses a second user and counters an aborted call left behind.
class WorkspaceLease {
 public:
  explicit WorkspaceLease(const fixup::Slots& slots) noexcept : owner_(slots.header().owner) {
    if (owner_.exchange(1, std::memory_order_acquire) != 0) {
      status_ = refuse(StatusCode::kWorkspaceInUse, "workspace.state", 1,
                       "must not serve two calls in flight; or reset_workspace() after an aborted one");
      return;
    }
    held_ = true;
    for (std::int64_t i = 0; i < slots.layout.counters(); ++i) {
      if (slots.counters()[i] != 0) {
        status_ = refuse(StatusCode::kWorkspaceDirty, "workspace.state", slots.counters()[i],
                         "every counter must be 0 between calls: zero the state or call reset_workspace()");
        return;
      }
    }
  }
  ~WorkspaceLease() {
    if (held_) owner_.store(0, std::memory_order_release);
  }
  WorkspaceLease(const WorkspaceLease&) = delete;
  WorkspaceLease& operator=(const WorkspaceLease&) = delete;

  [[nodiscard]] const Status& status() const noexcept { return status_; }

 private:
  std::atomic_ref<fixup::Counter> owner_;
  bool held_ = false;
  Status status_;
};

/// A word of an array that another thread may write at the same time.
struct OneLoad {
  [[nodiscard]] static std::int32_t load(const std::int32_t* at) noexcept {
    return std::atomic_ref<std::int32_t>(*const_cast<std::int32_t*>(at)).load(std::memory_order_relaxed);
  }
};

/// Reads the lengths of all sequences; one sticky code for those that had to be clamped.
Lengths read_lengths(P problem, std::byte* memory, fixup::StateHeader& header) noexcept {
  const BasicLengthSource<true, OneLoad> source(problem);
  auto* const sequences = reinterpret_cast<Sequence*>(memory);
  bool clamped = false;
  for (std::int64_t b = 0; b < problem.batch; ++b) {
    std::construct_at(sequences + b, source(b));
    clamped = clamped || sequences[b].clamped;
  }
  if (clamped && header.sticky_code == 0) header.sticky_code = static_cast<fixup::Counter>(StatusCode::kBadLengths);
  return {sequences};
}

/// Runs every worker of the call once. Codes: ok, backend_error.
Status for_each_worker(const Executor& executor, const Call& call, void (*work)(const Call&, std::int32_t) noexcept) noexcept {
  struct Argument {
    const Call* call;
    void (*work)(const Call&, std::int32_t) noexcept;
  } argument{&call, work};
  try {
    executor.run(
        executor.context, call.plan.workers,
        [](void* opaque, std::int32_t worker) {
          const auto* a = static_cast<const Argument*>(opaque);
          a->work(*a->call, worker);
        },
        &argument);
  } catch (...) {
    return refuse(StatusCode::kBackendError, "options.executor", call.plan.workers,
                  "workers were to run, and run() threw an exception; reset_workspace() before the next call");
  }
  return {};
}

/// Every tile computed once, every output written once: what is not computed is never passed over in silence. Codes: ok, backend_error.
Status check_done(const Call& call) noexcept {
  Done sum;
  for (std::int32_t worker = 0; worker < call.plan.workers; ++worker) {
    sum.tiles += call.done[worker].tiles;
    sum.outputs += call.done[worker].outputs;
  }
  const auto& line = call.line.sums();
  if (sum.tiles == line.tiles && sum.outputs == line.outputs) return {};
  Status status{.code = StatusCode::kBackendError};
  std::snprintf(status.message, sizeof(status.message),
                "outputs written = %" PRId64 " of %" PRId64 ", tiles computed = %" PRId64 " of %" PRId64
                ": the executor must run every worker exactly once before it returns; reset_workspace() before the next call",
                sum.outputs, line.outputs, sum.tiles, line.tiles);
  return status;
}

}  // namespace

std::int32_t worker_count(const Options& options) noexcept {
  if (options.workers > 0) return options.workers;
  const std::int32_t threads = executor_of(options).worker_count;
  return threads < Options::kMaxWorkers ? threads : Options::kMaxWorkers;
}

tile::TileConfig select_tile(const Problem& problem) noexcept {
  const std::int32_t value_dim = value_dim_of(problem);
  const std::int64_t token_bytes = (problem.head_dim + value_dim) * bytes_of(problem.k.dtype);
  const std::int64_t tokens = kTileBytes / token_bytes / kLaneMultiple * kLaneMultiple;
  return {.q_dtype = problem.q.dtype,
          .kv_dtype = problem.k.dtype,
          .head_dim = pad(problem.head_dim),
          .value_dim = pad(value_dim),
          .tile_tokens = static_cast<std::int32_t>(clamp_to(tokens, kMinTileTokens, kMaxTileTokens)),
          .q_rows = tile::row_block_for(schedule::row_capacity(problem))};
}

Status supports(const Problem& problem, const Options& options) noexcept {
  const Status pairing = fixup::check_pairing(problem, options, select_tile(problem), worker_count(options));
  if (!pairing.ok()) return pairing;
  if (!cpu_isa_available(options.cpu_isa)) {
    return refuse(StatusCode::kUnsupported, "options.cpu_isa", static_cast<std::int64_t>(options.cpu_isa),
                  "this machine does not run it");
  }
  if (options.dependent_launch) {
    return refuse(StatusCode::kUnsupported, "options.dependent_launch", 1, "the CPU backend launches nothing");
  }
  const Executor& executor = executor_of(options);
  if (executor.run == nullptr || executor.worker_count < 1) {
    return refuse(StatusCode::kInvalidArgument, "options.executor.worker_count", executor.worker_count,
                  "run must be given, worker_count 1 or more");
  }
  if (options.fixup == Fixup::kHostBlock && !executor.descending_or_concurrent) {
    return refuse(
        StatusCode::kUnsupported, "options.fixup", static_cast<std::int64_t>(options.fixup),
        "host_block waits for higher-numbered workers: the executor must run them at the same time or in descending order");
  }
  return {};
}

WorkspaceSize workspace_size(const Problem& problem, const Options& options) noexcept {
  const Sizes sizes = sizes_of(problem, options);
  return {.status = {},
          .state_bytes = static_cast<std::size_t>(sizes.workspace.state_bytes()),
          .scratch_bytes = static_cast<std::size_t>(sizes.scratch_bytes())};
}

Status decode(const Problem& problem, const Options& options, const Workspace& workspace) noexcept {
  const Sizes sizes = sizes_of(problem, options);
  const fixup::Slots slots{sizes.workspace, static_cast<std::byte*>(workspace.state), static_cast<std::byte*>(workspace.scratch)};
  const WorkspaceLease lease(slots);
  if (!lease.status().ok()) return lease.status();

  const tile::TileConfig& config = sizes.memory.config;
  const Lengths lengths = read_lengths(problem, slots.scratch + sizes.lengths_begin(), slots.header());
  Line line(lengths, schedule::line_shape_of(problem, config.q_rows, config.tile_tokens), cost_model(config),
            schedule::measure_of(options.policy.kind));
  line.build();
  if (line.total() == 0) return {};
  const schedule::Plan plan =
      schedule::make_plan(line.sums(), options.policy, cost_model(config), config.tile_tokens, sizes.workers);
  const Call call{.problem = problem,
                  .line = line,
                  .plan = plan,
                  .kernels = kernels_for(isa_of(options, problem)),
                  .fixup = options.fixup,
                  .slots = slots,
                  .memory = sizes.memory,
                  .worker_memory = slots.scratch + sizes.memory_begin(),
                  .done = reinterpret_cast<Done*>(slots.scratch + sizes.done_begin()),
                  .log2_scale = softmax::log2_scale(problem.scores.scale, problem.head_dim)};
  const Executor& executor = executor_of(options);
  std::uninitialized_value_construct_n(call.done, plan.workers);
  if (const Status status = for_each_worker(executor, call, run_worker); !status.ok()) return status;
  if (options.fixup == Fixup::kTwoKernels) {
    if (const Status status = for_each_worker(executor, call, merge_shared_outputs); !status.ok()) return status;
  }
  return check_done(call);
}

Status clear_state(const Workspace& workspace, const Options&) noexcept {
  std::memset(workspace.state, 0, workspace.state_bytes);
  return {};
}

Status read_sticky(const Workspace& workspace, const Options&, StatusCode& code) noexcept {
  code = static_cast<StatusCode>(static_cast<const fixup::StateHeader*>(workspace.state)->sticky_code);
  return {};
}

}  // namespace lean::cpu
