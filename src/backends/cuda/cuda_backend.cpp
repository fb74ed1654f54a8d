#include "backends/cuda/cuda_backend.hpp"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <bit>

#include "backends/cuda/append.hpp"
#include "backends/cuda/device.hpp"
#include "backends/cuda/kernel/device_call.hpp"
#include "backends/cuda/kernel/tuning.hpp"
#include "backends/cuda/kernel_table.hpp"
#include "backends/cuda/tensor_map.hpp"
#include "backends/cuda/workspace_check.hpp"
#include "base/alignment.hpp"
#include "base/int_math.hpp"
#include "base/message.hpp"
#include "fixup/workspace_size.hpp"
#include "problem/append.hpp"
#include "problem/pages.hpp"
#include "problem/preconditions.hpp"
#include "softmax/scale.hpp"

namespace lean::cuda {
namespace {

using P = const Problem&;

/// Every row of the tensor begins at a multiple of `bytes`.
template <typename TView>
bool rows_aligned(const TView& t, std::int64_t bytes) noexcept {
  const std::int64_t element = bytes_of(t.dtype);
  return aligned_to(t.data, bytes) && t.strides.sequence * element % bytes == 0 && t.strides.head * element % bytes == 0 &&
         t.strides.token * element % bytes == 0;
}

bool kv_aligned(const TensorView& t) noexcept { return is_fp8(t.dtype) || rows_aligned(t, kPieceBytes); }

/// What threads copy of K and V at once: it divides every row, and where it begins.
std::int32_t copy_bytes(const Problem& problem) noexcept {
  const std::int64_t row_bytes = problem.head_dim * bytes_of(problem.k.dtype);
  for (const std::int32_t bytes : {kPieceBytes, 8, 4}) {
    if (row_bytes % bytes == 0 && rows_aligned(problem.k, bytes) && rows_aligned(problem.v, bytes)) return bytes;
  }
  return 1;
}

constexpr auto kUnsupported = StatusCode::kUnsupported;
std::int64_t as_int(const void* pointer) noexcept { return static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(pointer)); }

// clang-format off: one row, one refusal
constexpr std::array kRefused = {
    Precondition<Problem>{kUnsupported, "q.dtype", "the CUDA backend computes float16 and bfloat16",
                 [](P p) noexcept -> std::int64_t { return static_cast<std::int64_t>(p.q.dtype); },
                 [](P p) noexcept { return p.q.dtype == DType::kFloat16 || p.q.dtype == DType::kBFloat16; }},
    Precondition<Problem>{kUnsupported, "head_dim", "the CUDA backend needs a multiple of 8",
                 [](P p) noexcept -> std::int64_t { return p.head_dim; },
                 [](P p) noexcept { return p.head_dim % 8 == 0; }},
    Precondition<Problem>{kUnsupported, "value_dim", "the CUDA backend needs value_dim equal to head_dim",
                 [](P p) noexcept -> std::int64_t { return p.value_dim; },
                 [](P p) noexcept { return value_dim_of(p) == p.head_dim; }},
    Precondition<Problem>{kUnsupported, "q.strides.dim", "the CUDA backend needs 1",
                 [](P p) noexcept -> std::int64_t { return p.q.strides.dim; },
                 [](P p) noexcept { return p.q.strides.dim == 1; }},
    Precondition<Problem>{kUnsupported, "k.strides.dim", "the CUDA backend needs 1",
                 [](P p) noexcept -> std::int64_t { return p.k.strides.dim; },
                 [](P p) noexcept { return p.k.strides.dim == 1; }},
    Precondition<Problem>{kUnsupported, "v.strides.dim", "the CUDA backend needs 1",
                 [](P p) noexcept -> std::int64_t { return p.v.strides.dim; },
                 [](P p) noexcept { return p.v.strides.dim == 1; }},
    Precondition<Problem>{kUnsupported, "o.strides.dim", "the CUDA backend needs 1",
                 [](P p) noexcept -> std::int64_t { return p.o.strides.dim; },
                 [](P p) noexcept { return p.o.strides.dim == 1; }},
    Precondition<Problem>{kUnsupported, "q.data", "the CUDA backend needs rows of q that begin at multiples of 4 bytes",
                 [](P p) noexcept { return as_int(p.q.data); },
                 [](P p) noexcept { return rows_aligned(p.q, 4); }},
    Precondition<Problem>{kUnsupported, "k.data", "the CUDA backend needs rows of 16-bit k that begin at multiples of 16 bytes",
                 [](P p) noexcept { return as_int(p.k.data); },
                 [](P p) noexcept { return kv_aligned(p.k); }},
    Precondition<Problem>{kUnsupported, "v.data", "the CUDA backend needs rows of 16-bit v that begin at multiples of 16 bytes",
                 [](P p) noexcept { return as_int(p.v.data); },
                 [](P p) noexcept { return kv_aligned(p.v); }},
    Precondition<Problem>{kUnsupported, "o.data", "the CUDA backend needs rows of o that begin at multiples of 4 bytes with rotary",
                 [](P p) noexcept { return as_int(p.o.data); },
                 [](P p) noexcept { return p.append.rotary_dim == 0 || rows_aligned(p.o, 4); }},
};
// clang-format on

bool in_chunks(const Policy& policy) noexcept { return policy.kind == Policy::Kind::kFixedChunk; }

/// With fixed_chunk the variant, and with it the order of sums, must not depend on n_q: one query token's rows choose it.
std::int64_t choosing_rows(P problem, const Policy& policy) noexcept {
  return in_chunks(policy) ? problem.q_heads / problem.kv_heads : schedule::row_capacity(problem);
}

/// Token rows of a head lie end to end, so a tile is one run of bytes.
bool end_to_end(P problem) noexcept {
  return problem.k.strides.token == problem.head_dim && problem.v.strides.token == problem.head_dim;
}

/// The copy engine takes tiles whole, or page by page.
bool copies_runs(P problem, const Device& device) noexcept {
  if (!device.copies_in_bulk() || !end_to_end(problem) || copy_bytes(problem) != kPieceBytes) return false;
  const std::int64_t row_bytes = problem.head_dim * bytes_of(problem.k.dtype);
  return !is_paged(problem.pages) || problem.pages.page_tokens * row_bytes >= kMinRunBytes;
}

std::int32_t page_shift_of(P problem) noexcept {
  const auto tokens = static_cast<std::uint32_t>(problem.pages.page_tokens);
  return std::has_single_bit(tokens) ? std::countr_zero(tokens) : -1;
}

/// A window's left end is the row block's own where it has one query token and its first tile begins there, else its rows differ.
bool has_score_rules(P problem, const Policy& policy) noexcept {
  const Scores& scores = problem.scores;
  return scores.softcap > 0.0F || scores.alibi_slopes != nullptr || scores.mask != nullptr ||
         (scores.window_left >= 0 && (problem.q_tokens > 1 || in_chunks(policy)));
}

bool may_have_score_rules(P problem, const Policy& policy) noexcept {
  return has_score_rules(problem, policy) || problem.scores.tree_mask != nullptr || is_paged(problem.pages);
}

bool hides_values(P problem, const Policy& policy) noexcept {
  const Scores& scores = problem.scores;
  return scores.mask != nullptr || scores.tree_mask != nullptr || (scores.window_left >= 0 && in_chunks(policy));
}

/// Tensor copies take what they can of a tile.
bool copies_boxes(const KernelEntry& entry, P problem) noexcept { return entry.config.in_columns() && takes_boxes(problem); }

struct RingSize {
  std::int32_t stage_bytes = 0;
  std::int32_t stages = 0;
};

RingSize ring_size(const KernelEntry& entry, const Device& device, P problem, bool flat) noexcept {
  const std::int64_t dims = entry.config.pads_rows() ? entry.config.head_dim : problem.head_dim;
  RingSize size{.stage_bytes = entry.config.tile_tokens * entry.config.stage_row_bytes(static_cast<std::int32_t>(dims))};
  std::int64_t room = device.shared_bytes - entry.fixed_shared_bytes[flat ? 1 : 0];
  if (copies_boxes(entry, problem) || copies_runs(problem, device)) room = min_of(room, std::int64_t{kTmaRingBytes});
  size.stages = static_cast<std::int32_t>(min_of(max_stages(entry.config), room / size.stage_bytes));
  return size;
}

constexpr std::int32_t kMinStages = 2;  // a K and a V tile

bool fits(const KernelEntry& entry, const Device& device, P problem) noexcept {
  return ring_size(entry, device, problem, false).stages >= kMinStages;
}

/// The variant that serves whatever is asked. Wider row blocks have shorter tiles: where a device's shared memory does not hold two of the
/// narrowest block's, theirs. Null: the build has none; one that does not fit: none does.
const KernelEntry* any_variant(P problem, const Policy& policy, const Device& device) noexcept {
  const auto holding = [&](std::int64_t rows) noexcept {
    return find_kernel(problem.k.dtype, problem.head_dim, rows, Scope::kAnyCall);
  };
  const KernelEntry* entry = holding(choosing_rows(problem, policy));
  while (entry != nullptr && !fits(*entry, device, problem)) {
    const KernelEntry* wider = holding(entry->config.q_rows + 1);
    if (wider == entry) break;
    entry = wider;
  }
  return entry;
}

/// More would make groups of partials longer than the kernel stages at once.
constexpr std::int32_t kMaxWorkers = fixup::kMaxOneLevel * fixup::kMaxOneLevel;

/// Packed rows of a kv head that decode steps have at most: as many as the smallest row block of any call.
constexpr std::int32_t kFewRows = 16;

/// Whatever the lengths: every kv head of a sequence is one output, the policy cuts the line, and 32 bits count it.
bool is_flat(P problem, const Policy& policy, const schedule::LineShape& shape, const schedule::CostModel& model,
             std::int32_t workers) noexcept {
  return schedule::measure_of(policy.kind) == schedule::Measure::kCost && schedule::row_capacity(problem) <= shape.q_rows &&
         schedule::narrow_units(schedule::output_capacity(problem, shape.q_rows), problem.kv_capacity, shape, model, workers);
}

/// In columns, as tensor copies lay a tile down, there is less to compute of it, but a call's first copies are answered later. Fp8 of few
/// rows gains by them only where a worker has many segments to end, while which nothing is computed (docs/cuda-backend.md).
bool gains_by_columns(P problem, std::int32_t workers) noexcept {
  const std::int64_t rows = schedule::row_capacity(problem);
  if (!is_fp8(problem.k.dtype)) return rows > kMmaRows;
  return rows > kNarrowRows || schedule::output_capacity(problem, kNarrowRows) > std::int64_t{2} * workers;
}

/// Dims of a variant; rows of others are padded.
bool is_whole(std::int64_t head_dim) noexcept { return std::ranges::find(kHeadDims, head_dim) != std::end(kHeadDims); }

Scope step_scope(P problem, const Options& options, const Device& device) noexcept {
  if (in_chunks(options.policy)) return Scope::kChunkStep;
  const bool runs = copies_runs(problem, device);
  if (!is_whole(problem.head_dim)) return Scope::kTensorStep;  // boxes are filled up with zeros
  if (gains_by_columns(problem, options.workers) || (is_fp8(problem.k.dtype) && !runs)) return Scope::kTensorStep;
  const std::int64_t page_bytes = problem.pages.page_tokens * problem.head_dim * bytes_of(problem.k.dtype);
  const bool short_runs = is_paged(problem.pages) && page_bytes < kMinStepRunBytes;
  if ((!runs || short_runs) && takes_boxes(problem)) return Scope::kTensorStep;
  return runs ? Scope::kDecodeStep : Scope::kStridedStep;
}

schedule::LineShape shape_for(const KernelEntry& entry, P problem) noexcept {
  return schedule::line_shape_of(problem, entry.config.q_rows, entry.config.tile_tokens);
}

bool flat_for(const KernelEntry& entry, P problem, const Options& options) noexcept {
  return is_flat(problem, options.policy, shape_for(entry, problem), cost_model(entry.config.tile()), options.workers);
}

/// Whatever the call asks for, the variant for decode steps has it.
bool serves_step(const KernelEntry& step, P problem, const Options& options, const Device& device) noexcept {
  return device.copies_in_bulk() && (copies_runs(problem, device) || !step.config.bulk_step()) &&
         copy_bytes(problem) == kPieceBytes && rows_aligned(problem.q, kPieceBytes) &&
         (problem.head_dim == step.config.head_dim || step.config.pads_rows()) && !has_score_rules(problem, options.policy) &&
         problem.scores.tree_mask == nullptr && !hides_values(problem, options.policy) && options.fixup == Fixup::kLastArriver &&
         flat_for(step, problem, options) && ring_size(step, device, problem, true).stages >= kMinStages;
}

/// The variant that serves a call that only reads (after_append()). Null: the build has none.
const KernelEntry* variant_for(P problem, const Options& options, const Device& device) noexcept {
  const std::int64_t rows = choosing_rows(problem, options.policy);
  const KernelEntry* step = find_kernel(problem.k.dtype, problem.head_dim, rows, step_scope(problem, options, device));
  return step != nullptr && serves_step(*step, problem, options, device) ? step : any_variant(problem, options.policy, device);
}

Status launch(const KernelEntry& entry, DeviceCall& call, TensorMaps& maps, std::int32_t grid, std::int64_t shared_bytes,
              cudaStream_t stream) noexcept {
  const auto* kernel = reinterpret_cast<const void*>(entry.kernel);
  if (const cudaError_t error =
          cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes));
      error != cudaSuccess) {
    return cuda_status(error, "cudaFuncSetAttribute");
  }
  const bool waits_for_others = call.fixup.kind == Fixup::kHostBlock && call.fixup.pass == Pass::kWhole;
  const bool overlaps = call.launch.dependent || call.launch.follows_append;
  cudaLaunchAttribute attribute{};
  if (waits_for_others) {
    attribute.id = cudaLaunchAttributeCooperative;
    attribute.val.cooperative = 1;
  } else if (overlaps) {
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
  }
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(grid));
  config.blockDim = dim3(static_cast<unsigned>(cta_threads(entry.config)));
  config.dynamicSmemBytes = static_cast<std::size_t>(shared_bytes);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = waits_for_others || overlaps ? 1 : 0;
  void* arguments[] = {&call, &maps};
  return cuda_status(cudaLaunchKernelExC(&config, kernel, arguments), "cudaLaunchKernelExC");
}

