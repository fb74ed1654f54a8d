// The energy half of `lean bench`: joules of a call under each schedule, for the rows of Suite::kEnergy.
#pragma once

#include "cli/bench_settings.hpp"
#include "lean/options.hpp"

namespace lean::cli {

[[nodiscard]] int bench_energy(Backend backend, const BenchSettings& settings, bool json);

}  // namespace lean::cli
