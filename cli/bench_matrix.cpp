#include "cli/bench_matrix.hpp"

#include <fmt/format.h>

#include "base/int_math.hpp"
#include "cli/trace.hpp"

namespace lean::cli {
namespace {

constexpr std::int32_t kHeadDim = 128;
constexpr DType kDTypes[] = {DType::kBFloat16, DType::kFloat16, DType::kFloat32};
constexpr std::int32_t kGroups[] = {1, 4, 8};  // MHA, GQA 4, GQA 8

struct Heads {
  std::int32_t batch;
  std::int32_t kv_heads;
};

/// B x Hkv from 1 to 256.
constexpr Heads kUniform[] = {{1, 1}, {1, 2}, {1, 4}, {1, 8}, {2, 8}, {4, 8}, {8, 8}, {16, 8}, {32, 8}};

struct Ragged {
  Pattern pattern;
  Heads heads;
};

constexpr Ragged kRagged[] = {
    {Pattern::kLinear, {32, 8}}, {Pattern::kZipf, {128, 8}}, {Pattern::kOneLong, {64, 8}}, {Pattern::kTrace, {0, 8}}};

const char* name_of(Pattern pattern) {
  switch (pattern) {
    case Pattern::kUniform: return "uniform";
    case Pattern::kLinear: return "linear";
    case Pattern::kZipf: return "zipf";
    case Pattern::kOneLong: return "one-long";
    case Pattern::kTrace: return "trace";
  }
  return "unknown";
}

/// Lengths in the proportion of `weights`, which add up to about `tokens`, each at least 1.
std::vector<std::int32_t> in_proportion(const std::vector<double>& weights, std::int64_t tokens) {
  double sum = 0.0;
  for (const double w : weights) sum += w;
  std::vector<std::int32_t> lengths;
  for (const double w : weights) lengths.push_back(1 + static_cast<std::int32_t>(w / sum * static_cast<double>(tokens)));
  return lengths;
}

std::vector<std::int32_t> trace_draw(std::int64_t tokens) {
  std::vector<std::int32_t> lengths;
  for (std::int64_t sum = 0; sum < tokens;) {
    for (const std::int32_t n : conv32_lengths()) {
      lengths.push_back(n);
      sum += n;
    }
  }
  return lengths;
}

std::vector<std::int32_t> lengths_of(const MatrixRow& row, std::int64_t tokens) {
  std::vector<double> weights(static_cast<std::size_t>(row.batch), 1.0);
  switch (row.pattern) {
    case Pattern::kUniform:
      return std::vector<std::int32_t>(weights.size(), static_cast<std::int32_t>(ceil_div(tokens, row.batch)));
    case Pattern::kTrace: return trace_draw(tokens);
    case Pattern::kLinear:
      for (std::size_t i = 0; i < weights.size(); ++i) weights[i] = static_cast<double>(i + 1);
      break;
    case Pattern::kZipf:
      for (std::size_t i = 0; i < weights.size(); ++i) weights[i] = 1.0 / static_cast<double>(i + 1);
      break;
    case Pattern::kOneLong: weights[0] = static_cast<double>(row.batch - 1); break;
  }
  return in_proportion(weights, tokens);
}

Layout layout_of(Pattern pattern) { return pattern == Pattern::kUniform ? Layout::kBhsd : Layout::kHsd; }

}  // namespace

std::vector<MatrixRow> cpu_matrix() {
  std::vector<MatrixRow> rows;
  for (const DType dtype : kDTypes) {
    for (const std::int32_t group : kGroups) {
      for (const Heads& h : kUniform) rows.push_back({Pattern::kUniform, dtype, h.batch, h.kv_heads, group});
      for (const Ragged& r : kRagged) rows.push_back({r.pattern, dtype, r.heads.batch, r.heads.kv_heads, group});
    }
  }
  return rows;
}

std::string id_of(const MatrixRow& row) {
  const std::string batch = row.pattern == Pattern::kTrace ? "" : fmt::format(" b{}", row.batch);
  return fmt::format("{}{} h{} g{} d{} {} {} n_q1", name_of(row.pattern), batch, row.kv_heads, row.group, kHeadDim,
                     name_of(row.dtype), name_of(layout_of(row.pattern)));
}

ProblemSpec spec_of(const MatrixRow& row, std::int64_t kv_bytes) {
  const std::int64_t token_bytes = 2 * std::int64_t{row.kv_heads} * kHeadDim * bytes_of(row.dtype);
  return {.kv_lens = lengths_of(row, ceil_div(kv_bytes, token_bytes)),
          .q_heads = row.kv_heads * row.group,
          .kv_heads = row.kv_heads,
          .head_dim = kHeadDim,
          .dtype = row.dtype,
          .layout = layout_of(row.pattern)};
}

}  // namespace lean::cli
