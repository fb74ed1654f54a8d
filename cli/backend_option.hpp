// --backend: where calls run. Asking for a GPU that the build or the machine does not have is a bad argument.
#pragma once

#include <optional>
#include <string>

#include "lean/options.hpp"

namespace CLI {
class App;
}

namespace lean::cli {

class BackendOption {
 public:
  /// `by_default` says in words what happens without it.
  void add_to(CLI::App& app, const std::string& by_default);

  /// What was asked for, or else `fallback`. Throws BadArgument.
  [[nodiscard]] Backend backend_or(Backend fallback) const;
  /// The backend that was named, whether it is there or not.
  [[nodiscard]] Backend named_or(Backend fallback) const { return asked_.value_or(fallback); }

 private:
  std::optional<Backend> asked_;
};

[[nodiscard]] const char* name_of(Backend backend);

/// The GPU where the build and the machine have one, else the CPU.
[[nodiscard]] Backend best_backend();

}  // namespace lean::cli
