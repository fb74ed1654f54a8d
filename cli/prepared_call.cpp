#include "cli/prepared_call.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "acceptance/rounding.hpp"
#include "api/backends.hpp"
#include "api/option_preconditions.hpp"
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
                             .workers = tiling.workers,
                             .stair = tiling.stair});
}

reference::Rounding rounding_of(const Problem& problem, const Options& options) {
  return acceptance::rounding_of(problem, options, tiling_of(problem, options));
}

}  // namespace lean::cli
