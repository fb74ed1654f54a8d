// TimeModel: how long a schedule takes on a GPU. Every worker streams its segments at a rate of its own as far as the memory, which
// all share, allows; ends of segments and merges take their time. The shares are those of build_map(), so what is simulated is the
// schedule that a call follows. Coefficients are fitted (tools/fit_time_model.py); docs/simulate.md has how well.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "backends/cuda/kernel_config.hpp"
#include "cli/gpu_models.hpp"
#include "cli/problem_spec.hpp"
#include "explain/schedule_map.hpp"

namespace lean::cli {

/// How one worker streams: a tile takes its time, whatever its bytes, and its bytes theirs. All times are those at kTimedClockMhz;
/// another clock stretches them.
struct StreamTimes {
  double tile_us = 0.0;
  double worker_gbps = 0.0;
};

/// What comes around the streaming.
struct WalkTimes {
  double call_us = 0.0;         // a launch, and what comes before the first byte and behind the last
  double segment_us = 0.0;      // between two segments of a worker
  double merge_us = 0.0;        // of an output that is shared, behind the arrival of its last contributor,
  double contributor_us = 0.0;  // and of each contributor's partial
};

struct TimeModel {
  StreamTimes step;           // a decode step's kernels: `lean` on compute capability 9.0
  StreamTimes any_call;       // there, those that serve whatever is asked
  StreamTimes sm80;           // the kernels of compute capability 8.0
  WalkTimes flat;             // the flat line: `lean`
  WalkTimes general;          // the general walk: fixed split, one worker per output
  double memory_share = 0.0;  // of the published bandwidth, that all workers together read
};

inline constexpr double kTimedClockMhz = 1980.0;

struct Coefficient {
  std::string_view name;
  double& value;
};
[[nodiscard]] std::vector<Coefficient> coefficients_of(TimeModel& model);

/// A schedule's time on a GPU.
struct Prediction {
  double us = 0.0;
  double read_us = 0.0;         // the read limit: all bytes at the memory's share
  std::vector<double> ends_us;  // of the workers that have work, from their first byte on, ascending
  double streaming_us = 0.0;    // the last of them
  double occupancy = 0.0;       // multiprocessors busy / all, mean from the first byte until the last end
  explain::ScheduleMap map;
};

/// The variant that a GPU's calls of this problem and schedule take. The problem is one that require_simulated() takes.
[[nodiscard]] cuda::KernelConfig gpu_kernel(const GpuModel& gpu, const ProblemSpec& spec, Policy::Kind policy);

/// Throws BadArgument unless the model was fitted on problems like it: one query token, 16-bit K and V without pages, no score
/// rules.
void require_simulated(const ProblemSpec& spec);

[[nodiscard]] Prediction predict(const GpuModel& gpu, const ProblemSpec& spec, const Policy& policy, const TimeModel& model);

}  // namespace lean::cli
