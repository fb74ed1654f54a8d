// Finds an OpenMP runtime among the process's libraries by GOMP_parallel, the entry that GCC's, LLVM's and Intel's have.
#include "integrations/runtime/executor.hpp"

#include <dlfcn.h>
#include <link.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <new>
#include <string_view>
#include <thread>
#include <vector>

namespace lean::runtime {
namespace {

/// What libgomp exports since GCC 4.9, and LLVM's and Intel's runtimes for code that GCC compiled.
struct OpenMp {
  void (*parallel)(void (*body)(void*), void* data, unsigned threads, unsigned flags) = nullptr;
  int (*thread_num)() = nullptr;
  int (*num_threads)() = nullptr;
  int (*max_threads)() = nullptr;

  [[nodiscard]] bool complete() const noexcept {
    return parallel != nullptr && thread_num != nullptr && num_threads != nullptr && max_threads != nullptr;
  }
};

/// Never freed and never changed once it is here: a call in flight on another thread may still use the one before.
std::atomic<const OpenMp*> g_openmp = nullptr;
std::atomic<bool> g_searched = false;
std::atomic<bool> g_threads_started = false;
std::atomic<bool> g_forked = false;

OpenMp symbols_of(void* library) noexcept {
  const auto find = [library]<typename F>(F*& function, const char* name) {
    function = reinterpret_cast<F*>(dlsym(library, name));
  };
  OpenMp openmp;
  find(openmp.parallel, "GOMP_parallel");
  find(openmp.thread_num, "omp_get_thread_num");
  find(openmp.num_threads, "omp_get_num_threads");
  find(openmp.max_threads, "omp_get_max_threads");
  return openmp;
}

/// The first library of this process that is an OpenMP runtime by its name; wheels rename theirs (libgomp-24e2ab19.so.1).
int take_if_openmp(dl_phdr_info* info, std::size_t, void* found) {
  const std::string_view path = info->dlpi_name != nullptr ? info->dlpi_name : "";
  const std::string_view file = path.substr(path.find_last_of('/') + 1);
  if (!file.starts_with("libgomp") && !file.starts_with("libiomp5") && !file.starts_with("libomp")) return 0;
  *static_cast<const char**>(found) = info->dlpi_name;
  return 1;
}

/// The runtime this process has already, if any.
OpenMp loaded_openmp() noexcept {
  if (const OpenMp global = symbols_of(RTLD_DEFAULT); global.complete()) return global;
  const char* path = nullptr;
  dl_iterate_phdr(take_if_openmp, static_cast<void*>(&path));
  void* const library = path != nullptr ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : nullptr;
  return library != nullptr ? symbols_of(library) : OpenMp{};
}

OpenMp system_openmp() noexcept {
  void* const library = dlopen("libgomp.so.1", RTLD_NOW | RTLD_LOCAL);
  return library != nullptr ? symbols_of(library) : OpenMp{};
}

struct Region {
  const OpenMp* openmp;
  std::int32_t worker_count;
  void (*body)(void*, std::int32_t);
  void* argument;
};

/// Highest worker first on every thread, as Fixup::kHostBlock needs.
void run_region(void* data) {
  const Region& region = *static_cast<const Region*>(data);
  const int threads = region.openmp->num_threads();
  for (std::int32_t w = region.worker_count - 1 - region.openmp->thread_num(); w >= 0; w -= threads)
    region.body(region.argument, w);
}

void run_serially(void*, std::int32_t worker_count, void (*body)(void*, std::int32_t), void* argument) {
  for (std::int32_t worker = worker_count; worker-- > 0;) body(argument, worker);
}

/// How many of `wanted` further threads this process can start, found out by starting them. They have ended again.
int threads_to_be_had(int wanted) noexcept {
  std::atomic<bool> released = false;
  std::vector<std::thread> threads;
  try {
    threads.reserve(static_cast<std::size_t>(wanted));
    while (static_cast<int>(threads.size()) < wanted) threads.emplace_back([&released] { released.wait(false); });
  } catch (const std::exception&) {  // no memory, or no thread: so many there are
  }
  released = true;
  released.notify_all();
  for (std::thread& thread : threads) thread.join();
  return static_cast<int>(threads.size());
}

/// The OpenMP threads of one host thread. libgomp makes a new team for every region of another size: all of a host thread's are as
/// large as its largest. And it ends the process where it cannot start a thread: so threads are tried first.
class Team {
 public:
  [[nodiscard]] int size_for(int worker_count, int max_threads) noexcept {
    const int most = std::min(max_threads, most_);
    const int needed = std::min(worker_count, most);
    if (needed > size_) grow(needed);
    return std::min(size_, most);
  }

 private:
  void grow(int needed) noexcept {
    size_ += threads_to_be_had(needed - size_);
    if (size_ < needed) most_ = size_;
  }

  int size_ = 1;
  int most_ = INT32_MAX;
};

void run_on_openmp(void* context, std::int32_t worker_count, void (*body)(void*, std::int32_t), void* argument) {
  const auto* const openmp = static_cast<const OpenMp*>(context);
  Region region{openmp, worker_count, body, argument};
  thread_local Team team;
  const int threads = worker_count > 1 ? team.size_for(worker_count, openmp->max_threads()) : 1;
  if (threads == 1) return run_serially(nullptr, worker_count, body, argument);
  openmp->parallel(run_region, &region, static_cast<unsigned>(threads), 0);
}

}  // namespace

void find_openmp() noexcept {
  OpenMp found = loaded_openmp();
  if (!found.complete()) found = system_openmp();
  const OpenMp* const known = g_openmp;
  if (found.complete() && (known == nullptr || known->parallel != found.parallel)) g_openmp = new (std::nothrow) OpenMp(found);
  g_searched = true;
}

Executor executor_for(std::int32_t workers) noexcept {
  if (workers == 1 || g_forked) return {.run = run_serially, .worker_count = 1, .descending_or_concurrent = true};
  if (!g_searched) find_openmp();
  g_threads_started = true;
  const OpenMp* const openmp = g_openmp;
  if (openmp == nullptr) return default_executor();
  return {.context = const_cast<OpenMp*>(openmp),
          .run = run_on_openmp,
          .worker_count = openmp->max_threads(),
          .descending_or_concurrent = true};
}

void after_fork_in_child() noexcept {
  if (g_threads_started || loaded_openmp().complete()) g_forked = true;
}

const char* threads_name() noexcept {
  if (g_forked) return "one, after a fork";
  if (!g_searched) find_openmp();
  return g_openmp != nullptr ? "OpenMP" : "std::thread";
}

}  // namespace lean::runtime
