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
    EXPECT_NE(std::string(sticky.message).find(entry), std::string::npos) << sticky.message;
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

void expect_the_first_fault_to_stay(const Case& c) {
  const Stream stream;
  DeviceRun call(c);
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

/// The plain kernel's call, a decode step's, and any call's.
TEST(Lengths, R25_TheStickyCodeStaysUntilReset) {
  expect_the_first_fault_to_stay({.head_dim = 59, .lens = {37, 53}});
  expect_the_first_fault_to_stay({.lens = {37, 53}});
  expect_the_first_fault_to_stay({.lens = {37, 53}, .n_q = {3}});
}

/// Where nothing is left to do, no CTA has a segment: its producers are done before they began, and name the entry all the same.
TEST(Lengths, R25_AnEntryIsNamedWhereNoSequenceHasKeys) {
  const Stream stream;
  for (int round = 0; round < 200; ++round) {
    DeviceRun call({.lens = {0, 0}, .n_q = {1 + round % 3}, .capacity = 16});
    Options options = call.options();
    options.stream = stream.get();
    put(call, Array::kLengths, round % 2, -1 - round);
    call.enqueue(stream.get());
    stream.wait();
    const std::string entry = "kv_lengths[" + std::to_string(round % 2) + "] = " + std::to_string(-1 - round) + ": ";
    EXPECT_EQ(std::string(sticky_status(call.workspace(), options).message).find(entry), 0U) << entry;
  }
}

}  // namespace
}  // namespace lean::gpu
