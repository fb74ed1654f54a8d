#include "cli/suites/suite.hpp"

#include <algorithm>

#include "cli/bad_argument.hpp"
#include "cli/validators.hpp"

namespace lean::cli {

const std::vector<Suite>& all_suites() {
  static const std::vector<Suite> suites{Suite::kPaper,    Suite::kModels, Suite::kRagged, Suite::kFlatness, Suite::kServing,
                                         Suite::kFeatures, Suite::kShort,  Suite::kWide,   Suite::kCpu};
  return suites;
}

const char* name_of(Suite suite) {
  switch (suite) {
    case Suite::kPaper: return "paper";
    case Suite::kModels: return "models";
    case Suite::kRagged: return "ragged";
    case Suite::kFlatness: return "flatness";
    case Suite::kServing: return "serving";
    case Suite::kFeatures: return "features";
    case Suite::kShort: return "short";
    case Suite::kWide: return "wide";
    case Suite::kCpu: return "cpu";
    case Suite::kEnergy: return "energy";
  }
  return "unknown";
}

std::vector<Suite> parse_suites(const std::string& text) {
  if (text == "all") return all_suites();
  std::vector<Suite> suites;
  for (const std::string& name : items_of(text)) {
    const auto found = std::find_if(all_suites().begin(), all_suites().end(), [&](Suite suite) { return name == name_of(suite); });
    if (found == all_suites().end()) {
      std::string names;
      for (const Suite suite : all_suites()) names += std::string(name_of(suite)) + ", ";
      throw BadArgument("--suite", name, "some of " + names + "with commas between them, or all");
    }
    if (std::find(suites.begin(), suites.end(), *found) == suites.end()) suites.push_back(*found);
  }
  return suites;
}

}  // namespace lean::cli
