// One call of the library in a workspace that is kept for it: what every embedding does once it knows the problem.
#pragma once

#include <cstdint>

#include "lean/lean.hpp"

namespace lean::runtime {

/// lean::decode() in the calling thread's workspace, or that of the device and stream. A call is looked at once: its size is
/// asked for only where the workspace proves too small, which is found before anything is written. A workspace that a failed call
/// may have left in disorder is reset. `device_index` counts with backend kCuda only; that device is current. Throws as
/// workspace_for() does.
[[nodiscard]] Status decode(const Problem& problem, const Options& options, std::int32_t device_index);

}  // namespace lean::runtime
