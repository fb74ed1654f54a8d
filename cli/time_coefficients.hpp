// The coefficients of the time model. Written by tools/fit_time_model.py from bench/results; a test fails when they are not what it
// finds.
#pragma once

#include "cli/time_model.hpp"

namespace lean::cli {

inline constexpr TimeModel kTimeModel{
    .step = {.call_us = 5.0, .tile_us = 0.2, .worker_gbps = 90.0, .segment_us = 0.3, .merge_us = 1.0, .contributor_us = 0.02},
    .any_call = {.call_us = 7.0, .tile_us = 0.5, .worker_gbps = 90.0, .segment_us = 2.0, .merge_us = 2.0, .contributor_us = 0.7},
    .memory_share = 0.95,
};

}  // namespace lean::cli
