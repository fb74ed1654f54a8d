// Whether something else ran on the machine while it measured: threads of a team wait for each other, so that a core which is
// busy elsewhere costs whole calls, and shares of the read come out as nonsense.
#pragma once

#include <string>

#include "cli/measure.hpp"

namespace lean::cli {

/// What shows it, in words; empty when nothing does. `ceiling`: a pure read of the same bytes in the same rounds, on the CPU.
[[nodiscard]] std::string noise_in(const Samples& call, const Samples& ceiling);

}  // namespace lean::cli
