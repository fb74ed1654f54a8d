// How a call is decided on the CPU: its tile, its workers, and what memory each of them needs.
#include "backends/cpu/call_plan.hpp"

#include "backends/cpu/executor.hpp"
#include "backends/cpu/score_rules.hpp"
#include "backends/cpu/tile_kernels.hpp"
#include "base/int_math.hpp"
#include "problem/append.hpp"
#include "problem/pages.hpp"
#include "problem/preconditions.hpp"

namespace lean::cpu {
namespace {

/// K and V of one LeanTile: large enough to amortise a tile's fixed work, small enough for the L2 (sweep in docs/schedule.md).
constexpr std::int64_t kTileBytes = 64 * 1024;
/// Where a tile of so many rows is turned: what begins and ends it is once for each row (docs/cpu-backend.md, "Many rows").
constexpr std::int64_t kTurnedTileElements = 64 * 1024;
constexpr std::int32_t kTurnedTileRows = 128;
constexpr std::int32_t kMinTileTokens = 16;

/// The smallest row block of 16, 32, ... 256 that holds `rows`, so that up to 256 rows of a kv head share one read of K and V and few
/// rows are never padded far.
std::int32_t row_block_for(std::int64_t rows) noexcept {
  constexpr std::int32_t kMost = 256;
  std::int32_t block = 16;
  while (block < kMost && block < rows) block *= 2;
  return block;
}

std::int32_t pad(std::int32_t dims) noexcept { return static_cast<std::int32_t>(round_up(dims, kLaneMultiple)); }

WorkerMemoryLayout memory_of(const Problem& problem, const tile::TileConfig& config, const Options& options,
                             const fixup::WorkspaceLayout& workspace) noexcept {
  WorkerMemoryLayout memory{.config = config,
                            .packs_tiles = problem.k.strides.dim != 1 || problem.v.strides.dim != 1,
                            .turned = turned_tile_of(options, problem, config.q_rows),
                            .tables = hides_tokens(problem.scores) || is_paged(problem.pages) || appends(problem)};
  if (appends(problem)) memory.new_rows = min_of(config.tile_tokens, problem.q_tokens);
  if (options.policy.kind == Policy::Kind::kFixedChunk) memory.accumulators = workspace.nodes_per_slot + 1;
  return memory;
}

}  // namespace

tile::TileConfig select_tile(const Problem& problem, const Options& options) noexcept {
  const std::int32_t value_dim = value_dim_of(problem);
  const std::int32_t q_rows = row_block_for(schedule::row_capacity(problem));
  const bool is_longer = q_rows >= kTurnedTileRows && !in_chunks(options) && turned_tile_of(options, problem, q_rows) != nullptr;
  const std::int64_t elements = is_longer ? kTurnedTileElements : kTileBytes / bytes_of(problem.k.dtype);
  const std::int64_t tokens = elements / (problem.head_dim + value_dim) / kLaneMultiple * kLaneMultiple;
  return {.q_dtype = problem.q.dtype,
          .kv_dtype = problem.k.dtype,
          .head_dim = pad(problem.head_dim),
          .value_dim = pad(value_dim),
          .tile_tokens = static_cast<std::int32_t>(clamp_to(tokens, kMinTileTokens, kMaxTileTokens)),
          .q_rows = q_rows};
}

CallPlan plan_call(const Problem& problem, const Options& options) noexcept {
  CallPlan plan{.options = options, .executor = &executor_of(options), .config = select_tile(problem, options)};
  plan.workers = options.workers > 0 ? options.workers : min_of(plan.executor->worker_count, Options::kMaxWorkers);
  plan.batch = problem.batch;
  plan.workspace = fixup::workspace_layout(problem, options.policy, plan.config, plan.workers);
  plan.memory = memory_of(problem, plan.config, options, plan.workspace);
  return plan;
}

fixup::WorkspaceNeed CallPlan::need() const noexcept {
  return {.state_bytes = workspace.state_bytes(), .scratch_bytes = memory_begin() + workers * memory.bytes()};
}

tile::Tiling CallPlan::tiling() const noexcept { return {.config = config, .cost_model = cost_model(config), .workers = workers}; }

}  // namespace lean::cpu
