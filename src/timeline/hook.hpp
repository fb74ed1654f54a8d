// How a recording is handed to calls: host code installs it for the process, backends ask for it. It is no part of the public
// interface, and one call at a time records: its host thread installs, calls, waits, and takes the target away.
#pragma once

#include "timeline/timeline.hpp"

namespace lean::timeline {

#ifdef LEAN_TIMELINE

inline Target& installed() noexcept {
  static Target target;
  return target;
}

[[nodiscard]] inline Target target() noexcept { return installed(); }

/// Calls record to `target` while this lives.
class Installed {
 public:
  explicit Installed(const Target& target) noexcept { installed() = target; }
  ~Installed() { installed() = {}; }
  Installed(const Installed&) = delete;
  Installed& operator=(const Installed&) = delete;
};

#else

[[nodiscard]] constexpr Target target() noexcept { return {}; }

#endif

}  // namespace lean::timeline