Status launch_passes(const KernelEntry& entry, DeviceCall& call, TensorMaps& maps, std::int32_t grid, std::int64_t shared_bytes,
                     cudaStream_t stream) noexcept {
  const Status status = launch(entry, call, maps, grid, shared_bytes, stream);
  if (!status.ok() || call.fixup.kind != Fixup::kTwoKernels) return status;
  call.fixup.pass = Pass::kMergeOnly;
  call.launch.follows_append = false;
  return launch(entry, call, maps, grid, shared_bytes, stream);
}

/// Queries of a call that one launch serves.
struct Share {
  Problem shape;  // the call with no more queries than that: what chooses the kernel
  QueryRange queries;
};

struct Shares {
  Share share[2];
  std::int32_t count = 1;

  [[nodiscard]] const Share* begin() const noexcept { return share; }
  [[nodiscard]] const Share* end() const noexcept { return share + count; }
};

/// Row blocks of prefill chunks are wide, and a CTA reads a tile for a few rows in one as slowly as for all: in a batch of both, decode
/// rows have a launch of their own. Lengths are on the device, so each launch sees all sequences and passes over the other's.
Shares shares_of(P problem, const Options& options) noexcept {
  Shares shares{.share = {{.shape = problem, .queries = {}}, {.shape = problem, .queries = {}}}};
  if (problem.cu_q_tokens == nullptr || in_chunks(options.policy)) return shares;
  Share& many = shares.share[0];
  Share& few = shares.share[1];
  few.shape.q_tokens = most_of(1, kFewRows / (problem.q_heads / problem.kv_heads));
  if (few.shape.q_tokens >= problem.q_tokens) return shares;
  few.queries.most = few.shape.q_tokens;
  many.queries.least = few.shape.q_tokens + 1;
  shares.count = 2;
  return shares;
}

