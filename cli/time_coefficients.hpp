// The coefficients of the time model. Written by tools/fit_time_model.py from bench/results; check.time_model holds them to it.
#pragma once

#include "cli/time_model.hpp"

namespace lean::cli {

inline constexpr TimeModel kTimeModel{
    .step = {.tile_us = 0.0, .worker_gbps = 80.0},
    .any_call = {.tile_us = 0.421, .worker_gbps = 81.9},
    .sm80 = {.tile_us = 0.545, .worker_gbps = 40.7},
    .flat = {.call_us = 5.43, .segment_us = 1.63, .merge_us = 1.36, .contributor_us = 0.0278},
    .general = {.call_us = 15.5, .segment_us = 4.59, .merge_us = 14.1, .contributor_us = 0.644},
    .memory_share = 0.962,
};

}  // namespace lean::cli
