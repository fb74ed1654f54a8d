// Wrong lengths in device memory: clamped, reported by a sticky code, and nothing outside the tensors touched. The arrays end
// where their allocation ends.
#include <gtest/gtest.h>

#include <climits>
#include <string>

#include "gpu/device_run.hpp"
#include "support/tables.hpp"

namespace lean::gpu {
namespace {

enum class Array { kLengths, kLeftPad, kQueries, kKeys };

const std::int32_t* of(const Problem& p, Array array) {
  switch (array) {
    case Array::kLengths: return p.kv_lengths;
    case Array::kLeftPad: return p.kv_left_pad;
    case Array::kQueries: return p.cu_q_tokens;
    case Array::kKeys: return p.cu_kv_tokens;
  }
  return nullptr;
}

/// Puts one wrong value on the host, for the oracle, and on the device.
void put(DeviceRun& call, Array array, int index, std::int32_t value) {
  const_cast<std::int32_t*>(of(call.built().problem(), array))[index] = value;
  call.built().remember();
  auto* const place = const_cast<std::int32_t*>(of(call.problem(), array)) + index;
  demand(cudaMemcpy(place, &value, sizeof(value), cudaMemcpyHostToDevice), "cudaMemcpy");
  demand(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
}

void expect_clamped(Case c, Array array, int index, std::int32_t value) {
  SCOPED_TRACE(testing::Message() << "array " << static_cast<int>(array) << "[" << index << "] = " << value);
  const Stream stream;
  c.fill = Fill::kZero;  // clamped lengths reach what no length should
  for (const Policy& policy : {Policy::lean(), Policy::fixed_split(3), Policy::data_parallel()}) {
    c.policy = policy;
    DeviceRun call(c);
    Options options = call.options();
    options.stream = stream.get();
    put(call, array, index, value);
    EXPECT_FALSE(call.bits(stream.get()).empty());
    EXPECT_TRUE(call.matches());
    const Status sticky = sticky_status(call.workspace(), options);
    EXPECT_EQ(sticky.code, StatusCode::kBadLengths);
    const std::string entry = "[" + std::to_string(index) + "] = " + std::to_string(value) + ": ";
    const bool names_entry = std::string(sticky.message).find(entry) != std::string::npos;
    EXPECT_EQ(names_entry, c.head_dim % 8 != 0) << "the plain kernel's calls alone: " << sticky.message;
    ASSERT_TRUE(reset_workspace(call.workspace(), options).ok());
    EXPECT_TRUE(sticky_status(call.workspace(), options).ok());
    EXPECT_TRUE(call.clean());
  }
}

constexpr std::int32_t kWrong[] = {-1, INT_MIN, INT_MAX, 1000000};

TEST(Sanitized, R25_LengthsOutsideTheCapacityAreClampedAndReported) {
  for (const int index : {0, 2}) {
    for (const std::int32_t value : kWrong) {
      expect_clamped({.lens = {37, 101, 53}}, Array::kLengths, index, value);
      expect_clamped({.head_dim = 59, .lens = {37, 101, 53}}, Array::kLengths, index, value);
    }
  }
}

TEST(Sanitized, R25_LeftPaddingOutsideTheLengthIsClampedAndReported) {
  for (const std::int32_t value : kWrong) expect_clamped({.lens = {37, 101, 53}, .pad = {3, 0, 53}}, Array::kLeftPad, 0, value);
}

TEST(Sanitized, R24_CumulativeKeyLengthsAreClampedAndReported) {
  const Case c{.lens = {37, 101, 53}, .k_layout = "shd"};
  for (const int index : {1, 2, 3}) {
    for (const std::int32_t value : kWrong) expect_clamped(c, Array::kKeys, index, value);
  }
}

TEST(Sanitized, R24_CumulativeQueryLengthsAreClampedAndReported) {
  const Case c{.lens = {37, 101, 53}, .n_q = {3, 2, 4}, .q_layout = "shd"};
  for (const auto& [index, value] : {std::pair{0, -1}, {0, INT_MIN}, {1, -7}, {3, 10}, {3, INT_MAX}, {3, -3}}) {
    expect_clamped(c, Array::kQueries, index, value);
  }
}

TEST(Lengths, R25_TheStickyCodeStaysUntilReset) {
  const Stream stream;
  DeviceRun call({.head_dim = 59, .lens = {37, 53}});  // the plain kernel says which entry it was
  Options options = call.options();
  options.stream = stream.get();
  const auto good = call.bits(stream.get());
  put(call, Array::kLengths, 1, 99);
  call.enqueue(stream.get());
  stream.wait();
  put(call, Array::kLengths, 1, 53);
  EXPECT_EQ(call.bits(stream.get()), good);
  EXPECT_STREQ(sticky_status(call.workspace(), options).message,
               "kv_lengths[1] = 99: allowed 0 to 53 (the tokens there is room for); it was clamped");
  EXPECT_TRUE(reset_workspace(call.workspace(), options).ok());
  EXPECT_EQ(call.bits(stream.get()), good);
  EXPECT_TRUE(sticky_status(call.workspace(), options).ok());
  EXPECT_TRUE(call.clean());
}

}  // namespace
}  // namespace lean::gpu
