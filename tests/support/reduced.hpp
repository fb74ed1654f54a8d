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

/// A sweep over several loops: all combinations in a normal run, every nth in a reduced one. Take an n that divides no loop's
/// count, the instruction sets' (1 to 5) among them, and is small beside the combinations one value has: then every value is met.
class EveryNth {
 public:
  explicit EveryNth(int n) : n_(full_or_reduced(1, n)) {}
  [[nodiscard]] bool skips() { return turn_++ % n_ != 0; }

 private:
  int n_;
  int turn_ = 0;
};

}  // namespace lean::support
