#include "backends/cpu/cpu_backend.hpp"

#include <array>
#include <atomic>

#include "backends/cpu/executor.hpp"
#include "backends/cpu/tile_kernels.hpp"
#include "backends/cpu/worker.hpp"
#include "base/int_math.hpp"
#include "base/message.hpp"
#include "fixup/chunk_tree.hpp"
#include "fixup/workspace.hpp"
#include "problem/preconditions.hpp"
#include "schedule/plan.hpp"
#include "schedule/segments.hpp"
#include "softmax/scale.hpp"

namespace lean::cpu {
namespace {

using P = const Problem&;

/// What this backend refuses, one row a feature.
constexpr auto kUnsupported = StatusCode::kUnsupported;
constexpr std::array kRefused = {
    Precondition<Problem>{kUnsupported, "pages.page_tokens", "the CPU backend reads contiguous and ragged K/V only: must be 0",
                          [](P p) noexcept -> std::int64_t { return p.pages.page_tokens; },
                          [](P p) noexcept { return p.pages.page_tokens == 0; }},
    Precondition<Problem>{kUnsupported, "k.dtype", "the CPU backend reads float32, float16 and bfloat16 K/V",
                          [](P p) noexcept { return static_cast<std::int64_t>(p.k.dtype); },
                          [](P p) noexcept { return bytes_of(p.k.dtype) >= 2; }},
    Precondition<Problem>{kUnsupported, "scores.window_left", "the CPU backend has no sliding window: must be -1",
                          [](P p) noexcept -> std::int64_t { return p.scores.window_left; },
                          [](P p) noexcept { return p.scores.window_left == -1; }},
    Precondition<Problem>{kUnsupported, "scores.window_right", "the CPU backend has no sliding window: must be -1",
                          [](P p) noexcept -> std::int64_t { return p.scores.window_right; },
                          [](P p) noexcept { return p.scores.window_right == -1; }},
    Precondition<Problem>{kUnsupported, "scores.softcap", "the CPU backend has no softcap: must be 0", nullptr,
                          [](P p) noexcept { return p.scores.softcap == 0.0F; },
                          [](P p) noexcept -> double { return p.scores.softcap; }},
    Precondition<Problem>{kUnsupported, "scores.alibi_slopes", "the CPU backend has no ALiBi: must be null",
                          [](P p) noexcept -> std::int64_t { return p.scores.alibi_slopes != nullptr; },
                          [](P p) noexcept { return p.scores.alibi_slopes == nullptr; }},
    Precondition<Problem>{kUnsupported, "scores.sinks", "the CPU backend has no attention sinks: must be null",
                          [](P p) noexcept -> std::int64_t { return p.scores.sinks != nullptr; },
                          [](P p) noexcept { return p.scores.sinks == nullptr; }},
    Precondition<Problem>{kUnsupported, "scores.mask", "the CPU backend has no mask: must be null",
                          [](P p) noexcept -> std::int64_t { return p.scores.mask != nullptr; },
                          [](P p) noexcept { return p.scores.mask == nullptr; }},
    Precondition<Problem>{kUnsupported, "scores.tree_mask", "the CPU backend has no tree mask: must be null",
                          [](P p) noexcept -> std::int64_t { return p.scores.tree_mask != nullptr; },
                          [](P p) noexcept { return p.scores.tree_mask == nullptr; }},
    Precondition<Problem>{kUnsupported, "append.k.data", "the CPU backend does not append to the cache: must be null",
                          [](P p) noexcept -> std::int64_t { return p.append.k.data != nullptr; },
                          [](P p) noexcept { return p.append.k.data == nullptr; }},
};

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

