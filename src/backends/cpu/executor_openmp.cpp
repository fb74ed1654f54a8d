// default_executor() on OpenMP: threads that spin between calls, so that a call of a few microseconds is worth making.
#include <omp.h>

#include "backends/cpu/executor.hpp"

namespace lean {
namespace {

/// Worker w runs on thread (n - 1 - w) mod threads, highest first: Fixup::kHostBlock ends with any number of threads.
void run_on_openmp(void*, std::int32_t worker_count, void (*body)(void*, std::int32_t), void* argument) {
#pragma omp parallel num_threads(worker_count < omp_get_max_threads() ? worker_count : omp_get_max_threads())
  {
    for (std::int32_t w = worker_count - 1 - omp_get_thread_num(); w >= 0; w -= omp_get_num_threads()) body(argument, w);
  }
}

}  // namespace

const Executor& default_executor() noexcept {
  static const Executor executor{.run = run_on_openmp, .worker_count = omp_get_max_threads(), .descending_or_concurrent = true};
  return executor;
}

}  // namespace lean
