// Calls to ask of the CUDA backend on the fake runtime, and devices to ask them of.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <vector>

#include "cuda_host/fake_runtime.hpp"
#include "lean/lean.hpp"

namespace lean::cuda_host {

/// Where nothing lies: host code looks at pointers, never behind them.
inline void* address(std::uintptr_t place) { return reinterpret_cast<void*>(place << 36); }

struct Shape {
  std::int64_t batch = 1;
  std::int32_t q_heads = 8;
  std::int32_t kv_heads = 2;
  std::int32_t head_dim = 128;
  std::int32_t capacity = 1 << 16;  // of more tiles than there are workers
  DType dtype = DType::kBFloat16;
  DType kv_dtype = DType::kBFloat16;
  bool token_major = false;  // [token][head][dim], else [head][token][dim]
  std::int32_t page_tokens = 0;
};

/// Lays o's elements apart after sizes, or the stride of its dims, were changed.
inline void lay_out_outputs(Problem& p) {
  const std::int64_t row = (p.value_dim != 0 ? p.value_dim : p.head_dim) * p.o.strides.dim;
  p.o.strides = {.sequence = p.q_tokens * p.q_heads * row, .head = row, .token = p.q_heads * row, .dim = p.o.strides.dim};
}

inline Problem problem_of(const Shape& s) {
  Problem p{.batch = s.batch, .q_heads = s.q_heads, .kv_heads = s.kv_heads, .head_dim = s.head_dim, .kv_capacity = s.capacity};
  const std::int64_t d = s.head_dim;
  const std::int64_t tokens = s.page_tokens > 0 ? s.page_tokens : s.capacity;
  p.q = {.data = address(1), .dtype = s.dtype, .strides = {.sequence = s.q_heads * d, .head = d, .token = s.q_heads * d}};
  p.k = {.data = address(2), .dtype = s.kv_dtype};
  p.k.strides = s.token_major ? Strides{.sequence = s.kv_heads * tokens * d, .head = d, .token = s.kv_heads * d}
                              : Strides{.sequence = s.kv_heads * tokens * d, .head = tokens * d, .token = d};
  p.v = p.k;
  p.v.data = address(3);
  p.o = {.data = address(4), .dtype = s.dtype, .strides = p.q.strides};
  p.kv_lengths = static_cast<const std::int32_t*>(address(5));
  if (s.page_tokens > 0) {
    const std::int64_t pages = (s.capacity + s.page_tokens - 1) / s.page_tokens;
    p.pages = {.page_tokens = s.page_tokens,
               .page_count = s.batch * pages,
               .block_table = static_cast<const std::int32_t*>(address(6)),
               .block_table_stride = pages};
  }
  return p;
}

struct Asked {
  const char* name;
  Problem problem;
  Options options;
};

inline Options cuda_options() { return {.backend = Backend::kCuda}; }

/// Calls that between them take every launch the backend makes.
inline std::vector<Asked> asked_calls() {
  std::vector<Asked> calls;
  const auto add = [&](const char* name, const Shape& shape, const std::function<void(Problem&, Options&)>& change) {
    calls.push_back({name, problem_of(shape), cuda_options()});
    if (change) change(calls.back().problem, calls.back().options);
  };
  add("a decode step", {}, nullptr);
  add("rows with gaps", {.token_major = true}, nullptr);
  add("fp8, short pages", {.kv_dtype = DType::kFloat8E4M3, .page_tokens = 16}, nullptr);
  add("a head dimension between variants", {.head_dim = 80}, nullptr);
  add("many sequences", {.batch = 300}, nullptr);
  add("two kernels", {}, [](Problem&, Options& o) { o.fixup = Fixup::kTwoKernels; });
  add("the host block", {}, [](Problem&, Options& o) { o.fixup = Fixup::kHostBlock; });
  add("chunks", {}, [](Problem&, Options& o) { o.determinism = Determinism::kBatchInvariant, o.policy = Policy::fixed_chunk(); });
  add("stream order", {}, [](Problem&, Options& o) { o.dependent_launch = false; });
  add("a checked call", {}, [](Problem&, Options& o) { o.check_workspace = true; });
  add("prefill and decode", {.batch = 3}, [](Problem& p, Options&) {
    p.q_tokens = 100, p.total_q_tokens = 150, p.scores.causal = true;
    p.cu_q_tokens = static_cast<const std::int32_t*>(address(7));
  });
  add("the plain kernel", {.head_dim = 59}, nullptr);
  add("new tokens, turned", {}, [](Problem& p, Options&) {
    p.append.k = {.data = address(8), .dtype = p.q.dtype, .strides = {.sequence = 256, .head = 128, .token = 256}};
    p.append.v = p.append.k;
    p.append.v.data = address(9);
    p.append.rotary_cos = static_cast<const float*>(address(10));
    p.append.rotary_sin = static_cast<const float*>(address(11));
    p.append.rotary_dim = 64;
  });
  return calls;
}

inline Workspace workspace_for(const Asked& asked) {
  const WorkspaceSize size = workspace_size(asked.problem, asked.options);
  EXPECT_TRUE(size.status.ok()) << asked.name << ": " << size.status.message;
  return {.state = address(12), .state_bytes = size.state_bytes, .scratch = address(13), .scratch_bytes = size.scratch_bytes};
}

inline constexpr FakeDevice kDevices[] = {
    {.major = 9, .minor = 0, .multiprocessors = 132, .shared_bytes = 227 * 1024},
    {.major = 8, .minor = 0, .multiprocessors = 108, .shared_bytes = 163 * 1024},
    {.major = 8, .minor = 9, .multiprocessors = 142, .shared_bytes = 99 * 1024},
    {.major = 10, .minor = 0, .multiprocessors = 148, .shared_bytes = 227 * 1024},
    {.major = 12, .minor = 0, .multiprocessors = 170, .shared_bytes = 99 * 1024},
};

/// A device that the backend has not seen: it keeps what it learns of one.
inline void to_a_new_device(const FakeDevice& device = {}) {
  static std::size_t used = 0;  // the library keeps what it asked of an ordinal, whatever a test has done to the runtime since
  runtime().begin();
  std::vector<FakeDevice>& devices = runtime().devices;
  used = std::max(used, devices.size());
  devices.resize(used + 1);
  devices[used] = device;
  runtime().ordinal = static_cast<int>(used++);
}

}  // namespace lean::cuda_host
