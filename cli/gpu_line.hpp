// GpuLine: one measured, failed or skipped (row, implementation) on a GPU, as a line of a result file and as a line for
// people; and what a whole run comes to.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "cli/gpu_timing.hpp"
#include "cli/oracle.hpp"
#include "cli/peers.hpp"
#include "cli/problem_json.hpp"
#include "cli/problem_spec.hpp"
#include "cli/suites/matrix.hpp"

namespace lean::cli {

/// What all lines of a run share.
struct GpuContext {
  std::string device;
  std::string driver;
  std::string commit;
  std::string peers_device;  // empty: no peers
};

/// What the schedule gives to whom: tools/fit_cost_model.py explains times by these.
struct GpuWork {
  std::int32_t workers = 0;
  std::int64_t tiles = 0;         // most of a worker
  std::int64_t segments = 0;      // most of a worker
  std::int32_t contributors = 0;  // most of an output
  std::int64_t tile_bytes = 0;    // K and V of a whole tile
};

struct GpuLine {
  std::string row{};
  Suite suite = Suite::kPaper;
  Tier tier = Tier::kNone;
  std::string impl{};
  ProblemSpec spec{};
  GpuCallTimes call{};  // empty: not measured, `note` says why
  GpuCallTimes ceiling{};
  std::string ceiling_kernel{};
  std::int64_t copies = 0;
  GpuWork work{};
  GpuState state_before{};
  GpuState state_after{};
  Verdict verdict{};
  std::string note{};
  bool broken = false;  // neither skipped nor right
  std::optional<PeerTime> peer{};

  [[nodiscard]] bool measured() const { return !call.chained.us.empty(); }
  [[nodiscard]] double us() const { return call.chained.median(); }
  [[nodiscard]] double ceiling_us() const { return ceiling.chained.median(); }
  [[nodiscard]] double read_fraction() const { return ceiling_us() / us(); }
  /// What docs/performance.md asks of this size and layout.
  [[nodiscard]] double target_us() const;
  /// Time / the best peer's, or, where the two runs' ceilings differ by more than 3 %, the same of times / ceilings.
  [[nodiscard]] double against_peer() const;
};

[[nodiscard]] Json to_json(const GpuLine& line, const GpuContext& context);

[[nodiscard]] std::string gpu_text_header(bool with_peers);
[[nodiscard]] std::string to_text(const GpuLine& line);

/// What is said of `lean` at the end: geometric means and worst rows against the ceiling, the peers, the targets and the other
/// schedules.
[[nodiscard]] std::string summary_text(const std::vector<GpuLine>& lines);

}  // namespace lean::cli
