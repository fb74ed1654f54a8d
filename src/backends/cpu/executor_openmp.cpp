// default_executor() on OpenMP: threads that spin between calls, so that a call of a few microseconds is worth making.
#include <omp.h>

#include "backends/cpu/executor.hpp"
#include "base/int_math.hpp"

namespace lean {
namespace {

/// The OpenMP threads of one host thread. libgomp makes a new team, with memory and threads of its own, for every region of
/// another size: so all regions of a host thread have the size of the largest that it needed, and threads without a worker idle.
/// And it ends the process where it cannot start a thread: so threads are tried first.
class Team {
 public:
  [[nodiscard]] std::int32_t size_for(std::int32_t worker_count) noexcept {
    const std::int32_t most = min_of(omp_get_max_threads(), most_);
    const std::int32_t needed = min_of(worker_count, most);
    if (needed > size_) grow(needed);
    return min_of(size_, most);
  }

 private:
  void grow(std::int32_t needed) noexcept {
    size_ += cpu::threads_to_be_had(needed - size_);
    if (size_ < needed) most_ = size_;
  }

  std::int32_t size_ = 1;
  std::int32_t most_ = INT32_MAX;
};

thread_local Team team;

/// Worker w runs on thread (n - 1 - w) mod threads, highest first: Fixup::kHostBlock ends with any number of threads.
void run_on_openmp(void*, std::int32_t worker_count, void (*body)(void*, std::int32_t), void* argument) {
  const bool nested = omp_get_active_level() >= omp_get_max_active_levels();
  if (worker_count == 1 || nested || cpu::lost_its_threads()) return cpu::run_alone(worker_count, body, argument);
  cpu::note_threads();
  const std::int32_t threads = team.size_for(worker_count);
  if (threads == 1) return cpu::run_alone(worker_count, body, argument);
#pragma omp parallel num_threads(threads)
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