fixup::Slots slots_of(P problem, const Options& options, const tile::TileConfig& config, const Workspace& workspace) noexcept {
  return {fixup::workspace_layout(problem, options.policy, config, options.workers), static_cast<std::byte*>(workspace.state),
          static_cast<std::byte*>(workspace.scratch)};
}

/// What the kernel may take a short line of so many outputs for. Of whole tiles only without pages (decode_kernel.cuh).
schedule::EvenLine even_line_for(const KernelEntry& entry, P problem, const Options& options, std::int64_t outputs) noexcept {
  if (!entry.config.looks_for_even_lines() || options.policy.kind != Policy::Kind::kLean) return {};
  if (has_cumulative_lengths(problem) || (entry.config.bulk_step() && is_paged(problem.pages))) return {};
  return schedule::even_line_of(outputs, options.workers, cost_model(entry.config.tile()), kEvenShareTiles);
}

/// What the call needs is known from the share's shape; lengths are clamped to the whole problem's.
Status launch_share(P problem, const Share& share, const Options& options, const Workspace& workspace, const Device& device,
                    bool follows_append) noexcept {
  const Problem& shape = share.shape;
  const KernelEntry& entry = *variant_for(shape, options, device);
  const tile::TileConfig config = entry.config.tile();
  // Any call's variant walks a flat line under `lean` only, where it is what most calls ask for.
  const bool flat = flat_for(entry, shape, options) && (entry.config.step() || options.policy.kind == Policy::Kind::kLean);
  const std::int32_t workers = options.workers;
  const std::int64_t outputs = schedule::output_capacity(shape, entry.config.q_rows);
  const bool runs = copies_runs(problem, device);
  const bool few = flat && problem.batch <= kLaneSequences * kWarpThreads;
  const schedule::EvenLine even = few ? even_line_for(entry, problem, options, outputs) : schedule::EvenLine{};
  const bool short_line = few && (problem.batch <= kWarpThreads || even.outputs > 0);
  DeviceCall call{
      .load = {.k_rows = kv_rows_of(problem.k),
               .v_rows = kv_rows_of(problem.v),
               .copy_bytes = copy_bytes(problem),
               .page_shift = page_shift_of(problem),
               .bulk_copies = runs,
               .vector_queries = rows_aligned(problem.q, 16)},
      .problem = problem,
      .shape = shape_for(entry, shape),
      .group_inverse = static_cast<std::int32_t>(ceil_div(1 << kGroupInverseBits, problem.q_heads / problem.kv_heads)),
      .plan = {.queries = share.queries,
               .policy = options.policy,
               .even = even,
               .kv_heads_inverse = static_cast<std::int32_t>(ceil_div(1 << kOutputInverseBits, problem.kv_heads)),
               .alike = alike_shares(outputs, problem.kv_heads, workers),
               .chunk_tiles = in_chunks(options.policy) ? schedule::chunk_tiles_of(options.policy, config.tile_tokens) : 0,
               .flat = flat,
               .short_line = short_line,
               .cumulative = has_cumulative_lengths(problem)},
      .tile = {.log2_scale = softmax::log2_scale(problem.scores.scale, problem.head_dim),
               .score_rules = has_score_rules(shape, options.policy),
               .may_rule = may_have_score_rules(shape, options.policy),
               .hides_values = hides_values(problem, options.policy)},
      .output = {.vector_output = rows_aligned(problem.o, 8)},
      .fixup = {.kind = options.fixup, .slots = slots_of(shape, options, config, workspace)},
      .launch = {.dependent = options.dependent_launch, .follows_append = follows_append}};
  TensorMaps maps{};
  if (copies_boxes(entry, problem)) {
    const std::int32_t rows = tall_box_rows(problem, config.tile_tokens);
    if (encode(problem, entry.config.column_bytes(), rows, maps)) call.load.box_tokens = rows;
  }
  const RingSize ring = ring_size(entry, device, problem, call.plan.flat);
  call.load.ring_stages = ring.stages;
  call.load.stage_bytes = ring.stage_bytes;
  const std::int64_t shared_bytes = entry.fixed_shared_bytes[call.plan.flat ? 1 : 0] + std::int64_t{ring.stages} * ring.stage_bytes;
  return launch_passes(entry, call, maps, workers, shared_bytes, static_cast<cudaStream_t>(options.stream));
}

