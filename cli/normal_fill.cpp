#include "cli/normal_fill.hpp"

#include <cmath>
#include <utility>
#include <vector>

#include "base/int_math.hpp"
#include "base/with_type.hpp"
#include "cli/gpu.hpp"
#include "cli/normal_hash.hpp"
#include "cli/threads.hpp"

namespace lean::cli {
namespace {

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

template <typename T>
void write_table(const Buffer& table) {
  for (std::int64_t i = 0; i < kQuantiles; ++i) {
    reinterpret_cast<T*>(table.data())[i] = from_float<T>(quantiles()[static_cast<std::size_t>(i)]);
  }
}

Buffer make_table(DType dtype) {
  Buffer table(kQuantiles * bytes_of(dtype));
  with_type(dtype, [&]<typename T>(T) { write_table<T>(table); });
  return table;
}

template <typename T>
void fill_on_host(T* data, const T* table, std::int64_t elements, std::uint64_t key) {
  const std::int32_t threads = thread_count();
  on_threads(threads, [&](std::int32_t thread) {
    const Range part = part_of(elements, kGranule, thread, threads);
    for (std::int64_t i = part.begin; i < part.end; i += kPerHash) {
      std::uint64_t bits = quantile_bits(key, i / kPerHash);
      for (std::int64_t j = i; j < min_of(i + kPerHash, part.end); ++j, bits >>= 16) data[j] = table[bits & 0xFFFFU];
    }
  });
}

template <typename T>
void fill_on_host(void* data, const Buffer& table, std::int64_t elements, std::uint64_t key) {
  fill_on_host(static_cast<T*>(data), reinterpret_cast<const T*>(table.data()), elements, key);
}

}  // namespace

NormalNumbers::NormalNumbers(DType dtype, Place place) : dtype_(dtype), table_(make_table(dtype)) {
  if (place == Place::kHost) return;
  Buffer on_device(table_.bytes(), place);
  copy_bytes(on_device, table_);
  table_ = std::move(on_device);
}

void NormalNumbers::fill(void* data, std::int64_t elements, std::uint64_t seed) const {
  const std::uint64_t key = normal_hash(seed);
  if (table_.place() == Place::kDevice) {
    gpu::fill_from_table(data, table_.data(), bytes_of(dtype_), elements, key);
  } else if (bytes_of(dtype_) == 4) {
    fill_on_host<std::uint32_t>(data, table_, elements, key);
  } else if (bytes_of(dtype_) == 1) {
    fill_on_host<std::uint8_t>(data, table_, elements, key);
  } else {
    fill_on_host<std::uint16_t>(data, table_, elements, key);
  }
}

}  // namespace lean::cli
