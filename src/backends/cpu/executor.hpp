// The executor a call runs on: the caller's, or the library's own (OpenMP, or a pool of std::thread where the library was built
// without it, as for ThreadSanitizer, which does not understand libgomp).
#pragma once

#include "lean/lean.hpp"

namespace lean::cpu {

[[nodiscard]] inline const Executor& executor_of(const Options& options) noexcept {
  return options.executor != nullptr ? *options.executor : default_executor();
}

}  // namespace lean::cpu
