// How a call is decided: how K and V may be copied, which rules tiles apply, which row of the table serves, and what follows: line,
// ring, workspace. From plan_call() at the end upwards.
#include "backends/cuda/call_plan.hpp"

#include <algorithm>
#include <iterator>
#include <limits>
#include <span>

#include "backends/cuda/append.hpp"
#include "backends/cuda/kernel/tuning.hpp"
#include "backends/cuda/side_times.hpp"
#include "backends/cuda/tensor_map.hpp"
#include "base/alignment.hpp"
#include "base/int_math.hpp"
#include "base/kv_type.hpp"
#include "lean/limits.hpp"
#include "problem/pages.hpp"
#include "problem/preconditions.hpp"
#include "schedule/stair_line.hpp"
#include "softmax/scale.hpp"

namespace lean::cuda {
namespace {

constexpr std::int32_t kMinStages = 2;  // a K and a V tile, or two tiles of both

/// Packed rows of a kv head that decode steps have at most: as many as the smallest row block of any call.
constexpr std::int32_t kFewRows = kMmaRows;

bool in_chunks(const Options& options) noexcept { return options.policy.kind == Policy::Kind::kFixedChunk; }

/// The variants' dims; the plain kernel takes any.
bool has_variants(const Problem& problem) noexcept {
  return problem.head_dim % 8 == 0 && problem.head_dim <= kWidestCudaHead && value_dim_of(problem) == problem.head_dim;
}

/// Single bytes are copied one by one, if need be.
bool kv_aligned(const TensorView& t) noexcept { return kv_type_of(t.dtype).bytes == 1 || rows_aligned(t, kPieceBytes); }

/// Rows lie as the variants read and write them.
bool lies_well(const Problem& p) noexcept {
  const bool end_to_end = p.q.strides.dim == 1 && p.k.strides.dim == 1 && p.v.strides.dim == 1 && p.o.strides.dim == 1;
  return end_to_end && rows_aligned(queries_after_append(p), 4) && rows_aligned(p.q, 4) && kv_aligned(p.k) && kv_aligned(p.v);
}

std::int64_t row_bytes_of(const Problem& problem) noexcept { return problem.head_dim * bytes_of(problem.k.dtype); }

/// It divides every row of K and V, and where it begins.
std::int32_t thread_bytes_of(const Problem& problem) noexcept {
  for (const std::int32_t bytes : {kPieceBytes, 8, 4}) {
    if (row_bytes_of(problem) % bytes == 0 && rows_aligned(problem.k, bytes) && rows_aligned(problem.v, bytes)) return bytes;
  }
  return 1;
}

KvCopies copies_of(const Problem& problem, const Device& device) noexcept {
  KvCopies copies{.boxes = takes_boxes(problem), .thread_bytes = thread_bytes_of(problem)};
  const bool end_to_end = problem.k.strides.token == problem.head_dim && problem.v.strides.token == problem.head_dim;
  const bool long_runs = !is_paged(problem.pages) || problem.pages.page_tokens * row_bytes_of(problem) >= kMinRunBytes;
  copies.runs = device.copies_in_bulk() && end_to_end && copies.thread_bytes == kPieceBytes && long_runs;
  return copies;
}

/// A window's left end is the row block's own where it has one query token and its first tile begins there, else its rows differ.
TileRules rules_of(const Problem& problem, const Options& options) noexcept {
  const Scores& scores = problem.scores;
  const bool windowed_chunks = scores.window_left >= 0 && in_chunks(options);
  // A scale of 0 is a rule: scores are hidden after they are scaled then, and 0 x (-inf) is never met.
  const bool scale_is_zero = scores.scale == 0.0F && !softmax::is_default_scale(scores.scale);
  TileRules rules{.beyond_softcap = scores.alibi_slopes != nullptr || scores.mask != nullptr || scores.tree_mask != nullptr,
                  .every_tile = scale_is_zero || scores.softcap > 0.0F || scores.alibi_slopes != nullptr ||
                                scores.mask != nullptr || windowed_chunks || (scores.window_left >= 0 && problem.q_tokens > 1)};
  rules.some_tile = rules.every_tile || scores.tree_mask != nullptr || is_paged(problem.pages);
  rules.hides_values = scores.mask != nullptr || scores.tree_mask != nullptr || windowed_chunks;
  return rules;
}

/// Dynamic shared memory that each of a multiprocessor's CTAs may have: 1 KB of every CTA's is the system's.
std::int32_t shared_bytes_of(const KernelConfig& config, const Device& device) noexcept {
  constexpr std::int32_t kSystemBytes = 1024;
  return (device.shared_bytes + kSystemBytes) / config.ctas() - kSystemBytes;
}

Ring ring_of(const KernelEntry& entry, const Problem& shape, const CallPlan& plan, bool flat) noexcept {
  const KernelConfig& config = entry.config;
  Ring ring{.stage_bytes = config.mean_stage_bytes(config.fills_rows() ? config.head_dim : shape.head_dim)};
  std::int64_t room = shared_bytes_of(config, plan.device) - entry.fixed_shared_bytes[flat ? 1 : 0];
  const std::int32_t of_wide = config.latent() ? kLatentRingBytes : max_of(kWideRingBytes, kWideStages * ring.stage_bytes);
  const std::int32_t enough = config.wide() ? of_wide : tma_ring_bytes(config);
  if (plan.copies.runs || (config.in_columns() && plan.copies.boxes)) room = min_of(room, enough);
  ring.stages = static_cast<std::int32_t>(min_of(max_stages(config), room / ring.stage_bytes));
  if (config.few_values()) ring.stages -= ring.stages % 2;  // a place is K's or V's, whoever's turn it is
  return ring;
}

/// With fixed_chunk the kernel, and with it the order of sums, must not depend on n_q: one query token's rows choose it.
std::int64_t choosing_rows(const Problem& shape, const Options& options) noexcept {
  return in_chunks(options) ? shape.q_heads / shape.kv_heads : schedule::row_capacity(shape);
}

/// The kernel that serves whatever is asked. Wider row blocks have shorter tiles: where a device's shared memory does not hold two
/// of the narrowest block's, theirs. `fits`: it holds two of those found.
const KernelEntry* any_call_kernel(std::span<const KernelEntry> kernels, const Problem& shape, const CallPlan& plan,
                                   bool& fits) noexcept {
  const Architecture device = plan.device.architecture();
  const KernelEntry* entry = find_kernel(kernels, device, Scope::kAnyCall, choosing_rows(shape, plan.options));
  while (entry != nullptr) {
    fits = ring_of(*entry, shape, plan, false).stages >= kMinStages;
    const KernelEntry* const wider = fits ? entry : find_kernel(kernels, device, Scope::kAnyCall, entry->config.q_rows + 1);
    if (wider == entry) break;
    entry = wider;
  }
  return entry;
}

/// In columns, as tensor copies lay a tile down, there is less to compute of it, but a call's first copies are answered later. What
/// is converted of few rows gains by them only where a worker has many segments: nothing is computed while one ends
/// (docs/notebook/fp8.md).
bool gains_by_columns(const Problem& shape, std::int32_t workers) noexcept {
  const std::int64_t rows = schedule::row_capacity(shape);
  if (!kv_type_of(shape.k.dtype).converted()) return rows > kMmaRows;
  return rows > kNarrowRows || schedule::output_capacity(shape, kNarrowRows) > std::int64_t{2} * workers;
}

/// The scope that serves a decode step fastest as K and V lie.
Scope lying_scope(const Problem& shape, const KvCopies& copies) noexcept {
  if (std::ranges::find(kHeadDims, shape.head_dim) == std::end(kHeadDims)) return Scope::kTensorStep;
  if (kv_type_of(shape.k.dtype).converted() && !copies.runs) return Scope::kTensorStep;
  const bool short_runs = is_paged(shape.pages) && shape.pages.page_tokens * row_bytes_of(shape) < kMinStepRunBytes;
  if ((!copies.runs || short_runs) && copies.boxes) return Scope::kTensorStep;
  return copies.runs ? Scope::kDecodeStep : Scope::kStridedStep;
}

/// The scope that serves a decode step fastest, if it serves it at all.
Scope step_scope(const Problem& shape, const TileRules& rules, const CallPlan& plan) noexcept {
  if (in_chunks(plan.options)) return Scope::kChunkStep;
  if (rules.in_step()) return Scope::kRuledStep;
  return gains_by_columns(shape, plan.options.workers) ? Scope::kTensorStep : lying_scope(shape, plan.copies);
}

/// The same of a call that may be a rank's part of an exchange: where a decode step's fastest kernel has one that exchanges beside it,
/// with the same bits. Rows of an exchange are those of one query a sequence.
Scope exchanged_scope(const Problem& shape, const TileRules& rules, const CallPlan& plan) noexcept {
  const Scope scope = step_scope(shape, rules, plan);
  const bool one_query = shape.q_tokens == 1 && shape.cu_q_tokens == nullptr;
  return plan.options.exchange != nullptr && one_query && scope == Scope::kDecodeStep ? Scope::kExchangedStep : scope;
}

/// The scope of a step with two workers on a multiprocessor, which have no use for columns: while one's segment ends the other computes.
Scope paired_scope(const Problem& shape, const KvCopies& copies) noexcept {
  return lying_scope(shape, copies) == Scope::kTensorStep ? Scope::kPairedTensorStep : Scope::kPairedStep;
}

/// Rows of a kv head, those of a last block that do not exist among them, that wide kernels count in 31 bits.
bool counts_rows(const Problem& shape) noexcept { return schedule::row_capacity(shape) <= INT32_MAX - 128; }

/// Whether a wide kernel has whatever the call asks for beside its dims and rows.
bool asks_no_more_than_wide(const KernelConfig& wide, const Problem& shape, const TileRules& rules, const CallPlan& plan) noexcept {
  const bool scaled_up = softmax::log2_scale(shape.scores.scale, shape.head_dim) > 0.0F;
  const bool ruled = (rules.beyond_softcap && !wide.ruled()) || !scaled_up;
  return !ruled && plan.options.fixup == Fixup::kLastArriver && plan.vector_queries;
}

/// Whether a wide kernel can bring K and V from where they lie: in boxes, which rows that are converted do not come in, or row by row,
/// which stages that come in parts do not.
bool can_copy(const KernelConfig& wide, const KvCopies& copies) noexcept {
  const bool rows = copies.thread_bytes == kPieceBytes && wide.stage_parts() == 1;
  return rows || (copies.boxes && !wide.converts());
}

/// The type of a wide kernel's factors: that of K and V, or what they become.
DType factors_of(Scope scope, const Problem& shape) noexcept {
  return traits_of(scope).converts ? kv_type_of(shape.k.dtype).product : shape.k.dtype;
}

/// Such a kernel of calls of these sizes: what a workspace is measured by, which is before anybody knows where tensors lie.
const KernelEntry* sized_wide_kernel(Scope scope, const Problem& shape, const CallPlan& plan) noexcept {
  if (!plan.device.warpgroups || in_chunks(plan.options) || plan.options.fixup != Fixup::kLastArriver) return nullptr;
  const KernelEntry* const entry = find_kernel(wide_kernels_for(factors_of(scope, shape), shape.head_dim),
                                               plan.device.architecture(), scope, schedule::row_capacity(shape));
  if (entry == nullptr || !counts_rows(shape)) return nullptr;
  return ring_of(*entry, shape, plan, false).stages >= kMinStages ? entry : nullptr;
}

/// The wide kernel that can serve calls of many rows of these sizes; kWideRule says where it does. Rows that are converted fill the
/// kernel's.
const KernelEntry* wide_kernel(const Problem& shape, const CallPlan& plan) noexcept {
  if (schedule::row_capacity(shape) < kWideRule.fewest_rows) return nullptr;
  const bool converted = kv_type_of(shape.k.dtype).converted();
  const KernelEntry* const entry = sized_wide_kernel(converted ? Scope::kWideFp8Tile : Scope::kWideTile, shape, plan);
  return entry != nullptr && (entry->config.fills_rows() || entry->config.head_dim == shape.head_dim) ? entry : nullptr;
}

/// The same under rules that it lacks, in as large a workspace: where dims have no row of their own they fill up the widest one's.
const KernelEntry* ruled_wide_kernel(const Problem& shape, const CallPlan& plan) noexcept {
  if (schedule::row_capacity(shape) < kWideRule.fewest_rows) return nullptr;
  const KernelEntry* const entry = sized_wide_kernel(Scope::kWideRuledTile, shape, plan);
  Problem filled_up = shape;
  filled_up.head_dim = 128;
  return entry != nullptr || shape.head_dim > filled_up.head_dim ? entry
                                                                 : sized_wide_kernel(Scope::kWideRuledTile, filled_up, plan);
}

/// Whether `wide` has enough to do to be faster than another kernel that serves the call too: at the capacity, which is what is known
/// here of lengths. Shorter ones cost what a segment's ends do, some 40 us, or in turns what its begin does.
bool has_tiles_of(const WideRule& rule, const KernelEntry& wide, const Problem& shape, const CallPlan& plan) noexcept {
  const std::int64_t tiles =
      schedule::output_capacity(shape, wide.config.q_rows) * ceil_div(shape.kv_capacity, wide.config.tile_tokens);
  return tiles >= std::int64_t{rule.fewest_tiles} * plan.options.workers;
}

/// Workers of a launch at most.
std::int32_t most_workers(const KernelEntry& entry, const Options& options) noexcept {
  return options.workers * entry.config.ctas();
}

schedule::LineShape line_of(const KernelEntry& entry, const Problem& shape) noexcept {
  return schedule::line_shape_of(shape, entry.config.q_rows, entry.config.tile_tokens);
}

/// Whatever the lengths: every kv head of a sequence is one output, the policy cuts the line, and 32 bits count it.
bool is_flat(const KernelEntry& entry, const Problem& shape, const Options& options) noexcept {
  const std::int32_t q_rows = entry.config.q_rows;
  return schedule::measure_of(options.policy.kind) == schedule::Measure::kCost && schedule::row_capacity(shape) <= q_rows &&
         schedule::narrow_units(schedule::output_capacity(shape, q_rows), shape.kv_capacity, line_of(entry, shape),
                                cost_model(entry.config), most_workers(entry, options));
}

/// The latent kernel for calls of these sizes from where their rows lie: of few rows a decode step's, unless there is a softcap, which
/// that has not; of others kTurnsRule says which.
const KernelEntry* latent_kernel(const Problem& shape, const CallPlan& plan) noexcept {
  const auto kernel_of = [&](Scope scope) {
    const KernelEntry* const entry = sized_wide_kernel(scope, shape, plan);
    return entry != nullptr && can_copy(entry->config, plan.copies) ? entry : nullptr;
  };
  const bool converted = kv_type_of(shape.k.dtype).converted();
  const KernelEntry* const swapped = kernel_of(converted ? Scope::kLatentFp8Swapped : Scope::kLatentSwapped);
  const bool is_step = swapped != nullptr && is_flat(*swapped, shape, plan.options);
  if (is_step && shape.scores.softcap == 0.0F) return swapped;
  if (converted) return kernel_of(Scope::kLatentFp8Tile);
  const KernelEntry* const turns = kernel_of(Scope::kLatentTurns);
  const bool many = schedule::row_capacity(shape) >= kTurnsRule.fewest_rows;
  if (turns != nullptr && many && has_tiles_of(kTurnsRule, *turns, shape, plan)) return turns;
  return kernel_of(Scope::kLatentTile);
}

/// The kernel of calls of these sizes whose values have dims of their own, whatever their rows: a latent one if they lie in the keys'
/// memory, which is not looked at, one of few values, or a wide one that holds the dims of both.
const KernelEntry* values_kernel(const Problem& shape, const CallPlan& plan) noexcept {
  const std::int32_t value_dim = value_dim_of(shape);
  if (value_dim == shape.head_dim || shape.head_dim % 8 != 0 || value_dim % 8 != 0) return nullptr;
  const KernelEntry* const latent = latent_kernel(shape, plan);
  if (latent != nullptr && shape.head_dim == latent->config.head_dim && value_dim == latent->config.summed_dims()) return latent;
  Problem of_both = shape;
  of_both.head_dim = max_of(shape.head_dim, value_dim);
  const KernelEntry* const few = sized_wide_kernel(Scope::kFewValuesTile, of_both, plan);
  if (few != nullptr && value_dim <= few->config.summed_dims()) return few;
  return sized_wide_kernel(Scope::kWideTile, of_both, plan);
}

bool same_rows(const TensorView& a, const TensorView& b) noexcept {
  return a.data == b.data && a.dtype == b.dtype && a.strides.sequence == b.strides.sequence && a.strides.head == b.strides.head &&
         a.strides.token == b.strides.token && a.strides.dim == b.strides.dim;
}

/// Whether such a kernel serves this call; else the plain kernel does.
bool has_values_kernel(const Problem& problem, const CallPlan& plan) noexcept {
  const KernelEntry* const entry = values_kernel(problem, plan);
  if (entry == nullptr || (entry->config.latent() && !same_rows(problem.k, problem.v)) || !lies_well(problem)) return false;
  return can_copy(entry->config, plan.copies) &&
         asks_no_more_than_wide(entry->config, problem, rules_of(problem, plan.options), plan);
}

/// Packed queries are so many together, however they are shared out; others as many in each sequence as in the longest.
std::int64_t most_outputs(const KernelEntry& entry, const Problem& shape) noexcept {
  const std::int64_t outputs = schedule::output_capacity(shape, entry.config.q_rows);
  if (shape.cu_q_tokens == nullptr) return outputs;
  const std::int64_t blocks = max_of(shape.total_q_tokens, 0) * (shape.q_heads / shape.kv_heads) / entry.config.q_rows;
  return min_of(outputs, (blocks + shape.batch) * shape.kv_heads);
}

/// Whatever the lengths: row blocks are a stair under the policy that most calls ask for, and 32 bits count them. Cumulative lengths that
/// overlap have more outputs than that, up to the capacity, which 32 bits hold too: so a kernel sees that there are too many.
bool is_stair(const KernelEntry& entry, const Problem& shape, const Options& options) noexcept {
  return options.policy.kind == Policy::Kind::kLean &&
         schedule::output_capacity(shape, entry.config.q_rows) <= std::numeric_limits<std::int32_t>::max() &&
         schedule::is_stair(line_of(entry, shape), cost_model(entry.config), most_outputs(entry, shape), shape.q_tokens,
                            shape.kv_capacity, options.workers);
}

/// Whether a step's kernel has whatever the call asks for: its traits, one by one.
bool serves(const KernelEntry& step, const Problem& shape, const TileRules& rules, const CallPlan& plan) noexcept {
  const ScopeTraits scope = step.config.traits();
  const bool copied = plan.copies.thread_bytes == kPieceBytes && (plan.copies.runs || scope.copies != Copies::kRuns);
  const bool dims = shape.head_dim == step.config.head_dim || scope.dims == Dims::kFilledUp;
  const bool chunks = in_chunks(plan.options) == (scope.chunks == Chunks::kAlways);
  return copied && dims && chunks && (scope.ruled || !rules.in_step()) && plan.vector_queries &&
         plan.options.fixup == Fixup::kLastArriver && is_flat(step, shape, plan.options) &&
         ring_of(step, shape, plan, true).stages >= kMinStages;
}

/// The grid. A decode step has a CTA for each tile of its longest outputs at most, which is what a plan gives work to, whatever the grid:
/// more have nothing to do, and a short call pays for them. On an H100 1 x 1k of 32/8 heads takes 7.9 us by 132 CTAs and 7.4 by the 64 that have a
/// tile, 1 x 4k of 8/1 9.8 and 8.9, 5 x 200 of 32/8, 80 tiles, 7.6 and 7.2 (docs/notebook/schedule-constants.md).
std::int32_t workers_of(const KernelEntry& entry, const Problem& shape, const CallPlan& plan, std::int64_t outputs) noexcept {
  const std::int32_t most = most_workers(entry, plan.options);
  if (!plan.chooses_workers || !entry.config.step() || entry.config.chunks_only() || entry.config.exchanges()) return most;
  const std::int64_t tiles = max_of<std::int64_t>(1, ceil_div(shape.kv_capacity, entry.config.tile_tokens));
  return static_cast<std::int32_t>(clamp_to(outputs * tiles, 1, most));
}

/// The even line that a short line of so many outputs may be; empty if it cannot be one. Variants that copy runs take even lines
/// without pages alone (decode_kernel.cuh).
schedule::EvenLine even_line_of(const KernelEntry& entry, const Problem& shape, const CallPlan& plan,
                                const LaunchPlan& launch) noexcept {
  if (!entry.config.looks_for_even_lines() || plan.options.policy.kind != Policy::Kind::kLean) return {};
  if (has_cumulative_lengths(shape) || (entry.config.copies_runs() && is_paged(shape.pages))) return {};
  // All threads build what turns out not to be even sooner than a warp's lanes.
  if (entry.config.latent() && shape.batch > kWarpThreads) return {};
  const std::int32_t share_tiles = entry.config.latent() ? kEvenLatentShareTiles : kEvenShareTiles;
  return schedule::even_line_of(launch.outputs, launch.workers, cost_model(entry.config), share_tiles);
}

/// The same of a stair.
schedule::EvenStair even_stair_of(const KernelEntry& entry, const Problem& shape, const LaunchPlan& launch) noexcept {
  if (!entry.config.wide() || has_cumulative_lengths(shape)) return {};
  const schedule::SequenceWork work{.q_tokens = shape.q_tokens, .kv_tokens = shape.kv_capacity};
  schedule::CostModel model = cost_model(entry.config);
  model.part_tiles = launch.part_tiles;
  return schedule::even_stair_of(launch.line, work, launch.workers, model);
}

void plan_line(LaunchPlan& launch, const Problem& shape, const CallPlan& plan) noexcept {
  const KernelEntry& entry = *launch.kernel;
  launch.line = line_of(entry, shape);
  launch.outputs = schedule::output_capacity(shape, entry.config.q_rows);
  launch.workers = workers_of(entry, shape, plan, launch.outputs);
  // Any call's kernel walks a flat line under `lean` only, where it is what most calls ask for.
  const bool walks_flat = entry.config.any_call() && plan.options.policy.kind == Policy::Kind::kLean;
  launch.flat = entry.config.step() || (walks_flat && is_flat(entry, shape, plan.options)) ||
                (entry.config.wide() && is_stair(entry, shape, plan.options));
  if (launch.flat && entry.config.stairs()) {
    launch.stair_step = schedule::short_stair_step_of(launch.line);
    launch.most_outputs = static_cast<std::int32_t>(most_outputs(entry, shape));
    if (entry.config.latent()) launch.part_tiles = latent_part_tiles(static_cast<std::int32_t>(schedule::row_capacity(shape)));
  }
  const bool few = launch.flat && shape.batch <= kLaneSequences * kWarpThreads;
  if (few) {
    launch.even = even_line_of(entry, shape, plan, launch);
    launch.even_stair = even_stair_of(entry, shape, launch);
  }
  launch.short_line = few && (shape.batch <= kWarpThreads || launch.even.outputs > 0);
}

fixup::WorkspaceLayout workspace_of(const KernelEntry& entry, const Problem& shape, const Options& options) noexcept {
  return fixup::workspace_layout(shape, options.policy, entry.config.tile(), most_workers(entry, options));
}

/// Has the workspace of a kernel that may serve such calls asked for.
void reserve(LaunchPlan& launch, const KernelEntry& entry, const Problem& shape, const Options& options) noexcept {
  const fixup::WorkspaceLayout layout = workspace_of(entry, shape, options);
  launch.reserved.state_bytes = max_of(launch.reserved.state_bytes, layout.state_bytes());
  launch.reserved.scratch_bytes = max_of(launch.reserved.scratch_bytes, layout.scratch_bytes());
}

/// Works out what follows from a launch's kernel.
void plan_kernel(LaunchPlan& launch, const KernelEntry& entry, const Problem& shape, const CallPlan& plan) noexcept {
  launch.kernel = &entry;
  plan_line(launch, shape, plan);
  launch.ring = ring_of(entry, shape, plan, launch.flat);
  launch.tensor_copies = entry.config.in_columns() && !entry.config.converts() && plan.copies.boxes;
  launch.workspace = workspace_of(entry, shape, plan.options);
}

/// The kernel of calls of these sizes with two workers on a multiprocessor, if kPairedRule has them served so. Such a call has the
/// workers of another kernel twice, so nobody else may have said how many there are.
const KernelEntry* paired_kernel(std::span<const KernelEntry> kernels, Scope scope, const Problem& shape,
                                 const CallPlan& plan) noexcept {
  const bool chooses = plan.chooses_workers && plan.options.exchange == nullptr && plan.options.policy.kind == Policy::Kind::kLean;
  const bool many =
      schedule::output_capacity(shape, kNarrowRows) * 100 >= std::int64_t{kPairedRule.outputs_percent} * plan.options.workers;
  if (!chooses || !many) return nullptr;
  const std::int64_t rows = schedule::row_capacity(shape);
  const KernelEntry* const entry = find_kernel(kernels, plan.device.architecture(), scope, rows);
  if (entry == nullptr || rows > entry->config.q_rows || most_workers(*entry, plan.options) > kMaxWorkers) return nullptr;
  return entry;
}

/// Has the workspace of all kernels asked for that calls of these sizes may have whose values have dims of their own: whether there is a
/// softcap, and wherever rows lie.
void reserve_for_values(LaunchPlan& launch, const Problem& shape, const CallPlan& plan) noexcept {
  if (value_dim_of(shape) == shape.head_dim) return;  // most calls, of which every one comes by here
  CallPlan lying = plan;
  Problem capped = shape;
  for (const bool boxes : {true, false}) {
    lying.copies = {.boxes = boxes};
    for (const float softcap : {0.0F, 1.0F}) {
      capped.scores.softcap = softcap;
      if (const KernelEntry* const entry = values_kernel(capped, lying)) reserve(launch, *entry, shape, plan.options);
    }
  }
}

/// The launch of what `shape` holds of the call: the same with no more query tokens than that.
LaunchPlan plan_launch(const Problem& shape, const QueryRange& queries, const CallPlan& plan) noexcept {
  LaunchPlan launch{.queries = queries, .rules = rules_of(shape, plan.options)};
  if (plan.plain) launch.line = schedule::line_shape_of(shape, plan.plain_tile.q_rows, plan.plain_tile.tile_tokens);
  reserve_for_values(launch, shape, plan);
  if (plan.own_values) plan_kernel(launch, *values_kernel(shape, plan), shape, plan);
  if (!has_variants(shape)) return launch;
  const std::span<const KernelEntry> kernels = kernels_for(shape.k.dtype, shape.head_dim);
  bool fits = false;
  launch.any_call = any_call_kernel(kernels, shape, plan, fits);
  if (!fits) return launch;
  const KernelEntry* wide = wide_kernel(shape, plan);
  reserve(launch, *launch.any_call, shape, plan.options);
  if (wide != nullptr) reserve(launch, *wide, shape, plan.options);
  if (const KernelEntry* const ruled = ruled_wide_kernel(shape, plan); ruled != nullptr) {
    reserve(launch, *ruled, shape, plan.options);
    if (launch.rules.beyond_softcap) wide = ruled;
  }
  // For any tokens, so that a workspace for several query tokens suffices for one; and for either scope, wherever tensors lie.
  Problem single = shape;
  single.q_tokens = 1;
  for (const Scope scope : {Scope::kPairedStep, Scope::kPairedTensorStep}) {
    const KernelEntry* const pair = paired_kernel(kernels, scope, single, plan);
    if (pair != nullptr) reserve(launch, *pair, single, plan.options);
  }
  if (plan.plain) return launch;
  const KernelEntry* step = paired_kernel(kernels, paired_scope(shape, plan.copies), shape, plan);
  if (step == nullptr || !serves(*step, shape, launch.rules, plan)) {
    step = find_kernel(kernels, plan.device.architecture(), exchanged_scope(shape, launch.rules, plan),
                       choosing_rows(shape, plan.options));
  }
  const bool is_step = step != nullptr && serves(*step, shape, launch.rules, plan);
  const bool may_be_wide = wide != nullptr && plan.options.exchange == nullptr && can_copy(wide->config, plan.copies) &&
                           asks_no_more_than_wide(wide->config, shape, launch.rules, plan);
  const bool is_wide = may_be_wide && (!is_step || has_tiles_of(kWideRule, *wide, shape, plan));
  plan_kernel(launch, is_wide ? *wide : is_step ? *step : *launch.any_call, shape, plan);
  return launch;
}

/// Query tokens of a call that a launch of its own serves, beside those of longer queries; 0: one launch serves all. Row blocks of
/// prefill chunks are wide, and a CTA reads a tile for a few rows in one as slowly as for all: in a batch of both, decode rows have
/// their own. Lengths are on the device, so each launch sees all sequences and passes over the other's. Values with dims of their own
/// have row blocks as wide for any rows.
std::int32_t few_tokens_of(const Problem& problem, const CallPlan& plan) noexcept {
  if (problem.cu_q_tokens == nullptr || in_chunks(plan.options) || plan.own_values) return 0;
  const std::int32_t few = max_of(1, kFewRows / (problem.q_heads / problem.kv_heads));
  return few < problem.q_tokens ? few : 0;
}

/// The decode step's kernel that runs beside chunks, for what a call holds of few rows; null: they follow the chunks.
const KernelEntry* beside_kernel(const Problem& decoding, const CallPlan& plan) noexcept {
  const KernelEntry* const chunks = plan.launches[0].kernel;
  if (plan.plain || chunks == nullptr || !chunks->config.wide() || !chunks->config.may_run_beside()) return nullptr;
  if (plan.options.workers < 2 || decoding.batch > kSideBySideSequences) return nullptr;
  const std::span<const KernelEntry> kernels = kernels_for(decoding.k.dtype, decoding.head_dim);
  const KernelEntry* const entry =
      find_kernel(kernels, plan.device.architecture(), Scope::kBesideStep, schedule::row_capacity(decoding));
  return entry != nullptr && serves(*entry, decoding, rules_of(decoding, plan.options), plan) ? entry : nullptr;
}

/// Two launches run beside each other where the first is a wide kernel's, which leaves the memory idle, and the second can be a decode
/// step's of up to 16 rows, which leaves the tensor cores idle (docs/cuda-kernel.md lists the calls that have no such two). A warp of every
/// CTA reads all lengths to find out which workers are whose.
void plan_launches(const Problem& problem, CallPlan& plan) noexcept {
  const std::int32_t few = few_tokens_of(problem, plan);
  plan.launches[0] = plan_launch(problem, {.least = few > 0 ? few + 1 : 0}, plan);
  if (few == 0) return;
  Problem decoding = problem;
  decoding.q_tokens = few;
  plan.launches[1] = plan_launch(decoding, {.most = few}, plan);
  plan.launch_count = 2;
  plan.sides = {};
  if (const KernelEntry* const steps = beside_kernel(decoding, plan)) {
    plan_kernel(plan.launches[1], *steps, decoding, plan);
    plan.sides = side_by_side(plan.launches[0].kernel->config, steps->config, few, plan.options.workers, plan.device.memory_rate());
  }
}

/// The build has kernels for the call, and the device too little shared memory for two stages of any of them: rows of more than 240
/// dims of 16 bits where a CTA may have 99 KB (compute capability 8.6, 8.9, 12.0).
bool lacks_room(const CallPlan& plan) noexcept {
  return std::ranges::any_of(plan, [](const LaunchPlan& launch) { return launch.any_call != nullptr && launch.kernel == nullptr; });
}

}  // namespace

CallPlan plan_call(const Problem& problem, const Options& options, const Device& device) noexcept {
  CallPlan plan{.options = options,
                .device = device,
                .copies = copies_of(problem, device),
                .vector_queries = rows_aligned(queries_after_append(problem), kPieceBytes),
                .plain_tile = plain_tile(problem)};
  plan.options.dependent_launch = options.dependent_launch && plan.may_overlap();
  if (options.workers == 0) {
    plan.options.workers = device.multiprocessors;
    plan.chooses_workers = true;
  }
  plan.own_values = has_values_kernel(problem, plan);
  plan.plain = !plan.own_values && (!has_variants(problem) || !lies_well(problem));
  plan_launches(problem, plan);
  if (plan.plain || !lacks_room(plan)) return plan;
  plan.plain = true;
  plan_launches(problem, plan);
  return plan;
}

/// The workspace of any call's kernels. decode() may choose another kernel than workspace_size() would have: that depends on where
/// tensors lie, which the latter is not told. It suffices for every other kernel:
/// - for the same rows a step's row block is no larger than any call's, and so are its partials;
/// - steps cut the line (is_flat()), so workers alone count their slots; those of a pair are twice as many, and its kernel is asked for too,
///   as for one query token;
/// - chunks have the same tiles, so as many nodes, in both their scopes (kernel_rows.hpp);
/// - a wide kernel's row block may be larger, and where values have dims of their own its workspace is all there is: either is asked
///   for too, wherever tensors lie;
/// - the plain kernel needs none, and where it serves for want of shared memory, it does so wherever tensors lie.
/// Each of two launches has memory of its own but for the header (launch.cpp: slots_of()), as those that run beside each other need.
/// Calls whose launches follow each other have it too, though one could use what the other has left: which of both a call is depends on
/// where its tensors lie.
/// CudaHost.R17_NoLaunchTakesMoreThanTheWorkspaceThatWasAskedFor holds every launch of random calls against it.
fixup::WorkspaceNeed CallPlan::need() const noexcept {
  fixup::WorkspaceNeed need{.state_bytes = fixup::kStateHeaderBytes};
  for (const LaunchPlan& launch : *this) {
    need.state_bytes += launch.reserved.state_bytes - fixup::kStateHeaderBytes;
    need.scratch_bytes += launch.reserved.scratch_bytes;
  }
  return need;
}

}  // namespace lean::cuda
