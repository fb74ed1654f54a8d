// lean bench on the CPU: each row is checked against the oracle, then its implementations and a pure read of the same bytes
// take turns.
#pragma once

#include <cstdint>
#include <regex>

#include "cli/bench_settings.hpp"

namespace lean::cli {

/// Measures the rows whose ids have `pattern`; returns an ExitCode. Throws BadArgument when there are none.
[[nodiscard]] int bench_cpu(const BenchSettings& settings, const std::regex& pattern, bool json);

/// Prints them and measures nothing.
[[nodiscard]] int list_cpu_rows(const BenchSettings& settings, const std::regex& pattern, bool json);

}  // namespace lean::cli
