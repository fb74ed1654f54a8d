// A plan's kernels, enqueued: new tokens first, then one launch or two, each with its DeviceCall and tensor maps; the workspace's
// checks around them.
#include "backends/cuda/launch.hpp"

#include <cuda_runtime_api.h>

#include <bit>

#include "backends/cuda/append.hpp"
#include "backends/cuda/tensor_map.hpp"
#include "backends/cuda/workspace_check.hpp"
#include "base/alignment.hpp"
#include "base/int_math.hpp"
#include "problem/append.hpp"
#include "softmax/scale.hpp"
#include "timeline/hook.hpp"

namespace lean::cuda {
namespace {

std::int32_t page_shift_of(const Problem& problem) noexcept {
  const auto tokens = static_cast<std::uint32_t>(problem.pages.page_tokens);
  return std::has_single_bit(tokens) ? std::countr_zero(tokens) : -1;
}

/// Behind those of the launches ahead.
fixup::Slots slots_of(const CallPlan& plan, const LaunchPlan& launch, const Workspace& workspace) noexcept {
  fixup::Slots slots{launch.workspace, static_cast<std::byte*>(workspace.state), static_cast<std::byte*>(workspace.scratch)};
  for (const LaunchPlan* ahead = plan.begin(); ahead != &launch; ++ahead) {
    slots.scratch += ahead->workspace.scratch_bytes();
    slots.counters_before += ahead->workspace.counters();
  }
  return slots;
}

/// 2^bits / divisor, rounded up.
std::int32_t inverse_of(std::int32_t divisor, std::int32_t bits) noexcept {
  return static_cast<std::int32_t>(ceil_div(std::int64_t{1} << bits, divisor));
}

/// 0: the launch has no chunks.
std::int32_t chunk_tiles_of(const CallPlan& plan, const LaunchPlan& launch) noexcept {
  const Policy& policy = plan.options.policy;
  const bool chunks = !plan.plain && policy.kind == Policy::Kind::kFixedChunk;
  return chunks ? schedule::chunk_tiles_of(policy, launch.kernel->config.tile_tokens) : 0;
}

DeviceCall device_call(const Problem& problem, const CallPlan& plan, const LaunchPlan& launch, const Workspace& workspace,
                       bool follows_append) noexcept {
  const Options& options = plan.options;
  return {.load = {.k_rows = kv_rows_of(problem.k),
                   .v_rows = kv_rows_of(problem.v),
                   .ring_stages = launch.ring.stages,
                   .stage_bytes = launch.ring.stage_bytes,
                   .copy_bytes = plan.copies.thread_bytes,
                   .page_shift = page_shift_of(problem),
                   .bulk_copies = plan.copies.runs,
                   .vector_queries = plan.vector_queries},
          .problem = after_append(problem),
          .shape = launch.line,
          .group_inverse = inverse_of(launch.line.group, kGroupInverseBits),
          .launch = {.dependent = options.dependent_launch, .follows_append = follows_append, .beside = plan.side_by_side()},
          .plan = {.flat = launch.flat,
                   .short_line = launch.short_line,
                   .cumulative = has_cumulative_lengths(problem),
                   .spares_workers = !plan.plain && spares_workers(launch.kernel->config, plan.device.memory_share),
                   .even = launch.even,
                   .kv_heads_inverse = inverse_of(problem.kv_heads, kOutputInverseBits),
                   .alike = alike_shares(launch.outputs, problem.kv_heads, launch.workers),
                   .queries = launch.queries,
                   .policy = options.policy,
                   .chunk_tiles = chunk_tiles_of(plan, launch)},
          .tile = {.log2_scale = softmax::log2_scale(problem.scores.scale, problem.head_dim),
                   .score_rules = launch.rules.every_tile,
                   .may_rule = launch.rules.some_tile,
                   .hides_values = launch.rules.hides_values},
          .output = {.vector_output = rows_aligned(problem.o, 8), .piece_output = rows_aligned(problem.o, 16)},
          .fixup = {.kind = options.fixup, .slots = slots_of(plan, launch, workspace)},
          .stair = {.group = Divisor(launch.line.group),
                    .even = launch.even_stair,
                    .step = launch.stair_step,
                    .most_outputs = launch.most_outputs},
          .sides = plan.sides,
#ifdef LEAN_TIMELINE
          .timeline = timeline::target()
#endif
  };
}

/// Left out where the driver does not take them: threads copy then.
void add_tensor_maps(const LaunchPlan& launch, DeviceCall& call, TensorMaps& maps) noexcept {
  const KernelConfig& config = launch.kernel->config;
  const std::int32_t rows = tall_box_rows(call.problem, config.tile_tokens);
  if (encode(call.problem, config.column_bytes(), rows, maps)) call.load.box_tokens = rows;
}

Status launch_pass(const CallPlan& plan, const LaunchPlan& launch, DeviceCall& call, TensorMaps& maps) noexcept {
  const bool exchanges = launch.kernel->config.exchanges();
  const auto* kernel = exchanges ? reinterpret_cast<const void*>(launch.kernel->exchanging_kernel)
                                 : reinterpret_cast<const void*>(launch.kernel->kernel);
  // The most a CTA may have, whatever this launch takes: another thread may launch the same kernel with a longer ring meanwhile.
  if (const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, plan.device.shared_bytes);
      error != cudaSuccess) {
    return cuda_status(error, "cudaFuncSetAttribute");
  }
  const bool waits_for_others = call.fixup.kind == Fixup::kHostBlock && call.fixup.pass == Pass::kWhole;
  const bool beside = plan.side_by_side() && &launch != plan.begin();
  const bool overlaps = call.launch.dependent || call.launch.follows_append || beside;
  cudaLaunchAttribute attribute{};
  if (waits_for_others) {
    attribute.id = cudaLaunchAttributeCooperative;
    attribute.val.cooperative = 1;
  } else if (overlaps) {
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
  }
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(launch.workers));
  config.blockDim = dim3(static_cast<unsigned>(cta_threads(launch.kernel->config)));
  // Beside another launch a multiprocessor has one CTA, so that none of them has two while others wait for one: each asks for more than
  // half of the shared memory that a CTA may have. Every kernel that may run so takes more for itself; this keeps it so for any.
  const std::int64_t alone = plan.side_by_side() ? plan.device.shared_bytes / 2 + 1 : 0;
  config.dynamicSmemBytes = static_cast<std::size_t>(max_of(launch.shared_bytes(), alone));
  config.stream = static_cast<cudaStream_t>(plan.options.stream);
  config.attrs = &attribute;
  config.numAttrs = waits_for_others || overlaps ? 1 : 0;
  Exchange exchange = exchanges ? *plan.options.exchange : Exchange{};
  void* arguments[] = {&call, &maps, &exchange};  // as many as the kernel has
  return cuda_status(cudaLaunchKernelExC(&config, kernel, arguments), "cudaLaunchKernelExC");
}

