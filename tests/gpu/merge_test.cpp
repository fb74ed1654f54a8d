// merge_states() on a device: against the host's, which conformance_tests hold against the oracle, over rows with and without keys; on
// a stream of its own, captured into a graph, nothing written past the end.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "gpu/device_memory.hpp"
#include "lean/float_types.hpp"
#include "lean/lean.hpp"

namespace lean::gpu {
namespace {

template <typename T>
struct States {
  States(std::int64_t rows, std::int32_t dims, unsigned seed)
      : o(static_cast<std::size_t>(rows * dims)), lse(static_cast<std::size_t>(rows)) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal(0.0F, 2.0F);
    for (T& x : o) x = from_float<T>(normal(random));
    for (std::size_t row = 0; row < lse.size(); ++row) {
      const bool empty = (row + seed) % 5 == 0;
      lse[row] = empty ? (row % 2 == 0 ? INFINITY : -INFINITY) : 8.0F * normal(random);
      if (empty) o[row * o.size() / lse.size()] = from_float<T>(NAN);  // nobody's business
    }
  }

  std::vector<T> o;
  std::vector<float> lse;
};

template <typename T>
struct OnDevice {
  explicit OnDevice(const States<T>& states) : o(states.o.size() * sizeof(T)), lse(states.lse.size() * sizeof(float)) {
    put(states);
  }
  void put(const States<T>& states) const {
    o.copy_from(states.o.data());
    lse.copy_from(states.lse.data());
  }

  DeviceBuffer o;
  DeviceBuffer lse;
};

template <typename T>
void expect_as_on_the_host(std::int64_t rows, std::int32_t dims, DType dtype) {
  States<T> a(rows, dims, 1);
  const States<T> b(rows, dims, 2);
  const OnDevice<T> device_a(a);
  const OnDevice<T> device_b(b);
  const Stream stream;
  Options options;
  options.backend = Backend::kCuda;
  options.stream = stream.get();
  const Graph graph(stream, cudaStreamCaptureModeThreadLocal, [&] {
    demand(merge_states(device_a.o.data(), device_a.lse.template as<float>(), device_b.o.data(), device_b.lse.template as<float>(),
                        rows, dims, dtype, options));
  });
  graph.launch(stream);
  stream.wait();
  std::vector<T> o(a.o.size());
  std::vector<float> lse(a.lse.size());
  device_a.o.copy_to(o.data());
  device_a.lse.copy_to(lse.data());
  ASSERT_TRUE(merge_states(a.o.data(), a.lse.data(), b.o.data(), b.lse.data(), rows, dims, dtype).ok());
  const float tolerance = dtype == DType::kFloat32 ? 1e-5F : dtype == DType::kFloat16 ? 2e-3F : 2e-2F;  // of values up to 8
  for (std::size_t i = 0; i < o.size(); ++i) ASSERT_NEAR(to_float(o[i]), to_float(a.o[i]), tolerance) << i;
  for (std::size_t row = 0; row < lse.size(); ++row) {
    if (std::isinf(a.lse[row])) {
      ASSERT_EQ(lse[row], a.lse[row]) << row;
    } else {
      ASSERT_NEAR(lse[row], a.lse[row], 1e-5F * (1.0F + std::abs(a.lse[row]))) << row;
    }
  }
}

TEST(GpuMerge, R49_TwoResultsBecomeOneAsOnTheHost) {
  for (const std::int64_t rows : {1, 7, 8, 9, 1000, 70000}) {
    for (const std::int32_t dims : {1, 31, 64, 128, 513}) {
      if (rows * dims > 10'000'000) continue;
      SCOPED_TRACE(testing::Message() << rows << " x " << dims);
      expect_as_on_the_host<float>(rows, dims, DType::kFloat32);
      expect_as_on_the_host<Half>(rows, dims, DType::kFloat16);
      expect_as_on_the_host<BFloat16>(rows, dims, DType::kBFloat16);
    }
  }
}

}  // namespace
}  // namespace lean::gpu
