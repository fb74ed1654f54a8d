// lean bench on a GPU: each row's implementations are checked against the fp64 oracle, take turns with a pure read of the same
// bytes, and what was timed is checked again.
#pragma once

#include <regex>

#include "cli/bench_settings.hpp"

namespace lean::cli {

/// Measures the rows of the tier whose ids have `pattern`; returns an ExitCode. Throws BadArgument when there are none.
[[nodiscard]] int bench_gpu(const BenchSettings& settings, const std::regex& pattern, bool json);

/// Prints them and measures nothing.
[[nodiscard]] int list_gpu_rows(const BenchSettings& settings, const std::regex& pattern, bool json);

}  // namespace lean::cli
