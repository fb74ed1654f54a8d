#include "support/executors.hpp"

#include <chrono>
#include <utility>

namespace lean::support {
namespace {

bool has_threads(ExecutorKind kind) {
  return kind == ExecutorKind::kPool || kind == ExecutorKind::kPermuted || kind == ExecutorKind::kDelayed;
}

}  // namespace

TestExecutor::TestExecutor(ExecutorKind kind, std::int32_t threads, std::uint64_t seed) : kind_(kind), random_(seed) {
  executor_ = {.context = this, .run = &TestExecutor::run, .worker_count = threads};
  executor_.descending_or_concurrent =
      kind == ExecutorKind::kPool || kind == ExecutorKind::kDelayed || kind == ExecutorKind::kDescending;
  if (!has_threads(kind)) return;
  for (std::int32_t thread = 0; thread < threads; ++thread) threads_.emplace_back([this, thread] { serve(thread); });
}

TestExecutor::~TestExecutor() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void TestExecutor::run(void* context, std::int32_t worker_count, void (*body)(void* argument, std::int32_t worker),
                       void* argument) {
  static_cast<TestExecutor*>(context)->run_call({worker_count, body, argument});
}

void TestExecutor::run_call(const Call& call) {
  if (kind_ == ExecutorKind::kAscending) {
    for (std::int32_t w = 0; w < call.worker_count; ++w) call.body(call.argument, w);
    return;
  }
  if (kind_ == ExecutorKind::kDescending) {
    for (std::int32_t w = call.worker_count; w-- > 0;) call.body(call.argument, w);
    return;
  }
  std::unique_lock lock(mutex_);
  call_ = call;
  call_key_ = random_.bits();
  if (kind_ == ExecutorKind::kPermuted) shuffle(call.worker_count);
  next_ = 0;
  busy_ = static_cast<std::int32_t>(threads_.size());
  ++calls_;
  wake_.notify_all();
  done_.wait(lock, [this] { return busy_ == 0; });
}

void TestExecutor::serve(std::int32_t thread) {
  std::unique_lock lock(mutex_);
  for (std::uint64_t served = 0;; ++served) {
    wake_.wait(lock, [&] { return stop_ || calls_ > served; });
    if (stop_) return;
    const Call call = call_;
    lock.unlock();
    run_share(call, thread);
    lock.lock();
    if (--busy_ == 0) done_.notify_all();
  }
}

void TestExecutor::run_share(const Call& call, std::int32_t thread) {
  if (kind_ == ExecutorKind::kPermuted) {
    for (std::int32_t place = next_++; place < call.worker_count; place = next_++) {
      call.body(call.argument, order_[static_cast<std::size_t>(place)]);
    }
    return;
  }
  const auto step = static_cast<std::int32_t>(threads_.size());
  for (std::int32_t w = call.worker_count - 1 - thread; w >= 0; w -= step) {
    if (kind_ == ExecutorKind::kDelayed) delay(w);
    call.body(call.argument, w);
  }
}

void TestExecutor::shuffle(std::int32_t worker_count) {
  order_.resize(static_cast<std::size_t>(worker_count));
  for (std::int32_t w = 0; w < worker_count; ++w) order_[static_cast<std::size_t>(w)] = w;
  for (std::int32_t w = worker_count - 1; w > 0; --w) {
    std::swap(order_[static_cast<std::size_t>(w)], order_[static_cast<std::size_t>(random_.between(0, w))]);
  }
}

/// Up to 50 us, half of the time nothing at all.
void TestExecutor::delay(std::int32_t worker) const {
  const auto microseconds = pick(call_key_ ^ static_cast<std::uint64_t>(worker), 100) - 50;
  if (microseconds > 0) std::this_thread::sleep_for(std::chrono::microseconds(microseconds));
}

}  // namespace lean::support
