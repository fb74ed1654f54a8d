#include "cli/problem_spec.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "base/int_math.hpp"
#include "cli/bad_argument.hpp"
#include "explain/words.hpp"
#include "lean/dtypes.hpp"

namespace lean::cli {

std::int64_t ProblemSpec::kv_tokens() const { return std::accumulate(kv_lens.begin(), kv_lens.end(), std::int64_t{0}); }

std::int32_t ProblemSpec::longest_kv_tokens() const {
  return kv_lens.empty() ? 0 : *std::max_element(kv_lens.begin(), kv_lens.end());
}

std::int64_t ProblemSpec::pages() const {
  std::int64_t pages = 0;
  for (const std::int32_t tokens : kv_lens) pages += ceil_div(tokens, page_tokens);
  return pages;
}

std::int64_t ProblemSpec::stored_elements() const {
  std::int64_t tokens = packed() ? kv_tokens() : batch() * longest_kv_tokens();
  if (page_tokens > 0) tokens = pages() * page_tokens;
  return tokens * kv_heads * std::max(head_dim, dims_of_value());
}

std::int64_t ProblemSpec::query_elements() const { return batch() * q_tokens * q_heads * head_dim; }
std::int64_t ProblemSpec::output_elements() const { return batch() * q_tokens * q_heads * dims_of_value(); }

std::int64_t ProblemSpec::kv_bytes() const {
  std::int64_t seen = 0;
  for (const std::int32_t tokens : kv_lens) {
    const KeySpan span = keys_seen(reach(), tokens, q_tokens, 0, q_tokens - 1);
    seen += span.end - span.begin;
  }
  const std::int64_t dims = head_dim + (values_in_keys ? 0 : dims_of_value());
  return seen * kv_heads * dims * bytes_of(kv_type());
}

std::int64_t ProblemSpec::products() const {
  std::int64_t pairs = 0;  // of a query token and a key it sees
  for (const std::int32_t tokens : kv_lens) {
    for (std::int32_t i = 0; i < q_tokens; ++i) {
      const KeySpan span = keys_seen(reach(), tokens, q_tokens, i, i);
      pairs += span.end - span.begin;
    }
  }
  return pairs * q_heads * (head_dim + dims_of_value());
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

const char* name_of(DType dtype) { return traits_of(dtype).short_name; }

Layout natural_layout(const std::vector<std::int32_t>& kv_lens) {
  const bool uniform = std::adjacent_find(kv_lens.begin(), kv_lens.end(), std::not_equal_to<>()) == kv_lens.end();
  return uniform ? Layout::kBhsd : Layout::kHsd;
}

std::string describe(const ProblemSpec& spec) {
  using explain::words::counted;
  using explain::words::grouped;
  std::string tokens = "0";
  if (!spec.kv_lens.empty()) {
    const auto [shortest, longest] = std::minmax_element(spec.kv_lens.begin(), spec.kv_lens.end());
    tokens = grouped(*shortest);
    if (*shortest != *longest) tokens += " to " + grouped(*longest);
  }
  std::string text =
      fmt::format("{} of {} tokens ({} in all), {}/{} heads of {}, {} {}", counted(spec.batch(), "request"), tokens,
                  grouped(spec.kv_tokens()), spec.q_heads, spec.kv_heads, spec.head_dim, name_of(spec.dtype), name_of(spec.layout));
  if (spec.value_dim != 0) text += fmt::format(", values of {}{}", spec.value_dim, spec.values_in_keys ? " in the keys" : "");
  if (spec.kv_dtype) text += fmt::format(", K and V {}", name_of(*spec.kv_dtype));
  if (spec.page_tokens > 0) text += fmt::format(", pages of {}", grouped(spec.page_tokens));
  if (spec.window_left >= 0) text += fmt::format(", {} to the left", grouped(spec.window_left));
  if (spec.window_right >= 0) text += fmt::format(", {} to the right", grouped(spec.window_right));
  if (spec.softcap > 0.0F) text += fmt::format(", softcap {:g}", spec.softcap);
  text += std::string(spec.alibi ? ", ALiBi" : "") + (spec.sinks ? ", sinks" : "");
  return text + fmt::format(", {:.1f} MB of K and V", static_cast<double>(spec.kv_bytes()) / 1e6);
}

namespace {

/// Of K, or of V: rows of so many dims.
Strides kv_strides(const ProblemSpec& spec, std::int64_t d) {
  const std::int64_t heads = spec.kv_heads;
  const std::int64_t capacity = spec.page_tokens > 0 ? spec.page_tokens : spec.longest_kv_tokens();
  switch (spec.layout) {
    case Layout::kBhsd: return {.sequence = heads * capacity * d, .head = capacity * d, .token = d};
    case Layout::kBshd: return {.sequence = capacity * heads * d, .head = d, .token = heads * d};
    case Layout::kHsd: return {.head = spec.kv_tokens() * d, .token = d};
    case Layout::kShd: return {.head = d, .token = heads * d};
  }
  return {};
}

std::vector<std::int32_t> cumulative(const std::vector<std::int32_t>& lengths) {
  const std::int64_t total = std::accumulate(lengths.begin(), lengths.end(), std::int64_t{0});
  if (total > INT32_MAX) throw BadArgument("--lens", std::to_string(total), "up to 2147483647 tokens in all where they are packed");
  std::vector<std::int32_t> sums{0};
  for (const std::int32_t tokens : lengths) sums.push_back(sums.back() + tokens);
  return sums;
}

}  // namespace

ProblemShape::ProblemShape(const ProblemSpec& spec) : lengths_(spec.packed() ? cumulative(spec.kv_lens) : spec.kv_lens) {
  const auto query_strides = [&](std::int64_t d) {
    return Strides{.sequence = std::int64_t{spec.q_tokens} * spec.q_heads * d, .head = d, .token = spec.q_heads * d};
  };
  problem_ = {.batch = spec.batch(), .q_heads = spec.q_heads, .kv_heads = spec.kv_heads, .head_dim = spec.head_dim};
  problem_.value_dim = spec.value_dim;
  problem_.q = {.dtype = spec.dtype, .strides = query_strides(spec.head_dim)};
  problem_.o = {.dtype = spec.dtype, .strides = query_strides(spec.dims_of_value())};
  problem_.k = {.dtype = spec.kv_type(), .strides = kv_strides(spec, spec.head_dim)};
  problem_.v = {.dtype = spec.kv_type(), .strides = kv_strides(spec, spec.values_in_keys ? spec.head_dim : spec.dims_of_value())};
  problem_.lse = {.sequence_stride = std::int64_t{spec.q_tokens} * spec.q_heads, .head_stride = 1, .token_stride = spec.q_heads};
  problem_.q_tokens = spec.q_tokens;
  problem_.kv_capacity = spec.longest_kv_tokens();
  problem_.scores.causal = spec.causal;
  problem_.scores.window_left = spec.window_left;
  problem_.scores.window_right = spec.window_right;
  problem_.scores.softcap = spec.softcap;
  if (spec.page_tokens > 0) make_pages(spec);
  if (spec.sinks) sinks_.assign(static_cast<std::size_t>(spec.q_heads), 0.0F);
  for (std::int32_t h = 0; spec.alibi && h < spec.q_heads; ++h) {
    alibi_slopes_.push_back(std::exp2(-8.0F * static_cast<float>(h + 1) / static_cast<float>(spec.q_heads)));
  }
  problem_.scores.sinks = spec.sinks ? sinks_.data() : nullptr;
  problem_.scores.alibi_slopes = spec.alibi ? alibi_slopes_.data() : nullptr;
  if (spec.packed()) {
    problem_.cu_kv_tokens = lengths_.data();
    problem_.total_kv_tokens = spec.kv_tokens();
  } else {
    problem_.kv_lengths = lengths_.data();
  }
}

/// Pages are dealt out as a server does that lets all sequences grow at the same time: one to each in turn.
void ProblemShape::make_pages(const ProblemSpec& spec) {
  const std::int64_t columns = std::max<std::int64_t>(1, ceil_div(spec.longest_kv_tokens(), spec.page_tokens));
  block_table_.assign(static_cast<std::size_t>(spec.batch() * columns), -1);
  std::int32_t next = 0;
  for (std::int64_t page = 0; page < columns; ++page) {
    for (std::int64_t b = 0; b < spec.batch(); ++b) {
      if (page * spec.page_tokens < spec.kv_lens[static_cast<std::size_t>(b)]) {
        block_table_[static_cast<std::size_t>(b * columns + page)] = next++;
      }
    }
  }
  problem_.pages = {.page_tokens = spec.page_tokens,
                    .page_count = std::max<std::int64_t>(1, spec.pages()),
                    .block_table = block_table_.data(),
                    .block_table_stride = columns};
}

}  // namespace lean::cli
