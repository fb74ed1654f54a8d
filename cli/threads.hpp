// on_threads(): runs a function on the very threads that the library computes with, so that data is first touched, read
// ceilings are taken and peaks are measured where the calls run.
#pragma once

#include <cstdint>
#include <type_traits>

#include "base/int_math.hpp"
#include "lean/lean.hpp"

namespace lean::cli {

[[nodiscard]] inline std::int32_t thread_count() { return default_executor().worker_count; }

/// body(thread) for every thread in [0, threads). `body` must not throw.
template <typename TBody>
void on_threads(std::int32_t threads, TBody&& body) {
  using Body = std::remove_reference_t<TBody>;
  const Executor& executor = default_executor();
  executor.run(
      executor.context, threads, [](void* argument, std::int32_t thread) { (*static_cast<Body*>(argument))(thread); }, &body);
}

struct Range {
  std::int64_t begin = 0;
  std::int64_t end = 0;
};

/// Thread `thread`'s part of [0, total), cut at multiples of `granule`.
[[nodiscard]] inline Range part_of(std::int64_t total, std::int64_t granule, std::int32_t thread, std::int32_t threads) {
  const std::int64_t granules = ceil_div(total, granule);
  return {min_of(total, share_begin(granules, thread, threads) * granule),
          min_of(total, share_begin(granules, thread + 1, threads) * granule)};
}

}  // namespace lean::cli
