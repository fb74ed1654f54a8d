// Sizes for sanitizer builds: LEAN_TEST_REDUCED=1 in the environment asks every test for its small form.
#pragma once

#include <cstdlib>

namespace lean::support {

[[nodiscard]] inline bool reduced() {
  static const bool kReduced = [] {
    const char* value = std::getenv("LEAN_TEST_REDUCED");
    return value != nullptr && value[0] != '\0' && value[0] != '0';
  }();
  return kReduced;
}

/// `full` in a normal run, `small` in a reduced one.
template <typename T>
[[nodiscard]] T full_or_reduced(T full, T small) {
  return reduced() ? small : full;
}

}  // namespace lean::support