/// One pass, or with two_kernels two.
Status launch_kernel(const Problem& problem, const CallPlan& plan, const LaunchPlan& launch, const Workspace& workspace,
                     bool follows_append) noexcept {
  DeviceCall call = device_call(problem, plan, launch, workspace, follows_append);
  if (plan.plain) return enqueue_plain(call, call.launch.dependent || call.launch.follows_append, plan.options.stream);
  TensorMaps maps{};
  if (launch.tensor_copies) add_tensor_maps(launch, call, maps);
  // Of a worker's one segment threads bring the queries beside its first keys; behind their boxes, in boxes too, they come 0.2 to 0.5 us
  // later (docs/notebook/chunks-prefill-append.md).
  const bool several = launch.outputs > launch.workers;
  if (several && launch.kernel->config.wide()) {
    call.load.query_boxes = encode_queries(call.problem, launch.kernel->config.q_rows, maps.q);
  }
  const Status status = launch_pass(plan, launch, call, maps);
  if (!status.ok() || call.fixup.kind != Fixup::kTwoKernels) return status;
  call.fixup.pass = Pass::kMergeOnly;
  call.launch.follows_append = false;
  return launch_pass(plan, launch, call, maps);
}

/// Only the first launch has the kernel that appends right ahead of it.
Status launch_all(const Problem& problem, const CallPlan& plan, const Workspace& workspace) noexcept {
  bool follows_append = false;
  if (appends(problem)) {
    const Status status = enqueue_append(problem, plan.options.dependent_launch, plan.options.stream);
    if (!status.ok()) return status;
    follows_append = plan.may_overlap();
  }
  for (const LaunchPlan& launch : plan) {
    if (const Status status = launch_kernel(problem, plan, launch, workspace, follows_append); !status.ok()) return status;
    follows_append = false;
  }
  return {};
}

}  // namespace

Status launch_call(const Problem& problem, const CallPlan& plan, const Workspace& workspace) noexcept {
  if (!plan.options.check_workspace) return launch_all(problem, plan, workspace);
  const LaunchPlan& last = *(plan.end() - 1);
  const fixup::Slots slots = slots_of(plan, last, workspace);
  const fixup::Counter ticket = next_ticket();
  if (const Status status = claim_workspace(slots, ticket, plan.options.stream); !status.ok()) return status;
  const Status status = launch_all(problem, plan, workspace);
  const Status released = release_workspace(slots, ticket, plan.options.stream);
  return status.ok() ? released : status;
}

}  // namespace lean::cuda
