#include "cli/normal_fill.hpp"

#include <array>
#include <cmath>
#include <vector>

#include "base/float_types.hpp"
#include "base/int_math.hpp"
#include "cli/threads.hpp"

namespace lean::cli {
namespace {

constexpr std::int64_t kQuantiles = 65536;
constexpr std::int64_t kPerHash = 4;     // elements drawn from one 64-bit hash, 16 bits each
constexpr std::int64_t kGranule = 4096;  // elements: threads never share a cache line

double normal_cdf(double x) { return 0.5 * std::erfc(-x / std::sqrt(2.0)); }
double normal_density(double x) { return std::exp(-0.5 * x * x) / std::sqrt(2.0 * std::acos(-1.0)); }

/// x with normal_cdf(x) = (i + 1/2) / kQuantiles. From the middle outwards: Newton's method from the last one found.
std::vector<float> make_quantiles() {
  std::vector<float> quantiles(kQuantiles);
  double x = 0.0;
  for (std::int64_t i = kQuantiles / 2; i < kQuantiles; ++i) {
    const double p = (static_cast<double>(i) + 0.5) / kQuantiles;
    for (int step = 0; step < 4; ++step) x -= (normal_cdf(x) - p) / normal_density(x);
    quantiles[static_cast<std::size_t>(i)] = static_cast<float>(x);
    quantiles[static_cast<std::size_t>(kQuantiles - 1 - i)] = static_cast<float>(-x);
  }
  return quantiles;
}

const std::vector<float>& quantiles() {
  static const std::vector<float> table = make_quantiles();
  return table;
}

/// SplitMix64: a bijection of the counter, every output bit depends on every input bit.
std::uint64_t hash(std::uint64_t x) {
  x += 0x9E3779B97F4A7C15U;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9U;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBU;
  return x ^ (x >> 31);
}

template <typename T>
std::vector<T> table_of() {
  std::vector<T> table;
  table.reserve(kQuantiles);
  for (const float q : quantiles()) table.push_back(from_float<T>(q));
  return table;
}

template <typename T>
void fill(T* data, std::int64_t elements, std::uint64_t seed) {
  const std::vector<T> table = table_of<T>();
  const std::uint64_t key = hash(seed);
  const std::int32_t threads = thread_count();
  on_threads(threads, [&](std::int32_t thread) {
    const Range part = part_of(elements, kGranule, thread, threads);
    for (std::int64_t i = part.begin; i < part.end; i += kPerHash) {
      std::uint64_t bits = hash(key ^ static_cast<std::uint64_t>(i / kPerHash));
      for (std::int64_t j = i; j < min_of(i + kPerHash, part.end); ++j, bits >>= 16) data[j] = table[bits & 0xFFFFU];
    }
  });
}

}  // namespace

void normal_fill(void* data, DType dtype, std::int64_t elements, std::uint64_t seed) {
  switch (dtype) {
    case DType::kFloat32: return fill(static_cast<float*>(data), elements, seed);
    case DType::kFloat16: return fill(static_cast<Half*>(data), elements, seed);
    case DType::kBFloat16: return fill(static_cast<BFloat16*>(data), elements, seed);
    case DType::kFloat8E4M3:
    case DType::kFloat8E5M2: return;  // no command offers them
  }
}

}  // namespace lean::cli
