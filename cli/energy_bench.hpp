// The energy half of `lean bench`: joules of a call under each schedule, for four named rows.
#pragma once

#include <regex>

#include "cli/bench_settings.hpp"
#include "lean/options.hpp"

namespace lean::cli {

[[nodiscard]] int bench_energy(Backend backend, const BenchSettings& settings, const std::regex& pattern, bool json);
[[nodiscard]] int list_energy_rows(const std::regex& pattern, bool json);

}  // namespace lean::cli
