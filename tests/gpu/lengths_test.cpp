// Wrong lengths in device memory: clamped, reported by a sticky code, and nothing outside the tensors touched. The arrays end
// where their allocation ends.
#include <gtest/gtest.h>

#include <algorithm>
#include <climits>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "fixup/workspace.hpp"
#include "gpu/device_run.hpp"
#include "gpu/test_kernels.hpp"
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

constexpr std::int32_t kOverlapping = 220;     // sequences,
constexpr std::int32_t kPackedTokens = 16384;  // each with all queries or none
constexpr std::int32_t kLongest = 131072;

/// Every sequence reads the same keys. Outputs, if 110 sequences have all the queries, cost more than 32 bits hold.
Problem overlapping_problem(const DeviceBuffer& rows, const DeviceBuffer& values, const DeviceBuffer& out,
                            const DeviceBuffer& cumulative, const DeviceBuffer& lengths) {
  Problem p;
  p.batch = kOverlapping, p.q_heads = 32, p.kv_heads = 8, p.head_dim = 128;
  p.q_tokens = kPackedTokens, p.total_q_tokens = kPackedTokens, p.kv_capacity = kLongest;
  const Strides packed{.sequence = 0, .head = 128, .token = 32 * 128, .dim = 1};
  const Strides keys{.sequence = 0, .head = std::int64_t{kLongest} * 128, .token = 128, .dim = 1};
  p.q = {.data = rows.data(), .dtype = DType::kBFloat16, .strides = packed};
  p.k = {.data = rows.data(), .dtype = DType::kBFloat16, .strides = keys};
  p.v = {.data = values.data(), .dtype = DType::kBFloat16, .strides = keys};
  p.o = {.data = out.data(), .dtype = DType::kBFloat16, .strides = packed};
  p.cu_q_tokens = cumulative.as<std::int32_t>();
  p.kv_lengths = lengths.as<std::int32_t>();
  p.scores.causal = true;
  return p;
}

/// Queries that are many sequences' at once may be more outputs than a line of 32 bits counts: such a call is reported, and leaves the
/// workspace as it has to be for the next.
TEST(Lengths, R24_QueriesOfManySequencesAtOnceLeaveCountersAtZero) {
  const DeviceBuffer rows(std::size_t{8} * kLongest * 128 * 2);
  const DeviceBuffer values(rows.size_bytes());
  const DeviceBuffer out(std::size_t{kPackedTokens} * 32 * 128 * 2);
  const DeviceBuffer cumulative((kOverlapping + 1) * sizeof(std::int32_t));
  const DeviceBuffer lengths(kOverlapping * sizeof(std::int32_t));
  std::vector<std::int32_t> starts(kOverlapping + 1);
  for (std::size_t i = 0; i < starts.size(); ++i) starts[i] = i % 2 == 0 ? 0 : kPackedTokens;
  cumulative.copy_from(starts.data());
  lengths.copy_from(std::vector<std::int32_t>(kOverlapping, kLongest).data());
  rows.fill(std::byte{0});
  values.fill(std::byte{0});
  const Problem problem = overlapping_problem(rows, values, out, cumulative, lengths);
  const Stream stream;
  Options options = options_of({});
  options.workers = 0;
  options.stream = stream.get();
  const support::TestWorkspace workspace(problem, options);
  demand(workspace.status());
  demand(decode(problem, options, workspace.get()));
  EXPECT_EQ(sticky_status(workspace.get(), options).code, StatusCode::kBadLengths);
  const std::vector<std::byte> left = workspace.state().contents();
  const auto counters = left.begin() + fixup::kStateHeaderBytes;
  EXPECT_EQ(std::count(counters, left.end(), std::byte{0}), left.end() - counters);
}

