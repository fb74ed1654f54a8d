// Device memory: nothing read or written outside it, nothing read before it is written, offsets of 64 bits. The tests of suite
// Sanitized are small, and run again under compute-sanitizer.
#include <gtest/gtest.h>

#include <climits>
#include <cstddef>
#include <cstdlib>

#include "api/backends.hpp"
#include "gpu/device_run.hpp"
#include "gpu/test_kernels.hpp"
#include "support/reduced.hpp"
#include "support/tables.hpp"

namespace lean::gpu {
namespace {

using support::full_or_reduced;
using support::KvType;

/// What racecheck rightly sees and nobody minds: warps of other rows that have the same tokens clear V behind the last one, zeros
/// over zeros; and of heads smaller than the variant's a row's rest is read, which lies in the next row, and selected away. So it
/// gets whole tiles and whole heads.
bool whole_tiles_only() { return std::getenv("LEAN_TEST_WHOLE_TILES") != nullptr; }

/// Tokens end to end and with gaps, which tensor copies (TMA) take in boxes where it can (fp8 rows with gaps begin anywhere);
/// pages that hold no box, so that threads copy everything.
enum class Rows : std::int32_t { kEndToEnd, kWithGaps, kShortPages };

/// One case a kernel variant: type, head dimension, rows of a kv head.
std::vector<Case> variant_cases(Rows rows) {
  const bool end_to_end = rows == Rows::kEndToEnd;
  using Dims = std::vector<std::int32_t>;
  using Lens = std::vector<std::int32_t>;
  std::vector<Case> cases;
  using Types = std::pair<DType, KvType>;
  for (const auto& [dtype, kv_type] : {Types{DType::kBFloat16, KvType::kAsQueries}, Types{DType::kFloat16, KvType::kAsQueries},
                                       Types{DType::kBFloat16, KvType::kE4M3}, Types{DType::kFloat16, KvType::kE5M2}}) {
    const bool fp8 = kv_type != KvType::kAsQueries;
    for (const std::int32_t d :
         full_or_reduced(support::head_dims_and({8, 72}), Dims{64, 128, whole_tiles_only() ? kWidestCudaHead : 200})) {
      for (const std::int32_t group : full_or_reduced(Dims{3, 12, 20, 40, 100}, Dims{3, 40})) {
        cases.push_back({.dtype = dtype,
                         .kv_type = kv_type,
                         .kv_scales = fp8 ? support::KvScales::kHead : support::KvScales::kNone,
                         .q_heads = 2 * group,
                         .head_dim = d,
                         .lens = whole_tiles_only() ? Lens{640, 0, 256} : Lens{301, 0, 129},
                         .pad = {whole_tiles_only() ? 128 : 1, 0, 0},
                         .page_tokens = rows == Rows::kShortPages ? 8 : 0,
                         .k_layout = end_to_end ? "bhsd" : (fp8 ? "bshd~gap1" : "bshd"),
                         .v_layout = end_to_end ? "bhsd" : (fp8 ? "bhsd~gap4" : "bhsd~gap8"),
                         .workers = 5});
      }
    }
  }
  return cases;
}

void expect_matches(const std::vector<Case>& cases) {
  const Stream stream;
  for (Case c : cases) {
    for (const Fixup fixup : full_or_reduced<std::vector<Fixup>>({support::kFixups, std::end(support::kFixups)}, {c.fixup})) {
      c.fixup = fixup;
      DeviceRun call(c);
      EXPECT_FALSE(call.bits(stream.get()).empty());
      EXPECT_TRUE(call.matches());
      EXPECT_TRUE(call.clean());
    }
  }
}

TEST(Sanitized, R18_ExactAllocationsOfTokensEndToEnd) { expect_matches(variant_cases(Rows::kEndToEnd)); }
TEST(Sanitized, R18_ExactAllocationsOfRowsWithGaps) { expect_matches(variant_cases(Rows::kWithGaps)); }
TEST(Sanitized, R18_ExactAllocationsOfShortPages) { expect_matches(variant_cases(Rows::kShortPages)); }

/// More outputs than there are multiprocessors, which two workers of each share out: end to end, in boxes of pages and of rows with gaps,
/// and in long pages; 200 sequences of 2 K/V heads of which some are empty.
TEST(Sanitized, R18_ExactAllocationsOfManyOutputs) {
  std::vector<std::int32_t> lens(200);
  for (std::size_t i = 0; i < lens.size(); ++i)
    lens[i] = whole_tiles_only() ? 128 * static_cast<std::int32_t>(i % 3) : static_cast<std::int32_t>(i * 37 % 301);
  std::vector<Case> cases;
  for (const auto& [dtype, kv_type] : {std::pair{DType::kBFloat16, KvType::kAsQueries}, {DType::kFloat16, KvType::kE4M3}}) {
    const bool fp8 = kv_type != KvType::kAsQueries;
    for (const std::int32_t d : {64, 128}) {
      for (const auto& [layout, page_tokens] : {std::pair{"bhsd", 0}, {"bshd", 0}, {"bshd", 16}, {"bhsd", 128}}) {
        cases.push_back({.dtype = dtype,
                         .kv_type = kv_type,
                         .kv_scales = fp8 ? support::KvScales::kHead : support::KvScales::kNone,
                         .q_heads = 8,
                         .head_dim = d,
                         .lens = lens,
                         .page_tokens = page_tokens,
                         .k_layout = layout,
                         .v_layout = layout,
                         .workers = 0});
      }
    }
  }
  expect_matches(cases);
}

/// Rules of scores in a decode step, of 8, 16, 32 and 64 rows: masks and slopes are read where the row sees a key, and nowhere else.
TEST(Sanitized, R18_ExactAllocationsUnderRules) {
  std::vector<Case> cases;
  for (const auto& [dtype, kv_type] : {std::pair{DType::kBFloat16, KvType::kAsQueries}, {DType::kFloat16, KvType::kE4M3}}) {
    for (const std::int32_t d : {64, 128, 256}) {
      for (const auto& [q_heads, n_q] : {std::pair{8, 1}, {16, 1}, {32, 1}, {8, 4}, {8, 8}}) {
        const std::int32_t page_tokens = q_heads == 16 || n_q == 8 ? 16 : 0;
        Case c{.dtype = dtype,
               .kv_type = kv_type,
               .kv_scales = kv_type == KvType::kAsQueries ? support::KvScales::kNone : support::KvScales::kHead,
               .q_heads = q_heads,
               .kv_heads = 1,
               .head_dim = d,
               .lens = {1030, 0, 250, 77},  // lanes see different numbers of a last run's tokens
               .n_q = {n_q},
               .page_tokens = page_tokens,
               .k_layout = "bshd",
               .v_layout = "bshd",
               .workers = 5};
        if (page_tokens == 0) c.pad = {1, 0, 3, 0};
        Case masked = c;
        masked.mask = support::Mask::kBoolean;
        masked.window_left = 200;
        Case added = c;
        added.mask = support::Mask::kBFloat16;
        added.softcap = 3.0F;
        c.alibi = true;
        c.tree = n_q > 1;
        cases.insert(cases.end(), {masked, added, c});
      }
    }
  }
  expect_matches(cases);
}

/// Latent rows, by each of their kernels: of 16, 32 and 64 rows and of several such blocks, in boxes, by threads, and converted.
TEST(Sanitized, R18_ExactAllocationsOfLatentRows) {
  std::vector<Case> cases;
  for (const auto& [dtype, kv_type] : {std::pair{DType::kBFloat16, KvType::kAsQueries}, {DType::kFloat16, KvType::kE4M3}}) {
    for (const std::int32_t heads : {16, 32, 40, 128}) {
      for (const std::int32_t page_tokens : {0, 64}) {
        cases.push_back({.dtype = dtype,
                         .kv_type = kv_type,
                         .kv_scales = kv_type == KvType::kAsQueries ? support::KvScales::kNone : support::KvScales::kHead,
                         .q_heads = heads,
                         .kv_heads = 1,
                         .head_dim = 576,
                         .value_dim = 512,
                         .values_in_keys = true,
                         .lens = {1101, 0, 129, 700},
                         .page_tokens = page_tokens,
                         .k_layout = "bhsd",
                         .workers = heads == 128 ? 2 : 7});
      }
    }
  }
  expect_matches(cases);
}

/// What the plain kernel serves: dims of any number, value dims of their own, pages of a few tokens; more warps than have tokens.
TEST(Sanitized, R18_ExactAllocationsOfThePlainKernel) {
  std::vector<Case> cases;
  for (const auto& [dtype, kv_type] : {std::pair{DType::kBFloat16, KvType::kAsQueries}, {DType::kFloat16, KvType::kE4M3}}) {
    for (const auto& [d, dv] : {std::pair{59, 0}, {200, 76}, {320, 264}}) {
      for (const std::int32_t page_tokens : {0, 7}) {
        cases.push_back({.dtype = dtype,
                         .kv_type = kv_type,
                         .kv_scales = kv_type == KvType::kAsQueries ? support::KvScales::kNone : support::KvScales::kHead,
                         .q_heads = 6,
                         .head_dim = d,
                         .value_dim = dv,
                         .lens = {1030, 0, 129},
                         .n_q = {3},
                         .pad = {1, 0, 0},
                         .page_tokens = page_tokens,
                         .causal = true,
                         .workers = 5});
      }
    }
  }
  expect_matches(cases);
}

TEST(Sanitized, R04_EveryPolicy) {
  const Stream stream;
  for (const Policy& policy : support::all_policies()) {
    for (const Fixup fixup : support::kFixups) {
      if (!support::pairs(policy, fixup)) continue;
      for (const std::int32_t workers : {7, 40}) {  // 40: merges of two levels
        Case c{.q_heads = 3,
               .kv_heads = 1,
               .lens = whole_tiles_only() ? std::vector{1536, 128, 0, 640} : std::vector{1511, 97, 0, 640},
               .n_q = {2},
               .page_tokens = 8,  // copied by threads: racecheck knows no other copies
               .causal = true,
               .policy = policy,
               .fixup = fixup,
               .workers = workers};
        DeviceRun call(c);
        EXPECT_FALSE(call.bits(stream.get()).empty());
        EXPECT_TRUE(call.matches());
        EXPECT_TRUE(call.clean());
      }
    }
  }
}

/// For initcheck: scratch as cudaMalloc left it, keys and values only where a row may see them.
TEST(Sanitized, R14_NothingUnwrittenIsRead) {
  const Stream stream;
  for (const Policy& policy : support::all_policies()) {
    const Case c{.q_heads = 6,
                 .lens = {1511, 0, 97, 641},
                 .pad = {300, 0, 1, 640},
                 .k_layout = "bhsd",
                 .v_layout = "bhsd",
                 .policy = policy,
                 .workers = 40};
    DeviceRun call(c);
    const auto bits = call.bits(stream.get());
    EXPECT_TRUE(call.matches());

    Problem problem = call.problem();
    const std::size_t head_bytes = static_cast<std::size_t>(problem.kv_capacity) * static_cast<std::size_t>(c.head_dim) * 2;
    const DeviceBuffer k(head_bytes * c.lens.size() * static_cast<std::size_t>(c.kv_heads));
    const DeviceBuffer v(k.size_bytes());
    for (std::size_t b = 0; b < c.lens.size(); ++b) {
      for (std::size_t head = 0; head < static_cast<std::size_t>(c.kv_heads); ++head) {
        const std::size_t row_bytes = static_cast<std::size_t>(c.head_dim) * 2;
        const std::size_t begin =
            (b * static_cast<std::size_t>(c.kv_heads) + head) * head_bytes + static_cast<std::size_t>(c.pad[b]) * row_bytes;
        const std::size_t bytes = static_cast<std::size_t>(c.lens[b] - c.pad[b]) * row_bytes;
        if (bytes == 0) continue;
        const auto copy = [&](const DeviceBuffer& to, const void* from) {
          demand(cudaMemcpy(to.data() + begin, static_cast<const std::byte*>(from) + begin, bytes, cudaMemcpyDeviceToDevice),
                 "cudaMemcpy");
        };
        copy(k, problem.k.data);
        copy(v, problem.v.data);
      }
    }
    problem.k.data = k.data();
    problem.v.data = v.data();
    const WorkspaceSize need = workspace_size(problem, call.options());
    demand(need.status);
    const DeviceBuffer state(need.state_bytes);
    const DeviceBuffer scratch(need.scratch_bytes);
    state.fill(std::byte{0});
    demand(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    call.poison_outputs(stream.get());
    Options options = call.options();
    options.stream = stream.get();
    demand(decode(problem, options, {state.data(), state.size_bytes(), scratch.data(), scratch.size_bytes()}));
    EXPECT_EQ(call.output_bytes(stream.get()), bits) << support::to_text(c);
  }
}

// ---- 64 bits ----------------------------------------------------------------------------------------------------------

constexpr std::int64_t kFar = (std::int64_t{1} << 31) + 64;  // elements

/// Copies what a kv tensor holds to `to`, where it has other strides: rows of head_dim elements, one by one.
void spread(const Case& c, const Problem& problem, const TensorView& from, std::byte* to, const Strides& strides) {
  const auto offset = [](const Strides& s, std::int64_t b, std::int64_t h, std::int64_t t) {
    return 2 * (b * s.sequence + h * s.head + t * s.token);
  };
  for (std::int64_t b = 0; b < problem.batch; ++b) {
    for (std::int64_t h = 0; h < problem.kv_heads; ++h) {
      for (std::int64_t t = 0; t < c.lens[static_cast<std::size_t>(b)]; ++t) {
        demand(cudaMemcpy(to + offset(strides, b, h, t), static_cast<const std::byte*>(from.data) + offset(from.strides, b, h, t),
                          static_cast<std::size_t>(c.head_dim) * 2, cudaMemcpyDeviceToDevice),
               "cudaMemcpy");
      }
    }
  }
}

bool has_free(std::size_t bytes) {
  std::size_t free = 0;
  std::size_t total = 0;
  demand(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
  return free > bytes;
}

TEST(Memory, R19_InputsBeyondTwoToTheThirtyOneElements) {
  constexpr std::size_t kBytes = std::size_t{9} << 30;
  if (!has_free(2 * kBytes + (std::size_t{1} << 30))) GTEST_SKIP() << "needs 19 GiB of device memory";
  const Stream stream;
  const Case c{.head_dim = 64, .lens = {5, 7}, .k_layout = "bhsd", .v_layout = "bhsd", .workers = 2};
  DeviceRun call(c);
  const auto bits = call.bits(stream.get());
  ASSERT_TRUE(call.matches());
  const Problem near = call.problem();
  const DeviceBuffer k(kBytes);
  const DeviceBuffer v(kBytes);
  constexpr std::int64_t kStep = kFar / 4 / 8 * 8;  // six tokens on: beyond 2^31 elements and 2^32 bytes
  for (const auto& [k_strides, v_strides] :
       {std::pair{Strides{kFar, 1024, 64, 1}, Strides{64, kFar, 128, 1}},  // by sequence, by head
        {Strides{512, 64, kStep, 1}, Strides{128, 64, kStep + 512, 1}},    // by token
        {Strides{-kFar, 1024, 64, 1}, Strides{64, -kFar, 128, 1}}}) {      // backwards
    k.fill(support::kPoison);
    v.fill(support::kPoison);
    std::byte* const k_data = k.data() + (k_strides.sequence < 0 ? 2 * kFar : 0);
    std::byte* const v_data = v.data() + (v_strides.head < 0 || v_strides.sequence < 0 ? 2 * kFar : 0);
    spread(c, near, near.k, k_data, k_strides);
    spread(c, near, near.v, v_data, v_strides);
    demand(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    call.problem().k = {.data = k_data, .dtype = c.dtype, .strides = k_strides};
    call.problem().v = {.data = v_data, .dtype = c.dtype, .strides = v_strides};
    EXPECT_EQ(call.bits(stream.get()), bits);
    EXPECT_TRUE(call.clean());
  }
}

/// Of 2^31 - 1 queries the last 16 bring new tokens; the next that a thread of the append would take 31 bits do not count.
TEST(Memory, R19_TheAppendOfAsManyQueriesAsThereMayBeEnds) {
  constexpr std::size_t kBytes = std::size_t{4} << 30;  // an element of each query
  if (!has_free(kBytes + (std::size_t{1} << 30))) GTEST_SKIP() << "needs 5 GiB of device memory";
  constexpr std::int32_t kTokens = 16;
  constexpr std::uint16_t kOne = 0x3C00;
  const DeviceBuffer one(sizeof(kOne));
  const DeviceBuffer o(kBytes);
  const DeviceBuffer cache(2 * kTokens * sizeof(kOne));
  const DeviceBuffer length(sizeof(kTokens));
  one.copy_from(&kOne);
  cache.fill(std::byte{0});
  length.copy_from(&kTokens);
  Problem p{.batch = 1, .q_heads = 1, .kv_heads = 1, .head_dim = 1};
  p.q_tokens = INT_MAX, p.kv_capacity = kTokens;
  p.q = {.data = one.data(), .dtype = DType::kFloat16, .strides = {.sequence = 1, .head = 1, .token = 0, .dim = 1}};
  p.k = {.data = cache.data(), .dtype = DType::kFloat16, .strides = {.sequence = kTokens, .head = kTokens, .token = 1, .dim = 1}};
  p.v = {.data = cache.as<std::uint16_t>() + kTokens, .dtype = DType::kFloat16, .strides = p.k.strides};
  p.o = {.data = o.data(), .dtype = DType::kFloat16, .strides = {.sequence = INT_MAX, .head = INT_MAX, .token = 1, .dim = 1}};
  p.append.k = p.append.v = p.q;
  p.kv_lengths = length.as<std::int32_t>();
  const Stream stream;
  Options options = options_of({}, stream.get());
  options.workers = 0;
  const WorkspaceSize size = workspace_size(p, options);
  demand(size.status);
  const DeviceBuffer state(size.state_bytes);
  const DeviceBuffer scratch(size.scratch_bytes);
  state.fill(std::byte{0});
  demand(decode(p, options, {state.data(), size.state_bytes, scratch.data(), size.scratch_bytes}));
  stream.wait();
  EXPECT_EQ(count_other_words(cache, 0x3C003C00U), 0U);
}

/// Every word of the memory the outputs lie in is looked at: rows are where they must be, all else is as it was.
TEST(Memory, R19_OutputsAndQueriesBeyondTwoToTheThirtyOneElements) {
  constexpr std::size_t kBytes = std::size_t{9} << 30;  // lse: 2^31 floats
  if (!has_free(3 * kBytes)) GTEST_SKIP() << "needs 27 GiB of device memory";
  const Stream stream;
  const Case c{.head_dim = 64, .lens = {5, 7}, .k_layout = "bhsd", .v_layout = "bhsd", .workers = 2};
  DeviceRun call(c);
  EXPECT_FALSE(call.bits(stream.get()).empty());
  ASSERT_TRUE(call.matches());
  Problem& problem = call.problem();
  const Problem near = problem;
  const DeviceBuffer o(kBytes);
  const DeviceBuffer lse(kBytes);
  const DeviceBuffer q(kBytes);
  o.fill(support::kPoison);
  lse.fill(support::kPoison);
  q.fill(support::kPoison);
  problem.o = {.data = o.data(), .dtype = c.dtype, .strides = {kFar, 64, 64, 1}};
  problem.lse = {.data = lse.as<float>(), .sequence_stride = kFar, .head_stride = 1, .token_stride = 1};
  problem.q = {.data = q.data(), .dtype = c.dtype, .strides = {kFar, 64, 64, 1}};
  const std::size_t sequence_bytes = static_cast<std::size_t>(c.q_heads) * 64 * 2;  // n_q = 1: heads end to end in both
  for (std::size_t b = 0; b < 2; ++b) {
    demand(cudaMemcpy(q.data() + 2 * b * std::size_t{kFar}, static_cast<const std::byte*>(near.q.data) + b * sequence_bytes,
                      sequence_bytes, cudaMemcpyDeviceToDevice),
           "cudaMemcpy");
  }
  demand(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  call.enqueue(stream.get());
  stream.wait();
  EXPECT_TRUE(call.clean());
  EXPECT_EQ(count_other_words(o, 0xFFFFFFFFU), 2 * sequence_bytes / 4);
  EXPECT_EQ(count_other_words(lse, 0xFFFFFFFFU), 2U * static_cast<unsigned>(c.q_heads));
  const auto copy_back = [](const void* from, std::size_t bytes) {
    std::vector<std::uint8_t> host(bytes);
    demand(cudaMemcpy(host.data(), from, bytes, cudaMemcpyDeviceToHost), "cudaMemcpy");
    return host;
  };
  for (std::size_t b = 0; b < 2; ++b) {
    EXPECT_EQ(copy_back(o.data() + 2 * b * std::size_t{kFar}, sequence_bytes),
              copy_back(static_cast<const std::byte*>(near.o.data) + b * sequence_bytes, sequence_bytes));
    EXPECT_EQ(copy_back(lse.as<float>() + b * std::size_t{kFar}, static_cast<std::size_t>(c.q_heads) * 4),
              copy_back(near.lse.data + b * static_cast<std::size_t>(c.q_heads), static_cast<std::size_t>(c.q_heads) * 4));
  }
}

// ---- what the device has room for -------------------------------------------------------------------------------------

/// Every problem that is served gets a launch: registers and shared memory of every variant fit this device.
TEST(Memory, R33_EveryVariantStartsOnThisDevice) {
  const Stream stream;
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
    for (std::int32_t d = 8; d <= 256; d += 8) {
      for (const std::int32_t group : {1, 17, 33, 65, 129}) {
        const Case c{.dtype = dtype, .q_heads = group, .kv_heads = 1, .head_dim = d, .lens = {70, 1}, .workers = 2};
        ASSERT_TRUE(support::target_serves(c)) << support::to_text(c);
        DeviceRun call(c);
        EXPECT_FALSE(call.bits(stream.get()).empty());
        EXPECT_TRUE(call.matches());
      }
    }
  }
}

}  // namespace
}  // namespace lean::gpu