/// Of a call that only reads. Only the first launch has the kernel that appends right ahead of it.
Status launch_shares(P problem, const Options& options, const Workspace& workspace, const Device& device,
                     bool follows_append) noexcept {
  for (const Share& share : shares_of(problem, options)) {
    const Status status = launch_share(problem, share, options, workspace, device, follows_append);
    if (!status.ok()) return status;
    follows_append = false;
  }
  return {};
}

Status launch_call(P problem, const Options& options, const Workspace& workspace, const Device& device) noexcept {
  if (!appends(problem)) return launch_shares(problem, options, workspace, device, false);
  if (const Status status = enqueue_append(problem, options.dependent_launch, options.stream); !status.ok()) return status;
  const bool dependent = device.launches_dependents() && !options.dependent_launch && options.fixup != Fixup::kHostBlock;
  return launch_shares(after_append(problem), options, workspace, device, dependent);
}

/// As asked, and by default one worker a multiprocessor.
Options with_workers(const Options& options, const Device& device) noexcept {
  Options resolved = options;
  if (resolved.workers == 0) resolved.workers = device.multiprocessors;
  return resolved;
}

}  // namespace

std::int32_t worker_count(const Options& options) noexcept {
  Device device;
  return current_device(device).ok() ? with_workers(options, device).workers : most_of(1, options.workers);
}