/// The same where a thread's own sequences cost more than 32 bits hold, so that their sums are below 0 and none of them holds the
/// line's beginning: the worker that looks for it looks at no sequence that there is not, whatever its shared memory held before.
TEST(Lengths, R24_QueriesOfManySequencesOfAThreadLeadToNoOther) {
  constexpr std::int32_t kSequences = 4 * 289;  // four for each of 384 threads that has any, two of them with all queries
  constexpr std::int32_t kQueries = 262144;     // 8,192 row blocks
  constexpr std::int32_t kKeys = 10240 * 128;   // of 10,240 tiles each: 1.34 of 2.15 G cost units a sequence
  const DeviceBuffer row(std::size_t{4} * 64 * 2);
  const DeviceBuffer out(std::size_t{kQueries} * 4 * 64 * 2);
  const DeviceBuffer cumulative((kSequences + 1) * sizeof(std::int32_t));
  const DeviceBuffer lengths(kSequences * sizeof(std::int32_t));
  std::vector<std::int32_t> starts(kSequences + 1);
  for (std::size_t i = 0; i < starts.size(); ++i) starts[i] = i % 2 == 0 ? 0 : kQueries;
  cumulative.copy_from(starts.data());
  lengths.copy_from(std::vector<std::int32_t>(kSequences, kKeys).data());
  row.fill(std::byte{0});
  Problem problem;
  problem.batch = kSequences, problem.q_heads = 4, problem.kv_heads = 1, problem.head_dim = 64;
  problem.q_tokens = kQueries, problem.total_q_tokens = kQueries, problem.kv_capacity = kKeys;
  problem.q = {.data = row.data(), .dtype = DType::kBFloat16, .strides = {.sequence = 0, .head = 64, .token = 0, .dim = 1}};
  problem.k =
      problem.v = {.data = row.data(), .dtype = DType::kBFloat16, .strides = {.sequence = 0, .head = 64, .token = 0, .dim = 1}};
  problem.o = {.data = out.data(), .dtype = DType::kBFloat16, .strides = {.sequence = 0, .head = 64, .token = 4 * 64, .dim = 1}};
  problem.cu_q_tokens = cumulative.as<std::int32_t>();
  problem.kv_lengths = lengths.as<std::int32_t>();
  const Stream stream;
  Options options = options_of({});
  options.workers = 0;
  options.stream = stream.get();
  const support::TestWorkspace workspace(problem, options);
  demand(workspace.status());
  fill_shared(stream, std::byte{0x7F});
  demand(decode(problem, options, workspace.get()));
  EXPECT_EQ(sticky_status(workspace.get(), options).code, StatusCode::kBadLengths);
}

/// Heads of one kv head, and query tokens, of one sequence. `latent`: values are the first 512 dims of keys. `query`: an element's bits.
struct LongestShape {
  std::int32_t head_dim;
  std::int32_t q_heads;
  std::int32_t q_tokens;
  std::int32_t page_tokens = 1 << 30;
  bool latent = false;
  DType dtype = DType::kFloat16;  // of keys
  std::uint16_t query = 0x3C00;
};

