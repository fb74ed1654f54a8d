// One call on the CPU: refused or planned, the workspace taken, lengths read once, workers run by the executor, their work counted.
#include "backends/cpu/cpu_backend.hpp"

#include <atomic>
#include <cstring>
#include <memory>

#include "backends/cpu/new_tokens.hpp"
#include "backends/cpu/sticky.hpp"
#include "backends/cpu/tile_kernels.hpp"
#include "backends/cpu/worker.hpp"
#include "base/message.hpp"
#include "fixup/workspace.hpp"
#include "fixup/workspace_size.hpp"
#include "problem/append.hpp"
#include "problem/length_faults.hpp"
#include "problem/sequence.hpp"
#include "problem/token_shard.hpp"
#include "schedule/plan.hpp"
#include "schedule/segments.hpp"
#include "softmax/scale.hpp"

namespace lean::cpu {
namespace {

Status refuse_plan(const Problem& problem, const CallPlan& plan) noexcept {
  const Options& options = plan.options;
  if (const Status status = fixup::check_pairing(problem, options, plan.config, plan.workers); !status.ok()) return status;
  if (!cpu_isa_available(options.cpu_isa)) {
    return refuse(StatusCode::kUnsupported, "options.cpu_isa", static_cast<std::int64_t>(options.cpu_isa),
                  "this machine does not run it");
  }
  const Executor& executor = *plan.executor;
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

/// Reads the lengths of all sequences; one sticky code for those that had to be clamped, and which the first was.
Lengths read_lengths(const Problem& problem, std::byte* memory, fixup::StateHeader& header) noexcept {
  count_new_tokens(problem);
  const BasicLengthSource<true, OneLoad> source(problem);
  auto* const sequences = reinterpret_cast<Sequence*>(memory);
  bool clamped = false;
  for (std::int64_t b = 0; b < problem.batch; ++b) {
    std::construct_at(sequences + b, source(b));
    clamped = clamped || sequences[b].clamped;
  }
  if (clamped) report(problem, header, StatusCode::kBadLengths);
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

/// Every worker has been through the pass that writes new tokens, once. Codes: ok, backend_error.
Status check_appended(const Call& call) noexcept {
  std::int32_t once = 0;
  for (std::int32_t worker = 0; worker < call.plan.workers; ++worker) once += call.done[worker].passes == 1 ? 1 : 0;
  if (once == call.plan.workers) return {};
  Status status{.code = StatusCode::kBackendError};
  std::snprintf(status.message, sizeof(status.message),
                "workers that wrote new tokens once = %" PRId32 " of %" PRId32
                ": the executor must run every worker exactly once before it returns; reset_workspace() before the next call",
                once, call.plan.workers);
  return status;
}

/// Every tile computed once, every output written once: what is not computed is never passed over in silence. Codes: ok,
/// backend_error.
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

Status decide(const Problem& problem, const Options& options, CallPlan& plan) noexcept {
  plan = plan_call(problem, options);
  return refuse_plan(problem, plan);
}

tile::Tiling tiling_of(const Problem& problem, const Options& options) noexcept { return plan_call(problem, options).tiling(); }

Status run_call(const Problem& problem, const CallPlan& plan, const Workspace& workspace) noexcept {
  const fixup::Slots slots{plan.workspace, static_cast<std::byte*>(workspace.state), static_cast<std::byte*>(workspace.scratch)};
  const WorkspaceLease lease(slots);
  if (!lease.status().ok()) return lease.status();

  const Options& options = plan.options;
  const tile::Tiling tiling = plan.tiling();
  const tile::TileConfig& config = tiling.config;
  const Lengths lengths = read_lengths(problem, slots.scratch + plan.lengths_begin(), slots.header());
  Line line(lengths, schedule::line_shape_of(problem, config.q_rows, config.tile_tokens), tiling.cost_model,
            schedule::measure_of(options.policy.kind));
  line.build();
  if (line.total() == 0) return {};
  const schedule::Plan shares =
      schedule::make_plan(line.sums(), options.policy, tiling.cost_model, config.tile_tokens, tiling.workers);
  const auto call_of = [&](const Problem& asked) {
    return Call{.problem = asked,
                .line = line,
                .plan = shares,
                .kernels = kernels_for(isa_of(options, problem)),
                .fixup = options.fixup,
                .slots = slots,
                .memory = plan.memory,
                .worker_memory = slots.scratch + plan.memory_begin(),
                .done = reinterpret_cast<Done*>(slots.scratch + plan.done_begin()),
                .log2_scale = softmax::log2_scale(problem.scores.scale, problem.head_dim)};
  };
  Problem attended = problem;
  if (appends(problem) && (schedule::row_capacity(problem) > config.q_rows || reads_new_tokens_of_others(problem, lengths))) {
    const Call ahead = call_of(problem);
    std::uninitialized_value_construct_n(ahead.done, shares.workers);
    if (const Status status = for_each_worker(*plan.executor, ahead, append_new_tokens); !status.ok()) return status;
    if (const Status status = check_appended(ahead); !status.ok()) return status;
    attended.append.k.data = attended.append.v.data = nullptr;  // queries are still rotated
  }
  const Call call = call_of(attended);
  std::uninitialized_value_construct_n(call.done, shares.workers);
  if (const Status status = for_each_worker(*plan.executor, call, run_worker); !status.ok()) return status;
  if (options.fixup == Fixup::kTwoKernels) {
    if (const Status status = for_each_worker(*plan.executor, call, merge_shared_outputs); !status.ok()) return status;
  }
  return check_done(call);
}

Status clear_state(const Workspace& workspace, const Options&) noexcept {
  std::memset(workspace.state, 0, workspace.state_bytes);
  return {};
}

Status read_header(const Workspace& workspace, const Options&, fixup::StateHeader& header) noexcept {
  header = *static_cast<const fixup::StateHeader*>(workspace.state);
  return {};
}

Status shard_lengths(const std::int32_t* tokens, std::int32_t* held, std::int64_t count, const TokenShard& shard,
                     const Options&) noexcept {
  for (std::int64_t i = 0; i < count; ++i) held[i] = tokens_held(shard, tokens[i]);
  return {};
}

}  // namespace lean::cpu
