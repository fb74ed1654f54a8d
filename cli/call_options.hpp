// The options that say how to compute, the same for every command that makes calls: --schedule, --fixup, --determinism,
// --workers, --backend, --isa. Also the way back: what the library refuses is said in the words of the command line.
#pragma once

#include <cstdint>
#include <string>

#include "cli/backend_option.hpp"
#include "lean/options.hpp"
#include "lean/status.hpp"

namespace CLI {
class App;
}

namespace lean::cli {

class CallOptions {
 public:
  /// --schedule, --determinism, --workers: what a schedule depends on.
  void add_schedule_to(CLI::App& app);
  /// All of them.
  void add_to(CLI::App& app);

  /// Throws BadArgument.
  [[nodiscard]] Options options() const;

 private:
  std::string schedule_ = "lean";
  Fixup fixup_ = Fixup::kLastArriver;
  Determinism determinism_ = Determinism::kRunToRun;
  std::int32_t workers_ = 0;
  CpuIsa isa_ = CpuIsa::kBest;
  bool stream_order_ = false;
  BackendOption backend_;
};

/// "lean", "fixed-split", "fixed-split:8", "data-parallel", "fixed-chunk", "fixed-chunk:512". Throws BadArgument.
[[nodiscard]] Policy parse_policy(const std::string& text);

/// The reverse: how a policy is named on the command line and in results.
[[nodiscard]] std::string policy_text(const Policy& policy);

/// Throws BadArgument with the option's name in place of the library's argument, unless ok.
void require_accepted(const Status& status);

}  // namespace lean::cli
