// Which threads a call on the CPU runs on. Two OpenMP runtimes in one process keep two sets of spinning threads on the same
// cores, so the one that is already loaded (PyTorch brings its own) is used, and none is linked (docs/adr/0007-python-binding.md).
#pragma once

#include "lean/lean.hpp"

namespace lean::runtime {

/// The executor for a call with these many workers asked for (0: all).
[[nodiscard]] Executor executor_for(std::int32_t workers) noexcept;

/// Looks again for an OpenMP runtime in this process: after another library was imported.
void find_openmp() noexcept;

/// In the child of a fork threads are gone, and an OpenMP runtime may wait for its own for ever: calls run on one thread
/// from here on, unless the parent had neither.
void after_fork_in_child() noexcept;

/// "OpenMP", "std::thread" or "one, after a fork".
[[nodiscard]] const char* threads_name() noexcept;

}  // namespace lean::runtime