/// A sequence of nearly 2^31 tokens, all of which lie in one place; a window shows a query the last 201. Where the kernel writes
/// nothing its shared memory holds NaN. The output's bits, all of them 1.
std::vector<std::uint16_t> attend_longest(const LongestShape& shape, std::int32_t tokens) {
  constexpr std::uint16_t kOne = 0x3C00;
  constexpr std::uint8_t kOneOfFp8 = 0x38;
  const std::int64_t dims = shape.head_dim;
  const std::int64_t value_dim = shape.latent ? 512 : dims;
  const std::int64_t rows = std::int64_t{shape.q_tokens} * shape.q_heads;
  const auto pages = static_cast<std::size_t>(INT_MAX / shape.page_tokens + 1);
  const DeviceBuffer row(static_cast<std::size_t>(dims) * sizeof(kOne));
  const DeviceBuffer queries(static_cast<std::size_t>(rows * dims) * sizeof(kOne));
  const DeviceBuffer out(static_cast<std::size_t>(rows * value_dim) * sizeof(kOne));
  const DeviceBuffer table(pages * sizeof(std::int32_t));
  const DeviceBuffer length(sizeof(tokens));
  queries.copy_from(std::vector<std::uint16_t>(static_cast<std::size_t>(rows * dims), shape.query).data());
  if (shape.dtype == DType::kFloat8E4M3) {
    row.fill(std::byte{kOneOfFp8});
  } else {
    row.copy_from(std::vector<std::uint16_t>(static_cast<std::size_t>(dims), kOne).data());
  }
  table.fill(std::byte{0});
  length.copy_from(&tokens);
  Problem p{.batch = 1, .q_heads = shape.q_heads, .kv_heads = 1, .head_dim = shape.head_dim};
  p.value_dim = static_cast<std::int32_t>(value_dim), p.q_tokens = shape.q_tokens, p.kv_capacity = INT_MAX;
  const auto packed = [&](std::int64_t of_row) {
    return Strides{.sequence = rows * of_row, .head = of_row, .token = shape.q_heads * of_row, .dim = 1};
  };
  p.q = {.data = queries.data(), .dtype = DType::kFloat16, .strides = packed(dims)};
  p.k = p.v = {.data = row.data(), .dtype = shape.dtype, .strides = {.sequence = dims, .head = dims, .token = 0, .dim = 1}};
  p.o = {.data = out.data(), .dtype = DType::kFloat16, .strides = packed(value_dim)};
  p.kv_lengths = length.as<std::int32_t>();
  p.scores.causal = true, p.scores.window_left = 200;
  p.pages = {.page_tokens = shape.page_tokens,
             .page_count = 1,
             .block_table = table.as<std::int32_t>(),
             .block_table_stride = static_cast<std::int64_t>(pages)};
  const Stream stream;
  Options options = options_of({});
  options.workers = 0;
  options.stream = stream.get();
  const support::TestWorkspace workspace(p, options);
  demand(workspace.status());
  fill_shared(stream, std::byte{0xFF});
  demand(decode(p, options, workspace.get()));
  stream.wait();
  std::vector<std::uint16_t> bits(static_cast<std::size_t>(rows * value_dim));
  out.copy_to(bits.data());
  return bits;
}

/// The next row that a lane would send for lies behind all that 31 bits count.
TEST(Lengths, R19_TheFirstReadOfTheLongestSequenceEnds) {
  for (const std::int32_t q_heads : {1, 16}) EXPECT_FALSE(attend_longest({64, q_heads, 1}, INT_MAX).empty());
}

void expect_ones_of_longest(const LongestShape& shape) {
  for (const std::int32_t tokens : {INT_MAX, INT_MAX - 1, INT_MAX - 40, INT_MAX - 100}) {
    const std::vector<std::uint16_t> bits = attend_longest(shape, tokens);
    EXPECT_EQ(std::count(bits.begin(), bits.end(), 0x3C00), bits.end() - bits.begin())
        << shape.head_dim << " dims, " << shape.q_heads << " heads, " << shape.q_tokens << " queries, " << tokens << " tokens";
  }
}

/// The last tile's places lie behind all that 31 bits count: what a stage holds there counts as not there, in tiles of few rows, of
/// more, of any call's, under rules, and of warpgroup products.
TEST(Lengths, R19_TheLastTileOfTheLongestSequenceEndsWhereTheSequenceDoes) {
  for (const LongestShape& shape : {LongestShape{64, 1, 1}, {64, 16, 1}, {128, 4, 1}, {64, 1, 3}, {64, 2, 64}}) {
    expect_ones_of_longest(shape);
  }
}

/// The same of latent tiles of few rows, where queries of -1 have scores far below the 0 of a row that is not there.
TEST(Lengths, R19_TheLastLatentTileOfTheLongestSequenceEndsWhereTheSequenceDoes) {
  constexpr std::uint16_t kMinusOne = 0xBC00;
  for (const std::int32_t q_heads : {16, 32}) {
    for (const DType dtype : {DType::kFloat16, DType::kFloat8E4M3}) {
      expect_ones_of_longest({576, q_heads, 1, 1 << 30, true, dtype, kMinusOne});
    }
  }
}

/// Who converts fp8 rows looks up the pages of the tile behind the one that it sends for, and none behind the last. What such a look-up
/// would give is not used: it may end the context, and compute-sanitizer tells.
TEST(Lengths, R19_NoPageIsLookedUpBehindTheLongestSequence) { expect_ones_of_longest({576, 16, 1, 64, true, DType::kFloat8E4M3}); }

}  // namespace
}  // namespace lean::gpu
