// The executor a call runs on: the caller's, or the library's own (OpenMP, or a pool of std::thread where the library was built
// without it, as for ThreadSanitizer, which does not understand libgomp).
#pragma once

#include "lean/lean.hpp"

namespace lean::cpu {

[[nodiscard]] inline const Executor& executor_of(const Options& options) noexcept {
  return options.executor != nullptr ? *options.executor : default_executor();
}

/// All workers on the calling thread, highest first, as Fixup::kHostBlock needs.
inline void run_alone(std::int32_t worker_count, void (*body)(void*, std::int32_t), void* argument) {
  for (std::int32_t worker = worker_count; worker-- > 0;) body(argument, worker);
}

/// To be called before threads are started: a child of fork() has none of them, and would wait for them for ever.
void note_threads() noexcept;
/// Whether this process is such a child.
[[nodiscard]] bool lost_its_threads() noexcept;

/// How many of `wanted` further threads this process can start, found out by starting them. They have ended again.
[[nodiscard]] std::int32_t threads_to_be_had(std::int32_t wanted) noexcept;

}  // namespace lean::cpu