tile::TileConfig select_tile(const Problem& problem, const Options& options) noexcept {
  Device device;
  if (!current_device(device).ok()) return {};
  const KernelEntry* entry = variant_for(after_append(problem), with_workers(options, device), device);
  return entry != nullptr ? entry->config.tile() : tile::TileConfig{};
}

Status supports(const Problem& problem, const Options& options) noexcept {
  if (const Status status = PreconditionTable<Problem>{kRefused.data(), kRefused.size()}.check(problem); !status.ok())
    return status;
  Device device;
  if (const Status status = current_device(device); !status.ok()) return status;
  const KernelEntry* const found = any_variant(problem, options.policy, device);
  if (found == nullptr) {
    return refuse(kUnsupported, "head_dim", problem.head_dim,
                  "this build has no kernels for it and the type of k (LEAN_CUDA_FAMILIES)");
  }
  const KernelEntry& entry = *found;
  const std::int32_t workers = with_workers(options, device).workers;
  if (const Status status = fixup::check_pairing(problem, options, entry.config.tile(), workers); !status.ok()) return status;
  if (workers > kMaxWorkers) return refuse(kUnsupported, "options.workers", workers, "the CUDA backend takes 1024 at most");
  if (!fits(entry, device, problem)) {
    return refuse(kUnsupported, "head_dim", problem.head_dim, "this device has too little shared memory for it");
  }
  if (options.dependent_launch && !device.launches_dependents()) {
    return refuse(kUnsupported, "options.dependent_launch", 1, "needs a device of compute capability 9.0 or newer");
  }
  if (options.dependent_launch && options.fixup == Fixup::kHostBlock) {
    return refuse(kUnsupported, "options.dependent_launch", 1, "host_block needs a cooperative launch, which has no dependents");
  }
  if (options.fixup == Fixup::kHostBlock && (!device.cooperative || workers > device.multiprocessors)) {
    return refuse(kUnsupported, "options.workers", workers, "host_block needs all workers resident: one a multiprocessor at most");
  }
  return {};
}

