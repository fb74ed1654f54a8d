// The rows that `lean bench` was asked for, on either backend, and the list of them: what other programs measure the same
// rows from.
#pragma once

#include <vector>

#include "cli/bench_settings.hpp"

namespace lean::cli {

/// Those of the selection whose ids have the pattern. Throws BadArgument when there are none.
[[nodiscard]] std::vector<BenchRow> chosen_rows(const BenchSettings& settings);

/// Prints them, as JSON a line each, and measures nothing. Returns an ExitCode.
[[nodiscard]] int list_rows(const BenchSettings& settings, bool json);

}  // namespace lean::cli
