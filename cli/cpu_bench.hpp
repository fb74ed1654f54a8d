// lean bench on the CPU: each row is checked against the oracle, then its implementations and a pure read of the same bytes
// take turns.
#pragma once

#include "cli/bench_settings.hpp"

namespace lean::cli {

/// Measures the rows asked for; returns an ExitCode. Throws BadArgument when there are none.
[[nodiscard]] int bench_cpu(const BenchSettings& settings, bool json);

}  // namespace lean::cli
