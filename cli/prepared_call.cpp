#include "cli/prepared_call.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "api/backends.hpp"
#include "api/option_preconditions.hpp"
#include "backends/cpu/cpu_backend.hpp"
#include "backends/cpu/tile_kernels.hpp"
#include "cli/call_options.hpp"

namespace lean::cli {
namespace {

void require_done(const Status& status) {
  if (!status.ok()) throw std::runtime_error(std::string(name_of(status.code)) + ": " + status.message);
}

}  // namespace

PreparedCall::PreparedCall(const DecodeProblem& problem, const Options& options) : problem_(problem.problem()), options_(options) {
  const WorkspaceSize need = workspace_size(problem_, options_);
  require_accepted(need.status);
  state_ = Buffer(static_cast<std::int64_t>(need.state_bytes));
  scratch_ = Buffer(static_cast<std::int64_t>(need.scratch_bytes));
  workspace_ = {
      .state = state_.data(), .state_bytes = need.state_bytes, .scratch = scratch_.data(), .scratch_bytes = need.scratch_bytes};
  require_done(reset_workspace(workspace_, options_));
}

void PreparedCall::run() const { require_done(decode(problem_, options_, workspace_)); }

schedule::ScheduleMap map_of(const Problem& problem, const Options& options) {
  const Options resolved = resolve(options);
  const BackendEntry& backend = *backend_of(resolved.backend);
  const tile::TileConfig config = backend.select_tile(problem);
  return schedule::build_map({.lengths = LengthSource(problem),
                              .shape = schedule::line_shape_of(problem, config.q_rows, config.tile_tokens),
                              .cost_model = backend.cost_model(),
                              .policy = resolved.policy,
                              .workers = backend.worker_count(resolved)});
}

reference::Rounding rounding_of(const Problem& problem, const Options& options) {
  const bool bf16_probabilities = cpu::rounds_probabilities(options.cpu_isa, problem.v.dtype);
  return {.p_roundoff = bf16_probabilities ? reference::unit_roundoff(DType::kBFloat16) : 0.0,
          .flushed_below = bf16_probabilities ? 0x1p-126 : 0.0,  // vdpbf16ps takes subnormals as 0 (Intel SDM)
          .tile_tokens = cpu::select_tile(problem).tile_tokens,
          .contributors = std::max(cpu::worker_count(options), options.policy.splits)};
}

}  // namespace lean::cli
