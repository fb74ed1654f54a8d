// Suites: the rows of the benchmark's matrix by what they are for. A row may be of several.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace lean::cli {

enum class Suite : std::int32_t {
  kPaper,     // the shapes of the paper's figures
  kModels,    // models by name, batches and contexts
  kRagged,    // batches of unequal lengths
  kFlatness,  // equal bytes, 1 to 1024 outputs
  kServing,   // models as servers keep them
  kFeatures,  // query tokens, fp8, pages, layouts and rules of scores, each beside the row without it
  kShort,     // batches of short contexts, and many query heads for few key/value heads
  kWide,      // chunks of prefill
  kCpu,       // sized by this machine's last-level cache
  kEnergy,    // joules in place of times: chosen by --energy, never by --suite
};

/// Those that --suite names, in the order above.
[[nodiscard]] const std::vector<Suite>& all_suites();

[[nodiscard]] const char* name_of(Suite suite);

/// "paper", "ragged,flatness", "all". Throws BadArgument.
[[nodiscard]] std::vector<Suite> parse_suites(const std::string& text);

}  // namespace lean::cli