WorkspaceSize workspace_size(const Problem& problem, const Options& options) noexcept {
  WorkspaceSize size{};
  Device device;
  if (size.status = current_device(device); !size.status.ok()) return size;
  const std::int32_t workers = with_workers(options, device).workers;
  for (const Share& share : shares_of(problem, options)) {
    const KernelEntry& entry = *any_variant(share.shape, options.policy, device);
    const fixup::WorkspaceLayout layout = fixup::workspace_layout(share.shape, options.policy, entry.config.tile(), workers);
    size.state_bytes = most_of(size.state_bytes, static_cast<std::size_t>(layout.state_bytes()));
    size.scratch_bytes = most_of(size.scratch_bytes, static_cast<std::size_t>(layout.scratch_bytes()));
  }
  return size;
}

Status decode(const Problem& problem, const Options& asked, const Workspace& workspace) noexcept {
  Device device;
  if (const Status status = current_device(device); !status.ok()) return status;
  const Options options = with_workers(asked, device);
  if (!options.check_workspace) return launch_call(problem, options, workspace, device);
  const KernelEntry& entry = *variant_for(after_append(problem), options, device);
  const fixup::Slots slots = slots_of(problem, options, entry.config.tile(), workspace);
  const fixup::Counter ticket = next_ticket();
  if (const Status status = claim_workspace(slots, ticket, options.stream); !status.ok()) return status;
  const Status status = launch_call(problem, options, workspace, device);
  const Status released = release_workspace(slots, ticket, options.stream);
  return status.ok() ? released : status;
}

Status clear_state(const Workspace& workspace, const Options& options) noexcept {
  return cuda_status(cudaMemsetAsync(workspace.state, 0, workspace.state_bytes, static_cast<cudaStream_t>(options.stream)),
                     "cudaMemsetAsync");
}

Status read_sticky(const Workspace& workspace, const Options& options, StatusCode& code) noexcept {
  fixup::StateHeader header;
  auto* const stream = static_cast<cudaStream_t>(options.stream);
  const cudaError_t error = cudaMemcpyAsync(&header, workspace.state, sizeof(header), cudaMemcpyDeviceToHost, stream);
  if (error != cudaSuccess) return cuda_status(error, "cudaMemcpyAsync");
  code = static_cast<StatusCode>(header.sticky_code);
  const Status status = cuda_status(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  code = static_cast<StatusCode>(header.sticky_code);
  return status;
}

}  // namespace lean::cuda
