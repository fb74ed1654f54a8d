// The coefficients of the time model. Written by tools/fit_time_model.py from bench/results; check.time_model holds them to it.
#pragma once

#include "cli/time_model.hpp"

namespace lean::cli {

inline constexpr TimeModel kTimeModel{
    .step = {.tile_us = 0.0, .worker_gbps = 62.2},
    .any_call = {.tile_us = 0.422, .worker_gbps = 81.9},
    .sm80 = {.tile_us = 0.545, .worker_gbps = 40.7},
    .flat = {.call_us = 5.5, .segment_us = 1.64, .merge_us = 1.2, .contributor_us = 0.0279},
    .general = {.call_us = 15.5, .segment_us = 4.61, .merge_us = 14.1, .contributor_us = 0.643},
    .memory_share = 0.963,
};

}  // namespace lean::cli
