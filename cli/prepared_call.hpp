// PreparedCall: a problem, options and a workspace of the right size, ready to be called again and again; and what the
// library's schedule for it looks like.
#pragma once

#include "backends/reference/error_bound.hpp"
#include "cli/decode_problem.hpp"
#include "cli/memory.hpp"
#include "explain/schedule_map.hpp"
#include "lean/lean.hpp"
#include "tile/tiling.hpp"

namespace lean::cli {

class PreparedCall {
 public:
  /// Throws BadArgument when the library refuses. `problem` outlives this.
  PreparedCall(const DecodeProblem& problem, const Options& options);

  /// One call on copy 0 of K and V, waited for; throws std::runtime_error when it fails.
  void run() const;
  /// On the GPU: one call on any copy, not waited for. Calls of one PreparedCall share its workspace, so they follow each other.
  void enqueue(std::int64_t copy, void* stream) const;

  [[nodiscard]] const Options& options() const { return options_; }

 private:
  const DecodeProblem& problem_;
  Options options_;
  Buffer state_;
  Buffer scratch_;
  Workspace workspace_;
};

/// What the backend cuts such a call into.
[[nodiscard]] tile::Tiling tiling_of(const Problem& problem, const Options& options);

/// The schedule the backend follows for these lengths on options.workers workers (0: its threads, or one or two a multiprocessor). The
/// lengths are readable by the host.
[[nodiscard]] explain::ScheduleMap map_of(const Problem& problem, const Options& options);

/// How a result of these options rounds, for the error bound.
[[nodiscard]] reference::Rounding rounding_of(const Problem& problem, const Options& options);

}  // namespace lean::cli