  [[nodiscard]] std::int64_t scratch_bytes() const noexcept { return workspace.scratch_bytes() + workers * memory.bytes(); }
};

/// A bound that keeps every byte count of the workspace within 63 bits.
constexpr std::int64_t kMaxSlots = std::int64_t{1} << 40;

/// Slots for any lengths within the capacities: the worst case of schedule::slot_count.
std::int64_t slot_capacity(P problem, const Policy& policy, const tile::TileConfig& config, std::int32_t workers) noexcept {
  if (schedule::measure_of(policy.kind) == schedule::Measure::kCost) return 2 * std::int64_t{workers};
  if (policy.kind == Policy::Kind::kDataParallel || policy.splits == 1) return 0;
  const std::int64_t rows = std::int64_t{problem.q_tokens} * (problem.q_heads / problem.kv_heads);
  const std::int64_t outputs = problem.batch * problem.kv_heads * ceil_div(rows, config.q_rows);
  if (policy.splits > 0) return outputs * policy.splits;
  // FlashDecoding's rule splits only while outputs < 0.8 workers, into at most min(kMaxSplits, workers).
  return min_of(outputs, std::int64_t{workers} * 8 / 10) * min_of(Policy::kMaxSplits, workers);
}

Sizes sizes_of(P problem, const Options& options) noexcept {
  const tile::TileConfig config = select_tile(problem);
  Sizes sizes;
  sizes.workers = worker_count(options);
  sizes.workspace = {.slots = slot_capacity(problem, options.policy, config, sizes.workers),
                     .second_bank = sizes.workers > fixup::kMaxOneLevel || options.policy.splits > fixup::kMaxOneLevel,
                     .partial = {config.q_rows, config.value_dim}};
  sizes.memory = {.config = config, .packs_tiles = problem.k.strides.dim != 1 || problem.v.strides.dim != 1};
  if (options.policy.kind == Policy::Kind::kFixedChunk) {
    const std::int64_t chunk_tokens = schedule::chunk_tiles_of(options.policy, config.tile_tokens) * config.tile_tokens;
    sizes.workspace.nodes_per_slot = fixup::max_chunk_nodes(ceil_div(problem.kv_capacity, chunk_tokens));
    sizes.memory.accumulators = sizes.workspace.nodes_per_slot + 1;
  }
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

/// One sticky code for lengths that had to be clamped.
void report_clamped(P problem, const LengthSource& lengths, fixup::StateHeader& header) noexcept {
  for (std::int64_t b = 0; b < problem.batch; ++b) {
    if (!lengths(b).clamped) continue;
    if (header.sticky_code == 0) header.sticky_code = static_cast<fixup::Counter>(StatusCode::kBadLengths);
    return;
  }
}

void for_each_worker(const Executor& executor, std::int32_t workers, const Call& call,
                     void (*work)(const Call&, std::int32_t) noexcept) {
  struct Argument {
    const Call* call;
    void (*work)(const Call&, std::int32_t) noexcept;
  } argument{&call, work};
  executor.run(
      executor.context, workers,
      [](void* opaque, std::int32_t worker) {
        const auto* a = static_cast<const Argument*>(opaque);
        a->work(*a->call, worker);
      },
      &argument);
}

}  // namespace

std::int32_t worker_count(const Options& options) noexcept {
  return options.workers > 0 ? options.workers : executor_of(options).worker_count;
}

tile::TileConfig select_tile(const Problem& problem) noexcept {
  const std::int32_t value_dim = value_dim_of(problem);
  const std::int64_t rows = std::int64_t{problem.q_tokens} * (problem.q_heads / problem.kv_heads);
  const std::int64_t token_bytes = (problem.head_dim + value_dim) * bytes_of(problem.k.dtype);
  const std::int64_t tokens = kTileBytes / token_bytes / kLaneMultiple * kLaneMultiple;
  return {.q_dtype = problem.q.dtype,
          .kv_dtype = problem.k.dtype,
          .head_dim = pad(problem.head_dim),
          .value_dim = pad(value_dim),
          .tile_tokens = static_cast<std::int32_t>(clamp_to(tokens, kMinTileTokens, kMaxTileTokens)),
          .q_rows = tile::row_block_for(rows)};
}

schedule::CostModel cost_model() noexcept {
  return {.tile_units = 16,
          .free_rows = 8,
          .row_units = 2,
          .segment_units = 2,
          .min_worker_tiles = 1,
          .sliver_tiles = 2,
          .align_percent = 0};
}

schedule::LineShape line_shape(const Problem& problem, const tile::TileConfig& config) noexcept {
  return {.batch = problem.batch,
          .kv_heads = problem.kv_heads,
          .group = problem.q_heads / problem.kv_heads,
          .q_rows = config.q_rows,
          .tile_tokens = config.tile_tokens,
          .causal = problem.scores.causal};
}

Status supports(const Problem& problem, const Options& options) noexcept {
  const Status status = PreconditionTable<Problem>{kRefused.data(), kRefused.size()}.check(problem);
  if (!status.ok()) return status;
  if (!cpu_isa_available(options.cpu_isa)) {
    return refuse(StatusCode::kUnsupported, "options.cpu_isa", static_cast<std::int64_t>(options.cpu_isa),
                  "this machine does not run it");
  }
  const Executor& executor = executor_of(options);
  if (executor.run == nullptr || executor.worker_count < 1) {
    return refuse(StatusCode::kInvalidArgument, "options.executor.worker_count", executor.worker_count,
                  "run must be given, worker_count 1 or more");
  }
  if (options.fixup == Fixup::kHostBlock && options.policy.kind == Policy::Kind::kFixedSplit) {
    return refuse(
        StatusCode::kUnsupported, "options.fixup", static_cast<std::int64_t>(options.fixup),
        "host_block needs a policy whose hosts wait for higher-numbered workers only: fixed_split deals items out in turn");
  }
  if (slot_capacity(problem, options.policy, select_tile(problem), worker_count(options)) > kMaxSlots) {
    return refuse(StatusCode::kTooLarge, "options.policy.splits", options.policy.splits, "outputs x splits must not exceed 2^40");
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

  const LengthSource lengths(problem);
  report_clamped(problem, lengths, slots.header());
  Line line(lengths, line_shape(problem, sizes.memory.config), cost_model(), schedule::measure_of(options.policy.kind));
  line.build();
  if (line.total() == 0) return {};
  const schedule::Plan plan =
      schedule::make_plan(line.sums(), options.policy, cost_model(), sizes.memory.config.tile_tokens, sizes.workers);
  const Call call{.problem = problem,
                  .line = line,
                  .plan = plan,
                  .kernels = kernels_for(options.cpu_isa),
                  .fixup = options.fixup,
                  .lengths = lengths,
                  .slots = slots,
                  .memory = sizes.memory,
                  .worker_memory = slots.scratch + sizes.workspace.scratch_bytes(),
                  .log2_scale = softmax::log2_scale(problem.scores.scale, problem.head_dim)};
  const Executor& executor = executor_of(options);
  for_each_worker(executor, plan.workers, call, run_worker);
  if (options.fixup == Fixup::kTwoKernels) for_each_worker(executor, plan.workers, call, merge_shared_outputs);
  return {};
}

}  // namespace lean::cpu
