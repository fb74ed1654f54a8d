#include "cli/problem_spec.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>

#include "base/int_math.hpp"
#include "schedule/explain_format.hpp"

namespace lean::cli {

std::int64_t ProblemSpec::kv_tokens() const { return std::accumulate(kv_lens.begin(), kv_lens.end(), std::int64_t{0}); }

std::int32_t ProblemSpec::longest_kv_tokens() const {
  return kv_lens.empty() ? 0 : *std::max_element(kv_lens.begin(), kv_lens.end());
}

std::int64_t ProblemSpec::stored_elements() const {
  const std::int64_t tokens = packed() ? kv_tokens() : batch() * longest_kv_tokens();
  return tokens * kv_heads * head_dim;
}

std::int64_t ProblemSpec::query_elements() const { return batch() * q_tokens * q_heads * head_dim; }

std::int64_t ProblemSpec::kv_bytes() const { return 2 * kv_tokens() * kv_heads * head_dim * bytes_of(dtype); }

std::int64_t ProblemSpec::products() const {
  std::int64_t pairs = 0;  // of a query token and a key it sees
  for (const std::int32_t tokens : kv_lens) {
    for (std::int32_t i = 1; i <= q_tokens; ++i) pairs += causal ? max_of(0, std::int64_t{tokens} - q_tokens + i) : tokens;
  }
  return 2 * pairs * q_heads * head_dim;
}

const char* name_of(Layout layout) {
  switch (layout) {
    case Layout::kBhsd: return "bhsd";
    case Layout::kBshd: return "bshd";
    case Layout::kHsd: return "hsd";
    case Layout::kShd: return "shd";
  }
  return "unknown";
}

const char* name_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat32: return "fp32";
    case DType::kFloat16: return "fp16";
    case DType::kBFloat16: return "bf16";
    case DType::kFloat8E4M3: return "fp8_e4m3";
    case DType::kFloat8E5M2: return "fp8_e5m2";
  }
  return "unknown";
}

Layout natural_layout(const std::vector<std::int32_t>& kv_lens) {
  const bool uniform = std::adjacent_find(kv_lens.begin(), kv_lens.end(), std::not_equal_to<>()) == kv_lens.end();
  return uniform ? Layout::kBhsd : Layout::kHsd;
}

std::string describe(const ProblemSpec& spec) {
  using schedule::format::counted;
  using schedule::format::grouped;
  std::string tokens = "0";
  if (!spec.kv_lens.empty()) {
    const auto [shortest, longest] = std::minmax_element(spec.kv_lens.begin(), spec.kv_lens.end());
    tokens = grouped(*shortest);
    if (*shortest != *longest) tokens += " to " + grouped(*longest);
  }
  return fmt::format("{} of {} tokens ({} in all), {}/{} heads of {}, {} {}, {:.1f} MB of K and V",
                     counted(spec.batch(), "request"), tokens, grouped(spec.kv_tokens()), spec.q_heads, spec.kv_heads,
                     spec.head_dim, name_of(spec.dtype), name_of(spec.layout), static_cast<double>(spec.kv_bytes()) / 1e6);
}

namespace {

Strides kv_strides(const ProblemSpec& spec) {
  const std::int64_t d = spec.head_dim;
  const std::int64_t heads = spec.kv_heads;
  const std::int64_t capacity = spec.longest_kv_tokens();
  switch (spec.layout) {
    case Layout::kBhsd: return {.sequence = heads * capacity * d, .head = capacity * d, .token = d};
    case Layout::kBshd: return {.sequence = capacity * heads * d, .head = d, .token = heads * d};
    case Layout::kHsd: return {.head = spec.kv_tokens() * d, .token = d};
    case Layout::kShd: return {.head = d, .token = heads * d};
  }
  return {};
}

std::vector<std::int32_t> cumulative(const std::vector<std::int32_t>& lengths) {
  std::vector<std::int32_t> sums{0};
  for (const std::int32_t tokens : lengths) sums.push_back(sums.back() + tokens);
  return sums;
}

}  // namespace

ProblemShape::ProblemShape(const ProblemSpec& spec) : lengths_(spec.packed() ? cumulative(spec.kv_lens) : spec.kv_lens) {
  const std::int64_t d = spec.head_dim;
  const Strides query{.sequence = spec.q_tokens * spec.q_heads * d, .head = d, .token = spec.q_heads * d};
  problem_ = {.batch = spec.batch(), .q_heads = spec.q_heads, .kv_heads = spec.kv_heads, .head_dim = spec.head_dim};
  problem_.q = {.dtype = spec.dtype, .strides = query};
  problem_.o = {.dtype = spec.dtype, .strides = query};
  problem_.k = {.dtype = spec.dtype, .strides = kv_strides(spec)};
  problem_.v = problem_.k;
  problem_.lse = {.sequence_stride = std::int64_t{spec.q_tokens} * spec.q_heads, .head_stride = 1, .token_stride = spec.q_heads};
  problem_.q_tokens = spec.q_tokens;
  problem_.kv_capacity = spec.longest_kv_tokens();
  problem_.scores.causal = spec.causal;
  if (spec.packed()) {
    problem_.cu_kv_tokens = lengths_.data();
    problem_.total_kv_tokens = spec.kv_tokens();
  } else {
    problem_.kv_lengths = lengths_.data();
  }
}

}  // namespace lean::cli
