// lean bench on a GPU: each row's implementations are checked against the fp64 oracle, take turns with a pure read of the same
// bytes, and what was timed is checked again.
#pragma once

#include "cli/bench_settings.hpp"

namespace lean::cli {

/// Measures the rows asked for; returns an ExitCode. Throws BadArgument when there are none.
[[nodiscard]] int bench_gpu(const BenchSettings& settings, bool json);

}  // namespace lean::cli
