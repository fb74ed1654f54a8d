#include "cli/prepared_call.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "api/backends.hpp"
#include "api/option_preconditions.hpp"
#include "backends/cpu/cpu_backend.hpp"
#include "backends/cpu/tile_kernels.hpp"
#include "backends/cuda/kernel/tile/bf16_queries.hpp"
#include "backends/cuda/kernel_rows.hpp"
#include "backends/cuda/plain.hpp"
#include "base/kv_type.hpp"
#include "cli/call_options.hpp"
#include "cli/gpu.hpp"

namespace lean::cli {
namespace {

void require_done(const Status& status) {
  if (!status.ok()) throw std::runtime_error(std::string(name_of(status.code)) + ": " + status.message);
}

}  // namespace

PreparedCall::PreparedCall(const DecodeProblem& problem, const Options& options) : problem_(problem), options_(options) {
  const WorkspaceSize need = workspace_size(problem.problem(), options_);
  require_accepted(need.status);
  state_ = Buffer(static_cast<std::int64_t>(need.state_bytes), problem.place());
  scratch_ = Buffer(static_cast<std::int64_t>(need.scratch_bytes), problem.place());
  workspace_ = {
      .state = state_.data(), .state_bytes = need.state_bytes, .scratch = scratch_.data(), .scratch_bytes = need.scratch_bytes};
  require_done(reset_workspace(workspace_, options_));
  if (problem.place() == Place::kDevice) gpu::synchronize();
}

void PreparedCall::run() const {
  require_done(decode(problem_.problem(), options_, workspace_));
  if (problem_.place() == Place::kHost) return;
  gpu::synchronize();
  require_done(sticky_status(workspace_, options_));
}

void PreparedCall::enqueue(std::int64_t copy, void* stream) const {
  Options options = options_;
  options.stream = stream;
  require_done(decode(problem_.problem_on(copy), options, workspace_));
}

tile::Tiling tiling_of(const Problem& problem, const Options& options) {
  return backend_of(options.backend)->tiling_of(problem, resolve(options));
}

explain::ScheduleMap map_of(const Problem& problem, const Options& options) {
  const Options resolved = resolve(options);
  const tile::Tiling tiling = tiling_of(problem, options);
  return explain::build_map({.lengths = LengthSource(problem),
                             .shape = schedule::line_shape_of(problem, tiling.config.q_rows, tiling.config.tile_tokens),
                             .cost_model = tiling.cost_model,
                             .policy = resolved.policy,
                             .workers = tiling.workers});
}

namespace {

/// The CUDA backend multiplies P and V as 16-bit matrices; subnormals are kept (PTX ISA, mma).
reference::Rounding cuda_rounding(const Problem& problem, const Options& options) {
  const tile::Tiling tiling = tiling_of(problem, options);
  if (cuda::is_plain(tiling.config)) {
    return {.tile_tokens = cuda::kPlainRoundTokens,
            .tile_depth = cuda::kPlainRunRoundings,
            .tile_roundings = cuda::kPlainRoundRoundings};
  }
  const DType weights = kv_type_of(problem.v.dtype).product;
  return {.p_roundoff = reference::unit_roundoff(weights),
          .p_is_half = weights == DType::kFloat16,
          .query_step = cuda::query_step_of(problem),
          .tile_tokens = tiling.config.tile_tokens,
          .tile_depth = cuda::kProductRoundings,
          .tile_roundings = cuda::sum_roundings(tiling.config),
          .contributors = std::max(tiling.workers, options.policy.splits)};
}

}  // namespace

reference::Rounding rounding_of(const Problem& problem, const Options& options) {
  if (options.backend == Backend::kCuda) return cuda_rounding(problem, options);
  const tile::Tiling tiling = cpu::tiling_of(problem, options);
  const bool bf16_probabilities = cpu::rounds_probabilities(options, problem);
  return {.p_roundoff = bf16_probabilities ? reference::unit_roundoff(DType::kBFloat16) : 0.0,
          .flushed_below = bf16_probabilities ? 0x1p-126 : 0.0,  // vdpbf16ps and tdpbf16ps take subnormals as 0 (Intel SDM)
          .tile_tokens = tiling.config.tile_tokens,
          .tile_depth = tiling.config.tile_tokens,
          .contributors = std::max(tiling.workers, options.policy.splits)};
}

}  // namespace lean::cli
