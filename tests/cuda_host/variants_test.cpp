// Which variant of the kernel serves which call, on which device.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <iterator>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "backends/cuda/kernel/tuning.hpp"
#include "backends/cuda/kernel_rows.hpp"
#include "backends/cuda/kernel_table.hpp"
#include "base/kv_type.hpp"
#include "cuda_host/calls.hpp"
#include "cuda_host/fake_runtime.hpp"
#include "lean/lean.hpp"

namespace lean::cuda_host {
namespace {

/// A kernel's name, as the compiler writes the template's arguments.
std::string name_of(const cuda::KernelConfig& config) {
  const auto number = [](auto value) { return std::to_string(static_cast<int>(value)); };
  return "decode_kernelILNS0_12ArchitectureE" + number(config.architecture) + "ELNS_5DTypeE" + number(config.dtype) + "ELi" +
         number(config.head_dim) + "ELi" + number(config.q_rows) + "ELNS0_5ScopeE" + number(config.scope) + "EE";
}

/// One's own side of an exchange that has no others.
const Exchange& alone_in_an_exchange() {
  static std::uint32_t fault = 0;
  static Exchange exchange{.memory = {address(40)}, .memory_bytes = std::size_t{1} << 30, .fault = &fault};
  return exchange;
}

/// Makes the rows of a decode step some of a batch that has a chunk too.
void ask_for_chunks_too(Problem& problem) {
  problem.batch = 3;
  problem.q_tokens = 1024;
  problem.total_q_tokens = problem.q_tokens + 2;
  problem.cu_q_tokens = static_cast<const std::int32_t*>(address(7));
  problem.scores.causal = true;
}

/// A call that nothing but this variant serves, as its only launch or its last.
Asked call_for(const cuda::KernelConfig& config) {
  Shape shape{.q_heads = 2 * config.q_rows, .head_dim = config.head_dim, .kv_dtype = config.dtype};
  if (!kv_type_of(config.dtype).scaled) shape.dtype = config.dtype;
  const bool strided = config.scope == cuda::Scope::kStridedStep;
  const bool boxes = config.in_columns() && !config.wide();
  shape.token_major = strided || boxes;
  if (config.ctas() > 1) shape.batch = FakeDevice{}.multiprocessors;
  if (strided) shape.page_tokens = 17;  // holds no whole boxes
  Asked asked{"a variant's own call", problem_of(shape), cuda_options()};
  if (config.scope == cuda::Scope::kChunkStep) asked.options.policy = Policy::fixed_chunk();
  if (config.scope == cuda::Scope::kAnyCall) asked.options.fixup = Fixup::kTwoKernels;
  if (config.ruled()) asked.problem.scores.softcap = 30.0F;
  if (config.exchanges()) asked.options.exchange = &alone_in_an_exchange();
  if (config.scope == cuda::Scope::kBesideStep) ask_for_chunks_too(asked.problem);
  return asked;
}

/// Whether a wide kernel takes the calls of a variant where there are products of warpgroups: built with LEAN_CUDA_WIDE.
bool has_wide_kernel(const cuda::KernelConfig& config) {
  const bool instead = config.scope == cuda::Scope::kTensorStep || config.scope == cuda::Scope::kAnyCall;
  const DType factors = config.kv_type().product;
  return instead && config.q_rows >= cuda::kWideRule.fewest_rows && !cuda::wide_kernels_for(factors, config.head_dim).empty();
}

/// R33: no row of the table without its kernels, and none that no call takes.
TEST(CudaHost, R33_EveryRowOfTheTableIsBuiltAndServesACallOfItsOwn) {
  to_a_new_device();
  std::set<std::string_view> kernels;
  std::size_t variants = 0;
  for (const cuda::ArchitectureRows& table : cuda::kKernelRows) {
    for (const cuda::KernelRow& row : table) {
      for (const cuda::NamedFamily& named : cuda::kFamilies) {
        if (!named.family.has(row)) continue;
        const cuda::KernelConfig config = cuda::config_of(table.architecture, row, named.family.dtype);
        const bool lacks_chunks =
            config.scope == cuda::Scope::kBesideStep && cuda::wide_kernels_for(config.dtype, config.head_dim).empty();
        if (lacks_chunks) continue;  // built without LEAN_CUDA_WIDE
        const Asked asked = call_for(config);
        const Workspace workspace = workspace_for(asked);
        to_a_new_device({.major = has_wide_kernel(config) ? 10 : 9});
        ASSERT_TRUE(decode(asked.problem, asked.options, workspace).ok()) << name_of(config);
        const std::string_view kernel = runtime().launches().back().kernel;
        EXPECT_NE(kernel.find(name_of(config)), std::string_view::npos) << name_of(config) << " is not " << kernel;
        kernels.insert(kernel);
        ++variants;
      }
    }
  }
  EXPECT_EQ(kernels.size(), variants);
  EXPECT_GT(variants, 100U);
}

/// R33, R30: on any kind of device every width is served, with no more shared memory and threads than there are: by the plain kernel
/// where two tiles of no variant fit.
TEST(CudaHost, R33_WhatIsSupportedFitsEveryKindOfDevice) {
  std::set<std::string_view> kernels;
  for (const FakeDevice& device : kDevices) {
    for (const std::int32_t head_dim : {8, 64, 72, 80, 96, 128, 192, 240, 248, 256}) {
      for (const DType kv_dtype : {DType::kBFloat16, DType::kFloat8E4M3}) {
        for (const std::int32_t group : {1, 4, 8, 16, 64, 128}) {
          for (const std::int32_t page_tokens : {0, 16, 128}) {
            for (const bool token_major : {false, true}) {
              for (const bool chunks : {false, true}) {
                Asked asked{"",
                            problem_of({.batch = 2,
                                        .q_heads = 2 * group,
                                        .head_dim = head_dim,
                                        .kv_dtype = kv_dtype,
                                        .token_major = token_major,
                                        .page_tokens = page_tokens}),
                            cuda_options()};
                if (chunks) asked.options.policy = Policy::fixed_chunk();
                to_a_new_device(device);
                const Status supported = supports(asked.problem, asked.options);
                ASSERT_TRUE(supported.ok()) << "sm_" << device.major << device.minor << " d " << head_dim << ": "
                                            << supported.message;
                const Workspace workspace = workspace_for(asked);
                ASSERT_TRUE(decode(asked.problem, asked.options, workspace).ok());
                const bool plain = device.shared_bytes < 100 * 1024 && head_dim > 240 && kv_dtype == DType::kBFloat16;
                for (const Call& launch : runtime().launches()) {
                  ASSERT_EQ(launch.plain(), plain) << "d " << head_dim << ": " << launch.kernel;
                  if (plain) continue;
                  ASSERT_LE(launch.shared_bytes, static_cast<std::size_t>(device.shared_bytes)) << launch.kernel;
                  ASSERT_LE(launch.threads, 1024U) << launch.kernel;
                  ASSERT_EQ(launch.grid, static_cast<unsigned>(device.multiprocessors)) << launch.kernel;
                  ASSERT_TRUE(device.major >= 9 || launch.kernel.find("ArchitectureE80E") != std::string_view::npos)
                      << launch.kernel;
                  kernels.insert(launch.kernel);
                }
              }
            }
          }
        }
      }
    }
  }
  EXPECT_GT(kernels.size(), 40U) << "the sweep takes few variants";
}

/// The scope of the kernel that a call's only launch takes.
cuda::Scope scope_of(const Problem& problem, const Options& options = cuda_options()) {
  const Asked asked{"a call", problem, options};
  const Workspace workspace = workspace_for(asked);
  runtime().begin();
  EXPECT_TRUE(decode(asked.problem, asked.options, workspace).ok());
  EXPECT_EQ(runtime().launches().size(), 1U);
  const std::string_view kernel = runtime().launches().back().kernel;
  for (const cuda::Scope scope : cuda::kScopes) {
    if (kernel.find("ScopeE" + std::to_string(static_cast<int>(scope)) + "E") != std::string_view::npos) return scope;
  }
  ADD_FAILURE() << kernel;
  return cuda::Scope::kAnyCall;
}

/// A causal chunk of so many tokens.
Problem chunk_of(std::int32_t q_tokens, const Shape& shape) {
  Problem problem = problem_of(shape);
  problem.q_tokens = q_tokens;
  problem.q.strides.sequence = problem.o.strides.sequence = q_tokens * problem.q.strides.token;
  problem.scores.causal = true;
  return problem;
}

/// More than 128 packed rows of 16-bit K and V are a wide kernel's, and more than 64 where there are tiles enough, if the build has
/// it, the device has products of warpgroups and the call asks for nothing that it does not do; ALiBi, masks and tree masks of up to 128
/// dims are a variant's that has them.
TEST(CudaHost, R33_WideKernelsServeManyRowsAndNothingElse) {
  using cuda::Scope;
  const auto chunk = [](std::int32_t q_tokens, Shape shape = {}) {
    if (shape.capacity == Shape{}.capacity) shape.capacity = 4096;  // of few tiles
    return chunk_of(q_tokens, shape);
  };
  const auto is_wide = [](const Problem& problem, const Options& options = cuda_options()) {
    return scope_of(problem, options) == Scope::kWideTile;
  };
  to_a_new_device();
  const bool built = !cuda::wide_kernels_for(DType::kBFloat16, 128).empty();
  for (const std::int32_t head_dim : {8, 64, 72, 96, 104, 128}) {
    EXPECT_FALSE(is_wide(chunk(16, {.head_dim = head_dim})));  // 64 rows, of 4 heads a token
    EXPECT_FALSE(is_wide(chunk(17, {.head_dim = head_dim})));  // a step's: 2 x 32 tiles of 68 rows are none for most workers
    EXPECT_FALSE(is_wide(chunk(32, {.batch = 4, .q_heads = 32, .kv_heads = 8, .head_dim = head_dim})));
    EXPECT_EQ(is_wide(chunk(32, {.batch = 32, .head_dim = head_dim, .capacity = 8192})), built);  // 31 tiles a worker
    EXPECT_EQ(is_wide(chunk(33, {.head_dim = head_dim})), built);                                 // 132 rows: no step has them
    EXPECT_EQ(is_wide(chunk(1000, {.head_dim = head_dim, .page_tokens = 16})), built);
    EXPECT_EQ(is_wide(chunk(1000, {.head_dim = head_dim, .token_major = true})), built);
  }
  for (const std::int32_t head_dim : {136, 192, 200, 256}) {
    EXPECT_FALSE(is_wide(chunk(16, {.head_dim = head_dim})));
    EXPECT_EQ(is_wide(chunk(17, {.head_dim = head_dim})), built);  // 68 rows: no step of such dims has them
    EXPECT_EQ(is_wide(chunk(1000, {.head_dim = head_dim, .page_tokens = 16})), built);
    EXPECT_EQ(is_wide(chunk(1000, {.head_dim = head_dim, .token_major = true})), built);
  }
  Problem windowed = chunk(100);
  windowed.scores.window_left = 300, windowed.scores.softcap = 30.0F;
  EXPECT_EQ(is_wide(windowed), built);

  EXPECT_FALSE(is_wide(chunk(100, {.kv_dtype = DType::kFloat8E4M3})));  // the next test's
  for (const std::int32_t page_tokens : {1, 24}) {                      // no whole boxes: row by row
    EXPECT_EQ(is_wide(chunk(100, {.page_tokens = page_tokens})), built) << page_tokens;
  }
  const std::function<void(Scores&)> rules[] = {
      [](Scores& s) { s.alibi_slopes = static_cast<const float*>(address(8)); },
      [](Scores& s) { s.mask = address(8), s.mask_strides = {.sequence = 0, .head = 0, .token = 4096, .dim = 1}; },
      [](Scores& s) { s.tree_mask = static_cast<const std::uint32_t*>(address(8)); }};
  for (const auto& rule : rules) {
    for (const std::int32_t head_dim : {8, 64, 72, 96, 128, 136, 256}) {
      Problem ruled = chunk(100, {.head_dim = head_dim});
      const WorkspaceSize unruled = workspace_size(ruled, cuda_options());
      rule(ruled.scores);
      EXPECT_EQ(scope_of(ruled), built && head_dim <= 128 ? Scope::kWideRuledTile : Scope::kAnyCall) << head_dim;
      EXPECT_GE(unruled.scratch_bytes, workspace_size(ruled, cuda_options()).scratch_bytes) << head_dim;
    }
    Problem of_fp8 = chunk(100, {.kv_dtype = DType::kFloat8E4M3});
    rule(of_fp8.scores);
    EXPECT_EQ(scope_of(of_fp8), Scope::kAnyCall);
    Problem turned = chunk(100);
    turned.scores.scale = -1.0F;
    rule(turned.scores);
    EXPECT_EQ(scope_of(turned), Scope::kAnyCall);
  }
  Problem negative = chunk(100);
  negative.scores.scale = -1.0F;
  EXPECT_FALSE(is_wide(negative));
  Options chunks = cuda_options();
  chunks.policy = Policy::fixed_chunk();
  EXPECT_FALSE(is_wide(chunk(100), chunks));
  for (const FakeDevice& device :
       {FakeDevice{.major = 8}, FakeDevice{.major = 10}, FakeDevice{.major = 9, .shared_bytes = 99 * 1024}}) {
    to_a_new_device(device);
    EXPECT_FALSE(is_wide(chunk(100))) << device.major;
  }
}

/// Many rows of fp8 are a wide kernel's that converts them, of either kind and beside queries of either type: from pages of any size,
/// where they fill the kernel's rows, but not from rows that begin anywhere.
TEST(CudaHost, R33_ManyRowsOfFp8AreConverted) {
  using cuda::Scope;
  to_a_new_device();
  const bool built = !cuda::wide_kernels_for(DType::kFloat16, 128).empty();
  for (const DType kv_dtype : {DType::kFloat8E4M3, DType::kFloat8E5M2}) {
    for (const std::int32_t head_dim : {64, 96, 128, 192, 256}) {
      const bool has_row = head_dim != 96 && head_dim != 192;
      for (const std::int32_t page_tokens : {0, 1, 24, 64}) {
        const Problem problem = chunk_of(100, {.head_dim = head_dim, .kv_dtype = kv_dtype, .page_tokens = page_tokens});
        const Scope scope = scope_of(problem);
        EXPECT_EQ(scope, built && has_row ? Scope::kWideFp8Tile : Scope::kAnyCall) << head_dim << ' ' << page_tokens;
        if (!built || !has_row) continue;
        EXPECT_NE(runtime().launches().back().kernel.find("DTypeE1E"), std::string_view::npos) << "of fp16";
        const auto slots = std::size_t{2} * 132 * 2;
        const auto partial = std::size_t{128} * (static_cast<std::size_t>(head_dim) + 2) * sizeof(float);
        EXPECT_GE(workspace_size(problem, cuda_options()).scratch_bytes, slots * partial) << head_dim;
      }
    }
  }
  const Shape shape{.kv_dtype = DType::kFloat8E4M3};
  EXPECT_EQ(scope_of(chunk_of(16, shape)), Scope::kTensorStep) << "64 rows";
  const auto is_converted = [&](const std::function<void(Problem&, Options&)>& change) {
    Problem problem = chunk_of(100, shape);
    Options options = cuda_options();
    change(problem, options);
    return scope_of(problem, options) == Scope::kWideFp8Tile;
  };
  EXPECT_EQ(is_converted([](Problem& p, Options&) { p.scores.softcap = 30.0F, p.scores.window_left = 300; }), built);
  EXPECT_EQ(is_converted([](Problem& p, Options&) { p.k.strides.token += 16; }), built);
  EXPECT_FALSE(is_converted([](Problem& p, Options&) { p.k.strides.token += 8; }));
  EXPECT_FALSE(is_converted([](Problem& p, Options&) { p.v.data = static_cast<const std::byte*>(p.v.data) + 8; }));
  EXPECT_FALSE(is_converted([](Problem& p, Options&) { p.scores.alibi_slopes = static_cast<const float*>(address(8)); }));
  EXPECT_FALSE(is_converted([](Problem&, Options& o) { o.policy = Policy::fixed_chunk(); }));
}

/// A call of many rows is served by the narrowest wide kernel that holds its dims, whose queries, two tiles of keys and two of values
/// fit the device; its workspace holds the row blocks of whoever may serve calls of these sizes.
TEST(CudaHost, R17_WideKernelsOfEveryDimFitTheDeviceAndTheWorkspace) {
  using cuda::Scope;
  const FakeDevice hopper{.major = 9, .minor = 0, .multiprocessors = 132, .shared_bytes = 227 * 1024};
  to_a_new_device(hopper);
  if (cuda::wide_kernels_for(DType::kBFloat16, 128).empty()) GTEST_SKIP() << "built without wide kernels";
  std::set<std::string_view> kernels;
  for (std::int32_t head_dim = 8; head_dim <= kWidestCudaHead; head_dim += 8) {
    for (const DType dtype : {DType::kBFloat16, DType::kFloat16}) {
      const Problem problem = chunk_of(512, {.q_heads = 32, .head_dim = head_dim, .dtype = dtype, .kv_dtype = dtype});
      const Asked asked{"a chunk", problem, cuda_options()};
      const Workspace workspace = workspace_for(asked);
      runtime().begin();
      ASSERT_TRUE(decode(asked.problem, asked.options, workspace).ok());
      ASSERT_EQ(runtime().launches().size(), 1U);
      const Call launch = runtime().launches().back();
      const std::span<const cuda::KernelEntry> entries = cuda::wide_kernels_for(dtype, head_dim);
      const cuda::KernelEntry* const entry = cuda::find_kernel(entries, cuda::Architecture::kSm90, Scope::kWideTile, 1);
      ASSERT_NE(entry, nullptr);
      const cuda::KernelConfig& config = entry->config;
      EXPECT_NE(launch.kernel.find(name_of(config)), std::string_view::npos) << head_dim << ": " << launch.kernel;
      EXPECT_GE(config.head_dim, head_dim);
      for (const cuda::KernelRow& row : cuda::kWideRows) EXPECT_TRUE(row.head_dim < head_dim || row.head_dim >= config.head_dim);
      EXPECT_LE(launch.shared_bytes, static_cast<std::size_t>(hopper.shared_bytes)) << head_dim;
      const std::int32_t row_bytes = config.stage_row_bytes(config.head_dim);
      EXPECT_GE(launch.shared_bytes, static_cast<std::size_t>((config.q_rows + 4 * config.tile_tokens) * row_bytes)) << head_dim;
      const std::size_t slots = std::size_t{2} * 132 * 2;  // two a worker, and as many for bundles of partials
      const auto partial = static_cast<std::size_t>(config.q_rows * (config.value_dim() + 2)) * sizeof(float);
      EXPECT_GE(workspace_size(problem, cuda_options()).scratch_bytes, slots * partial) << head_dim;
      kernels.insert(launch.kernel);
    }
  }
  EXPECT_EQ(kernels.size(), 10U);
}

/// Values with dims of their own, whatever the call's rows, are a kernel's of few values or of many rows, if the build has it, the device
/// has products of warpgroups and the call asks for nothing that it does not do; else the plain kernel's.
TEST(CudaHost, R33_ValuesWithDimsOfTheirOwnHaveAKernelOfManyRows) {
  const FakeDevice hopper{.major = 9, .minor = 0, .multiprocessors = 132, .shared_bytes = 227 * 1024};
  to_a_new_device(hopper);
  const bool built = !cuda::wide_kernels_for(DType::kBFloat16, 192).empty();
  struct Served {
    bool plain = false;
    std::string kernel;
  };
  const auto serves = [](std::int32_t head_dim, std::int32_t value_dim,
                         const std::function<void(Problem&, Options&)>& change = {}) {
    Asked asked{"own values", problem_of({.head_dim = head_dim}), cuda_options()};
    Problem& p = asked.problem;
    p.value_dim = value_dim;
    p.v.strides = {.sequence = std::int64_t{4096} * 2 * value_dim, .head = std::int64_t{4096} * value_dim, .token = value_dim};
    p.o.strides = {.sequence = std::int64_t{8} * value_dim, .head = value_dim, .token = std::int64_t{8} * value_dim};
    if (change) change(asked.problem, asked.options);
    const Workspace workspace = workspace_for(asked);
    runtime().begin();
    const Status status = decode(asked.problem, asked.options, workspace);
    EXPECT_TRUE(status.ok()) << status.message;
    EXPECT_EQ(runtime().launches().size(), 1U);
    const Call launch = runtime().launches().back();
    EXPECT_LE(launch.shared_bytes, std::size_t{227} * 1024);
    return Served{launch.plain(), std::string(launch.kernel)};
  };
  struct Row {
    std::int32_t head_dim, value_dim;
    std::int32_t width;
    cuda::Scope scope;
  };
  for (const Row& row : {Row{192, 128, 192, cuda::Scope::kFewValuesTile}, Row{160, 64, 192, cuda::Scope::kFewValuesTile},
                         Row{192, 136, 192, cuda::Scope::kWideTile}, Row{128, 192, 192, cuda::Scope::kWideTile},
                         Row{64, 128, 128, cuda::Scope::kWideTile}, Row{96, 64, 96, cuda::Scope::kWideTile},
                         Row{256, 128, 256, cuda::Scope::kWideTile}, Row{16, 8, 64, cuda::Scope::kWideTile}}) {
    const Served served = serves(row.head_dim, row.value_dim);
    EXPECT_NE(served.plain, built) << row.head_dim << ", " << row.value_dim;
    if (!built) continue;
    const auto config = cuda::config_of(cuda::Architecture::kSm90, {DType::kBFloat16, row.width}, 128, row.scope);
    EXPECT_NE(served.kernel.find(name_of(config)), std::string::npos) << row.head_dim << ": " << served.kernel;
  }
  EXPECT_NE(serves(192, 128, [](Problem& p, Options&) { p.scores.softcap = 30.0F, p.scores.window_left = 100; }).plain, built);
  EXPECT_NE(serves(192, 128, [](Problem&, Options& o) { o.policy = Policy::fixed_split(4); }).plain, built);
  EXPECT_TRUE(serves(192, 124).plain);
  EXPECT_TRUE(serves(264, 128).plain);
  EXPECT_TRUE(serves(192, 128, [](Problem& p, Options&) { p.scores.scale = -1.0F; }).plain);
  EXPECT_TRUE(serves(192, 128, [](Problem&, Options& o) { o.fixup = Fixup::kTwoKernels; }).plain);
  EXPECT_TRUE(serves(192, 128, [](Problem&, Options& o) { o.policy = Policy::fixed_chunk(); }).plain);
  for (const FakeDevice& device : {FakeDevice{.major = 8}, FakeDevice{.major = 10}}) {
    to_a_new_device(device);
    EXPECT_TRUE(serves(192, 128).plain) << device.major;
  }
}

/// A call of multi-head latent attention: values are the first 512 of the keys' 576 dims, in the same memory.
Asked latent_call(Shape shape = {}, std::int32_t q_tokens = 1) {
  if (shape.kv_heads == 2) shape.q_heads = 16, shape.kv_heads = 1;
  shape.head_dim = 576;
  Problem problem = problem_of(shape);
  problem.value_dim = 512;
  problem.v = problem.k;
  problem.q_tokens = q_tokens;
  problem.q.strides.sequence = problem.o.strides.sequence = q_tokens * problem.q.strides.token;
  problem.scores.causal = q_tokens > 1;
  return {"a latent call", problem, cuda_options()};
}

/// Whether the latent kernel does whose warpgroups take turns.
bool is_in_turns(const Call& launch) { return launch.kernel.find("ScopeE9E") != std::string_view::npos; }

/// Whether one does whose factors are swapped, for few rows.
bool is_swapped(const Call& launch) {
  return launch.kernel.find("ScopeE11E") != std::string_view::npos || launch.kernel.find("ScopeE12E") != std::string_view::npos;
}

/// Whether one does whose producers convert fp8.
bool converts(const Call& launch) {
  return launch.kernel.find("ScopeE10E") != std::string_view::npos || launch.kernel.find("ScopeE12E") != std::string_view::npos;
}

/// Whether a latent kernel serves the call, by one launch of all workers; else the plain kernel does.
bool is_latent(const Asked& asked) {
  const Workspace workspace = workspace_for(asked);
  runtime().begin();
  const Status status = decode(asked.problem, asked.options, workspace);
  EXPECT_TRUE(status.ok()) << status.message;
  const Call launch = runtime().launches().back();
  const bool latent =
      launch.kernel.find("ScopeE6E") != std::string_view::npos || is_in_turns(launch) || converts(launch) || is_swapped(launch);
  EXPECT_NE(latent, launch.plain()) << launch.kernel;
  if (latent) {
    EXPECT_EQ(runtime().launches().size(), 1U);
    EXPECT_EQ(launch.grid, 132U);
    EXPECT_EQ(launch.threads, is_swapped(launch) ? 256U : 384U);
    EXPECT_LE(launch.shared_bytes, std::size_t{227} * 1024);
    const std::size_t rows = 2 * 64 + (is_swapped(launch) ? 32 : 64);
    EXPECT_GT(launch.shared_bytes, rows * 1152) << "queries and two tiles";
  }
  return latent;
}

/// Latent attention in 16 bits, whatever its rows, is the latent kernel's, if the build has it, the device has products of warpgroups
/// and the call asks for nothing that it does not do.
TEST(CudaHost, R33_LatentKernelsServeValuesInTheKeysMemoryAndNothingElse) {
  static_assert(static_cast<int>(cuda::Scope::kLatentTile) == 6 && static_cast<int>(cuda::Scope::kLatentTurns) == 9 &&
                static_cast<int>(cuda::Scope::kLatentFp8Tile) == 10 && static_cast<int>(cuda::Scope::kLatentSwapped) == 11 &&
                static_cast<int>(cuda::Scope::kLatentFp8Swapped) == 12);
  const FakeDevice hopper{.major = 9, .minor = 0, .multiprocessors = 132, .shared_bytes = 227 * 1024};
  to_a_new_device(hopper);
  const bool built = !cuda::wide_kernels_for(DType::kBFloat16, 576).empty();
  for (const std::int32_t heads : {1, 16, 64, 128}) {
    for (const std::int32_t q_tokens : {1, 2, 4, 100}) {
      for (const std::int32_t page_tokens : {0, 1, 16, 24, 64}) {
        EXPECT_EQ(is_latent(latent_call({.q_heads = heads, .kv_heads = 1, .page_tokens = page_tokens}, q_tokens)), built)
            << heads << ' ' << q_tokens << ' ' << page_tokens;
        if (!built) continue;
        const Call launch = runtime().launches().back();
        const bool boxes = page_tokens % 16 == 0;  // stages in parts come in no other way
        EXPECT_TRUE(boxes || (!is_in_turns(launch) && !is_swapped(launch))) << heads << ' ' << q_tokens << ' ' << page_tokens;
      }
    }
  }
  EXPECT_EQ(is_latent(latent_call({.q_heads = 48, .kv_heads = 3, .token_major = true}, 2)), built);
  const auto changed = [](const std::function<void(Problem&, Options&)>& change) {
    Asked asked = latent_call({}, 2);
    change(asked.problem, asked.options);
    return is_latent(asked);
  };
  EXPECT_EQ(changed([](Problem& p, Options&) { p.scores.window_left = 300, p.scores.softcap = 30.0F; }), built);
  EXPECT_EQ(
      changed([](Problem& p, Options&) { p.total_q_tokens = 2, p.cu_q_tokens = static_cast<const std::int32_t*>(address(7)); }),
      built);
  EXPECT_EQ(changed([](Problem&, Options& o) { o.policy = Policy::fixed_split(4); }), built);

  EXPECT_FALSE(changed([](Problem& p, Options&) { p.v.data = address(3); }));
  EXPECT_FALSE(changed([](Problem& p, Options&) { p.v.strides.token += 8; }));
  EXPECT_FALSE(changed([](Problem& p, Options&) { p.value_dim = 448; }));
  EXPECT_FALSE(changed([](Problem& p, Options&) { p.value_dim = 576; }));
  EXPECT_FALSE(changed([](Problem& p, Options&) { p.head_dim = 568; }));
  EXPECT_FALSE(changed([](Problem& p, Options&) { p.q.strides.token += 4; }));  // no pieces of 16 bytes
  EXPECT_FALSE(changed([](Problem& p, Options&) { p.scores.alibi_slopes = static_cast<const float*>(address(8)); }));
  EXPECT_FALSE(changed([](Problem& p, Options&) { p.scores.mask = address(8), p.scores.mask_strides = {0, 0, 4096, 1}; }));
  EXPECT_FALSE(changed([](Problem& p, Options&) { p.scores.tree_mask = static_cast<const std::uint32_t*>(address(8)); }));
  EXPECT_FALSE(changed([](Problem& p, Options&) { p.scores.scale = -1.0F; }));
  EXPECT_FALSE(changed([](Problem&, Options& o) { o.policy = Policy::fixed_chunk(); }));
  EXPECT_FALSE(changed([](Problem&, Options& o) { o.fixup = Fixup::kTwoKernels; }));
  for (const FakeDevice& device :
       {FakeDevice{.major = 8}, FakeDevice{.major = 10}, FakeDevice{.major = 9, .shared_bytes = 163 * 1024}}) {
    to_a_new_device(device);
    EXPECT_FALSE(is_latent(latent_call())) << device.major;
  }
}

/// fp8 of either kind is converted for the kernel of fp16, whatever the rows, the tiles and the queries' type: from pages of any size,
/// but not from rows that begin anywhere.
TEST(CudaHost, R33_LatentCallsOfFp8AreConverted) {
  to_a_new_device({.major = 9, .minor = 0, .multiprocessors = 132, .shared_bytes = 227 * 1024});
  if (cuda::wide_kernels_for(DType::kBFloat16, 576).empty()) GTEST_SKIP() << "built without";
  for (const DType kv_dtype : {DType::kFloat8E4M3, DType::kFloat8E5M2}) {
    for (const std::int32_t heads : {1, 16, 128}) {
      for (const std::int32_t page_tokens : {0, 1, 24, 64}) {
        const Shape shape{.q_heads = heads, .kv_heads = 1, .kv_dtype = kv_dtype, .page_tokens = page_tokens};
        EXPECT_TRUE(is_latent(latent_call(shape, 2))) << heads << ' ' << page_tokens;
        EXPECT_TRUE(converts(runtime().launches().back())) << heads << ' ' << page_tokens;
        EXPECT_NE(runtime().launches().back().kernel.find("DTypeE1E"), std::string_view::npos) << "of fp16";
      }
    }
  }
  const auto changed = [](const std::function<void(Problem&, Options&)>& change) {
    Asked asked = latent_call({.kv_dtype = DType::kFloat8E4M3}, 2);
    change(asked.problem, asked.options);
    return is_latent(asked);
  };
  EXPECT_TRUE(changed([](Problem& p, Options&) { p.scores.softcap = 30.0F; }));
  EXPECT_FALSE(changed([](Problem& p, Options&) { p.k.strides.token += 8, p.v.strides.token += 8; }));
  EXPECT_FALSE(changed([](Problem& p, Options&) { p.scores.scale = -1.0F; }));
  EXPECT_FALSE(changed([](Problem& p, Options&) { p.v.data = address(3); }));
}

/// A call of up to 32 rows, query heads of a kv head times query tokens, is a decode step with its factors swapped: under `lean`, and
/// without a softcap, which other latent kernels have, in the same workspace.
TEST(CudaHost, R33_LatentCallsOfFewRowsAreSwapped) {
  to_a_new_device({.major = 9, .minor = 0, .multiprocessors = 132, .shared_bytes = 227 * 1024});
  if (cuda::wide_kernels_for(DType::kBFloat16, 576).empty()) GTEST_SKIP() << "built without";
  for (const DType kv_dtype : {DType::kBFloat16, DType::kFloat8E4M3}) {
    const auto rows_of = [kv_dtype](std::int32_t heads, std::int32_t q_tokens,
                                    const std::function<void(Problem&, Options&)>& change) {
      Asked asked = latent_call({.q_heads = heads, .kv_heads = 1, .kv_dtype = kv_dtype}, q_tokens);
      change(asked.problem, asked.options);
      EXPECT_TRUE(is_latent(asked));
      const Call launch = runtime().launches().back();
      if (!is_swapped(launch)) return 0;
      return launch.kernel.find("Li576ELi16E") != std::string_view::npos ? 16 : 32;
    };
    const auto as_it_is = [](Problem&, Options&) {};
    EXPECT_EQ(rows_of(1, 1, as_it_is), 16);
    EXPECT_EQ(rows_of(16, 1, as_it_is), 16);
    EXPECT_EQ(rows_of(8, 2, as_it_is), 16);
    EXPECT_EQ(rows_of(16, 2, as_it_is), 32);
    EXPECT_EQ(rows_of(32, 1, as_it_is), 32);
    EXPECT_EQ(rows_of(33, 1, as_it_is), 0);
    EXPECT_EQ(rows_of(16, 4, as_it_is), 0);
    EXPECT_EQ(rows_of(16, 2, [](Problem& p, Options&) { p.scores.window_left = 300; }), 32);
    EXPECT_EQ(rows_of(16, 1, [](Problem& p, Options&) { p.scores.softcap = 30.0F; }), 0);
    EXPECT_EQ(rows_of(16, 1, [](Problem&, Options& o) { o.policy = Policy::fixed_split(4); }), 0);
    EXPECT_EQ(rows_of(16, 1, [](Problem&, Options& o) { o.policy = Policy::data_parallel(); }), 0);
  }
  const auto size_of = [](float softcap) {
    Asked asked = latent_call({.q_heads = 16, .kv_heads = 1});
    asked.problem.scores.softcap = softcap;
    return workspace_size(asked.problem, asked.options).scratch_bytes;
  };
  EXPECT_EQ(size_of(30.0F), size_of(0.0F));
}

/// Warpgroups take turns at a call of more than one row block and 24 tiles a worker, at its capacity.
TEST(CudaHost, R33_LatentCallsOfManyRowsAndTilesAreMadeInTurns) {
  to_a_new_device({.major = 9, .minor = 0, .multiprocessors = 132, .shared_bytes = 227 * 1024});
  if (cuda::wide_kernels_for(DType::kBFloat16, 576).empty()) GTEST_SKIP() << "built without";
  const auto turns = [](std::int32_t heads, std::int32_t q_tokens, std::int32_t capacity) {
    Asked asked = latent_call({.batch = 64, .q_heads = heads, .kv_heads = 1}, q_tokens);
    asked.problem.kv_capacity = capacity;
    EXPECT_TRUE(is_latent(asked));
    return is_in_turns(runtime().launches().back());
  };
  EXPECT_TRUE(turns(128, 1, 4096));
  EXPECT_TRUE(turns(128, 1, 1600)) << "128 x 25 tiles";
  EXPECT_FALSE(turns(128, 1, 1500)) << "128 x 24 tiles, 132 workers";
  EXPECT_TRUE(turns(16, 8, 4096));
  EXPECT_FALSE(turns(64, 1, 4096)) << "one row block";
  EXPECT_FALSE(turns(16, 4, 4096));
}

/// R17: a latent call's workspace has rows of the values' dims, and is asked for wherever its values lie: sizes decide it.
TEST(CudaHost, R17_LatentCallsHaveAWorkspaceOfTheirOwn) {
  to_a_new_device({.major = 9, .minor = 0, .multiprocessors = 132, .shared_bytes = 227 * 1024});
  const bool built = !cuda::wide_kernels_for(DType::kBFloat16, 576).empty();
  const auto size_of = [](const std::function<void(Problem&, Options&)>& change) {
    Asked asked = latent_call();
    change(asked.problem, asked.options);
    const WorkspaceSize size = workspace_size(asked.problem, asked.options);
    EXPECT_TRUE(size.status.ok()) << size.status.message;
    return size.scratch_bytes;
  };
  constexpr std::size_t kSlots = std::size_t{2} * 132 * 2;  // two a worker, and as many for bundles of partials
  const std::size_t latent = size_of([](Problem&, Options&) {});
  EXPECT_EQ(latent, built ? kSlots * 64 * 514 * 4 : 0U);
  EXPECT_EQ(size_of([](Problem& p, Options&) { p.v.data = address(3); }), latent);
  EXPECT_EQ(size_of([](Problem& p, Options&) { p.q.strides.token += 4; }), latent);
  EXPECT_EQ(size_of([](Problem& p, Options&) { p.value_dim = 500; }), 0U);
  EXPECT_EQ(size_of([](Problem&, Options& o) { o.fixup = Fixup::kTwoKernels; }), 0U);
}

/// Tokens of a tile of the variant that the call takes, as explain_schedule() tells; 0: the call is refused.
int tile_tokens_of(const Problem& problem, const Options& options) {
  const std::size_t bytes = explain_schedule(problem, options, ScheduleFormat::kJson, nullptr, 0);
  std::string text(bytes, ' ');
  static_cast<void>(explain_schedule(problem, options, ScheduleFormat::kJson, text.data(), bytes));
  const std::string key = "\"tile_tokens\":";
  const std::size_t at = text.find(key);
  return at == std::string::npos ? 0 : std::stoi(text.substr(at + key.size()));
}

/// R44: on a device, tiles fix the order of a chunk's sums, so they are the same for one query token, more and whatever rule they
/// have.
TEST(CudaHost, R44_ChunksHaveTheSameTilesWhateverIsAsked) {
  constexpr std::int32_t kLengths[] = {4000};
  std::vector<FakeDevice> devices(std::begin(kDevices), std::end(kDevices));
  for (int kilobytes = 64; kilobytes < 227; ++kilobytes) devices.push_back({.shared_bytes = kilobytes * 1024});
  std::set<int> found;
  for (const FakeDevice& device : devices) {
    to_a_new_device(device);
    for (const std::int32_t head_dim : {64, 80, 128, 256}) {
      for (const DType kv_dtype : {DType::kBFloat16, DType::kFloat8E4M3}) {
        for (const std::int32_t group : {1, 16, 32, 64}) {
          Problem plain = problem_of({.q_heads = 2 * group, .head_dim = head_dim, .kv_dtype = kv_dtype});
          plain.kv_lengths = kLengths;
          Options options = cuda_options();
          options.policy = Policy::fixed_chunk();
          const int tokens = tile_tokens_of(plain, options);
          found.insert(tokens);
          Problem several = plain;
          several.q_tokens = 4, several.scores.causal = true;
          Problem capped = plain;
          capped.scores.softcap = 30.0F;
          for (const Problem& other : {several, capped}) {
            EXPECT_EQ(tile_tokens_of(other, options), tokens)
                << "sm_" << device.major << device.minor << " d " << head_dim << " group " << group;
          }
        }
      }
    }
  }
  EXPECT_GE(found.size(), 4U);  // none, 64, 128, 256
}

/// Dims between the variants' have their decode steps too, filled up by tensor copies; what those cannot take is any call's.
TEST(CudaHost, R06_DecodeStepsOfEveryHeadDimension) {
  to_a_new_device();
  for (std::int32_t head_dim = 8; head_dim <= kWidestCudaHead; head_dim += 8) {
    const bool whole = std::ranges::find(cuda::kHeadDims, head_dim) != std::end(cuda::kHeadDims);
    EXPECT_EQ(scope_of(problem_of({.head_dim = head_dim})), whole ? cuda::Scope::kDecodeStep : cuda::Scope::kTensorStep)
        << head_dim;
    EXPECT_EQ(scope_of(problem_of({.head_dim = head_dim, .token_major = true})), cuda::Scope::kTensorStep) << head_dim;
    const bool whole_pieces = head_dim % 16 == 0;
    EXPECT_EQ(scope_of(problem_of({.head_dim = head_dim, .kv_dtype = DType::kFloat8E4M3, .page_tokens = 16})),
              whole_pieces ? cuda::Scope::kTensorStep : cuda::Scope::kAnyCall)
        << head_dim;
    Problem capped = problem_of({.head_dim = head_dim});
    capped.scores.softcap = 30.0F;
    EXPECT_EQ(scope_of(capped), cuda::Scope::kRuledStep) << head_dim;
  }
}

/// Every rule of scores has a decode step's kernel of up to 64 rows, in fp8 of 16; any call's serve more of them, and chunks.
TEST(CudaHost, R06_DecodeStepsUnderRulesOfScores) {
  const float slopes[32] = {};
  const auto ruled = [&](Problem problem, const auto& rule) {
    rule(problem.scores);
    return scope_of(problem);
  };
  const std::array<void (*)(Scores&, const void*), 6> rules{
      [](Scores& s, const void*) { s.softcap = 30.0F; },
      [](Scores& s, const void* x) { s.alibi_slopes = static_cast<const float*>(x); },
      [](Scores& s, const void* x) { s.mask = x, s.mask_is_boolean = true; },
      [](Scores& s, const void* x) { s.mask = x; },
      [](Scores& s, const void* x) { s.tree_mask = static_cast<const std::uint32_t*>(x); },
      [](Scores& s, const void*) { s.softcap = 30.0F, s.window_left = 100; }};
  for (const auto& rule : rules) {
    const auto apply = [&](Scores& scores) { rule(scores, slopes); };
    for (const std::int32_t heads : {2, 8, 16, 32, 64}) {
      EXPECT_EQ(ruled(problem_of({.q_heads = heads, .kv_heads = 1}), apply), cuda::Scope::kRuledStep) << heads;
      const Shape fp8{.q_heads = heads, .kv_heads = 1, .kv_dtype = DType::kFloat8E4M3};
      EXPECT_EQ(ruled(problem_of(fp8), apply), heads <= 16 ? cuda::Scope::kRuledStep : cuda::Scope::kAnyCall) << heads;
    }
    EXPECT_EQ(ruled(problem_of({.page_tokens = 16}), apply), cuda::Scope::kRuledStep);
    EXPECT_EQ(ruled(problem_of({.head_dim = 80}), apply), cuda::Scope::kRuledStep);
  }
  EXPECT_EQ(scope_of(problem_of({})), cuda::Scope::kDecodeStep);
}

/// Decode steps of more outputs than multiprocessors have two CTAs on each, where two fit; not those whose workers somebody has counted,
/// nor a rank's part of an exchange, nor what such kernels do not serve.
TEST(CudaHost, DecodeStepsOfManyOutputsHaveTwoWorkersOnAMultiprocessor) {
  constexpr unsigned kProcessors = 132;
  const auto launch_of = [](const Problem& problem, const Options& options, const FakeDevice& device = {}) {
    to_a_new_device(device);
    const Asked asked{"", problem, options};
    EXPECT_TRUE(decode(problem, options, workspace_for(asked)).ok());
    return runtime().launches().back();
  };
  const auto outputs = [](std::int64_t batch) { return problem_of({.batch = batch, .q_heads = 8, .kv_heads = 2}); };
  const Options any = cuda_options();
  EXPECT_EQ(scope_of(outputs(79)), cuda::Scope::kDecodeStep) << "158 outputs, 1.197 a multiprocessor";
  EXPECT_EQ(scope_of(outputs(80)), cuda::Scope::kPairedStep);
  EXPECT_EQ(scope_of(problem_of({.batch = 80, .token_major = true})), cuda::Scope::kPairedTensorStep);
  EXPECT_EQ(scope_of(problem_of({.batch = 80, .page_tokens = 16})), cuda::Scope::kPairedTensorStep);
  EXPECT_EQ(scope_of(problem_of({.batch = 80, .page_tokens = 64})), cuda::Scope::kPairedStep);
  EXPECT_EQ(scope_of(problem_of({.batch = 80, .head_dim = 80})), cuda::Scope::kPairedTensorStep);
  EXPECT_EQ(scope_of(problem_of({.batch = 80, .head_dim = 256})), cuda::Scope::kDecodeStep) << "no such row";
  EXPECT_EQ(scope_of(problem_of({.batch = 80, .q_heads = 32})), cuda::Scope::kDecodeStep) << "16 rows";
  Problem capped = outputs(80);
  capped.scores.softcap = 30.0F;
  EXPECT_EQ(scope_of(capped), cuda::Scope::kRuledStep);

  const Call paired = launch_of(outputs(200), any);
  EXPECT_EQ(paired.grid, 2 * kProcessors);
  EXPECT_LE(2 * (paired.shared_bytes + 1024), 228U * 1024);
  Options counted = any;
  counted.workers = 2 * static_cast<std::int32_t>(kProcessors);
  const Call alone = launch_of(outputs(200), counted);
  EXPECT_EQ(alone.grid, 2 * kProcessors);
  EXPECT_GT(alone.threads, paired.threads);
  Options exchanging = any;
  exchanging.exchange = &alone_in_an_exchange();
  EXPECT_EQ(launch_of(outputs(200), exchanging).grid, kProcessors);
  for (const FakeDevice& device : kDevices) {
    const Call call = launch_of(outputs(400), any, device);
    const bool two = device.major >= 9 && device.shared_bytes >= 200 * 1024;
    EXPECT_EQ(call.grid, static_cast<unsigned>(device.multiprocessors) * (two ? 2 : 1)) << device.major << device.minor;
  }
}

/// Who builds a line: a warp up to 32 sequences, and up to 128 where outputs are no more than the workers, of which there are twice as many
/// where outputs are more than multiprocessors.
TEST(CudaHost, R04_WarpsBuildShortLinesAndLongerOnesThatMayBeEven) {
  to_a_new_device({.multiprocessors = 132});
  struct Row {
    std::int64_t batch;
    std::int32_t kv_heads;
    bool short_line;
    bool may_be_even;
  };
  for (const Row& row : {Row{1, 8, true, true},
                         {16, 8, true, true},
                         {32, 8, true, true},
                         {33, 8, true, true},
                         {34, 8, false, false},
                         {33, 4, true, true},
                         {34, 4, false, false},
                         {128, 1, true, true},
                         {129, 1, false, false}}) {
    const Asked asked{"", problem_of({.batch = row.batch, .q_heads = 4 * row.kv_heads, .kv_heads = row.kv_heads}), cuda_options()};
    const Workspace workspace = workspace_for(asked);
    runtime().begin();
    ASSERT_TRUE(decode(asked.problem, asked.options, workspace).ok());
    EXPECT_EQ(runtime().launches().back().short_line, row.short_line) << row.batch << " x " << row.kv_heads;
    EXPECT_EQ(runtime().launches().back().may_be_even, row.may_be_even) << row.batch << " x " << row.kv_heads;
  }
}

}  // namespace
}  // namespace lean::cuda_host
