// The coefficients of the time model. Written by tools/fit_time_model.py from bench/results; check.time_model holds them to it.
#pragma once

#include "cli/time_model.hpp"

namespace lean::cli {

inline constexpr TimeModel kTimeModel{
    .step = {.tile_us = 0.0, .worker_gbps = 104.0},
    .any_call = {.tile_us = 0.409, .worker_gbps = 80.8},
    .sm80 = {.tile_us = 0.547, .worker_gbps = 40.8},
    .flat = {.call_us = 4.14, .segment_us = 1.63, .merge_us = 2.99, .contributor_us = 0.0247},
    .general = {.call_us = 15.5, .segment_us = 4.55, .merge_us = 13.9, .contributor_us = 0.647},
    .memory_share = 0.959,
};

}  // namespace lean::cli
