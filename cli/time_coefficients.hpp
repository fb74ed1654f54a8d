// The coefficients of the time model. Written by tools/fit_time_model.py from bench/results; a test fails when they are not what it
// finds.
#pragma once

#include "cli/time_model.hpp"

namespace lean::cli {

inline constexpr TimeModel kTimeModel{
    .step = {.tile_us = 0.0, .worker_gbps = 82.0},
    .any_call = {.tile_us = 0.409, .worker_gbps = 80.9},
    .sm80 = {.tile_us = 0.409, .worker_gbps = 40.0},
    .flat = {.call_us = 4.13, .segment_us = 1.62, .merge_us = 2.9, .contributor_us = 0.0258},
    .general = {.call_us = 15.6, .segment_us = 4.57, .merge_us = 14.1, .contributor_us = 0.648},
    .memory_share = 0.96,
};

}  // namespace lean::cli
