// BadArgument: the user asked for what cannot be. main() prints it and exits with 2.
#pragma once

#include <stdexcept>
#include <string>

namespace lean::cli {

class BadArgument : public std::runtime_error {
 public:
  explicit BadArgument(const std::string& message) : std::runtime_error(message) {}

  /// "--lens = 12a: a number of tokens".
  BadArgument(const std::string& option, const std::string& value, const std::string& allowed)
      : std::runtime_error(option + " = " + (value.empty() ? "\"\"" : value) + ": " + allowed) {}
};

}  // namespace lean::cli
