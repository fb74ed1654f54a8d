#include "cli/ceilings.hpp"

#include <algorithm>
#include <atomic>
#include <limits>
#include <vector>

#include "backends/cpu/tile_kernels.hpp"
#include "cli/measure.hpp"
#include "cli/threads.hpp"

namespace lean::cli {
namespace {

constexpr std::int64_t kCacheLineBytes = 64;
constexpr int kTries = 3;  // of a read kernel
constexpr int kPeakTries = 7;
constexpr std::int64_t kPeakSteps = 1 << 21;  // a few milliseconds: long enough to drown the start of the threads

/// Where results go, so that no loop can be left out.
std::atomic<std::uint64_t> g_sink{0};

}  // namespace

ReadCeiling::ReadCeiling(const DecodeProblem& problem, std::int32_t threads)
    : k_(static_cast<const std::byte*>(problem.problem().k.data)),
      v_(static_cast<const std::byte*>(problem.problem().v.data)),
      bytes_(problem.spec().kv_bytes() / (k_ == v_ ? 1 : 2) / 8 * 8),
      threads_(std::min(threads, thread_count())),
      kernel_(&read_kernels()[0]) {
  double best_us = std::numeric_limits<double>::max();
  for (const ReadKernel& kernel : read_kernels()) {
    for (int i = 0; i < kTries; ++i) {
      const double us = time_us([&] { read(kernel); });
      if (us < best_us) kernel_ = &kernel;
      best_us = std::min(best_us, us);
    }
  }
}

void ReadCeiling::run() const { read(*kernel_); }

void ReadCeiling::read(const ReadKernel& kernel) const {
  on_threads(threads_, [&](std::int32_t thread) {
    const Range part = part_of(bytes_, kCacheLineBytes, thread, threads_);
    std::uint64_t folded = kernel.read(k_ + part.begin, part.end - part.begin);
    if (v_ != k_) folded ^= kernel.read(v_ + part.begin, part.end - part.begin);
    g_sink.fetch_xor(folded, std::memory_order_relaxed);
  });
}

Arithmetic arithmetic_of(const Options& options, const Problem& problem) {
  if (!cpu::rounds_probabilities(options, problem)) return Arithmetic::kFloat32;
  return cpu::isa_of(options, problem) == CpuIsa::kAmxBf16 ? Arithmetic::kBFloat16Tile : Arithmetic::kBFloat16Dot;
}

namespace {

ProductKernel product_kernel(Arithmetic arithmetic) {
  switch (arithmetic) {
    case Arithmetic::kBFloat16Dot: return bf16_product_kernel();
    case Arithmetic::kBFloat16Tile: return bf16_tile_product_kernel();
    case Arithmetic::kFloat32: break;
  }
  return fp32_product_kernel();
}

}  // namespace

double ComputePeak::products_per_us(Arithmetic arithmetic, std::int32_t threads) {
  const auto [place, is_missing] = known_.try_emplace({arithmetic, threads}, 0.0);
  if (!is_missing) return place->second;
  const ProductKernel kernel = product_kernel(arithmetic);
  const std::int32_t used = std::min(threads, thread_count());
  std::vector<std::int64_t> products(static_cast<std::size_t>(used));
  const auto run = [&] {
    on_threads(used, [&](std::int32_t thread) {
      float sink = 0.5F;
      products[static_cast<std::size_t>(thread)] = kernel.run(kPeakSteps, &sink);
      g_sink.fetch_xor(static_cast<std::uint64_t>(sink), std::memory_order_relaxed);
    });
  };
  double us = std::numeric_limits<double>::max();
  for (int i = 0; i < kPeakTries; ++i) us = std::min(us, time_us(run));
  std::int64_t total = 0;
  for (const std::int64_t count : products) total += count;
  return place->second = static_cast<double>(total) / us;
}

}  // namespace lean::cli
