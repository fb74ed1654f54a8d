// Builds Status values: "argument = seen: allowed what". snprintf into the Status's own bytes, nothing allocated.
#pragma once

#include <cinttypes>
#include <cstdio>

#include "lean/status.hpp"

namespace lean {

/// "argument = seen: allowed what".
[[nodiscard]] inline Status refuse(StatusCode code, const char* argument, std::int64_t seen, const char* allowed) noexcept {
  Status status{.code = code};
  std::snprintf(status.message, sizeof(status.message), "%s = %" PRId64 ": %s", argument, seen, allowed);
  return status;
}

/// A refusal of a number with a fraction: enough digits to tell any two floats apart.
[[nodiscard]] inline Status refuse_real(StatusCode code, const char* argument, double seen, const char* allowed) noexcept {
  Status status{.code = code};
  std::snprintf(status.message, sizeof(status.message), "%s = %.9g: %s", argument, seen, allowed);
  return status;
}

/// "argument[index] = seen: allowed what".
[[nodiscard]] inline Status refuse_element(StatusCode code, const char* argument, std::int64_t index, std::int64_t seen,
                                           const char* allowed) noexcept {
  Status status{.code = code};
  std::snprintf(status.message, sizeof(status.message), "%s[%" PRId64 "] = %" PRId64 ": %s", argument, index, seen, allowed);
  return status;
}

}  // namespace lean
