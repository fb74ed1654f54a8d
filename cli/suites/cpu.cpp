// The rows that say what a CPU does, whichever it is: tokens follow from the bytes of K and V asked for, which depend on the
// machine's last-level cache. Rows of one type stand together.

#include <fmt/format.h>

#include "base/int_math.hpp"
#include "cli/suites/declarations.hpp"
#include "cli/trace.hpp"

namespace lean::cli::suites {
namespace {

enum class Pattern : std::int32_t {
  kUniform,
  kLinear,   // lengths 1, 2, 3 .. times the shortest
  kZipf,     // the longest over 1, 2, 3 ..
  kOneLong,  // one request has half of all tokens
  kTrace,    // conversation requests (trace.hpp)
};

struct CpuRow {
  Pattern pattern = Pattern::kUniform;
  DType dtype = DType::kBFloat16;
  std::int32_t batch = 1;  // kTrace: as many as the bytes ask for
  std::int32_t kv_heads = 1;
  std::int32_t group = 1;  // query heads that share a kv head
};

constexpr std::int32_t kHeadDim = 128;
constexpr DType kDTypes[] = {DType::kBFloat16, DType::kFloat16, DType::kFloat32};
constexpr std::int32_t kGroups[] = {1, 4, 8};  // MHA, GQA 4, GQA 8

struct Outputs {
  std::int32_t batch;
  std::int32_t kv_heads;
};

/// B x Hkv from 1 to 256.
constexpr Outputs kUniform[] = {{1, 1}, {1, 2}, {1, 4}, {1, 8}, {2, 8}, {4, 8}, {8, 8}, {16, 8}, {32, 8}};

struct Ragged {
  Pattern pattern;
  Outputs outputs;
};

constexpr Ragged kRagged[] = {
    {Pattern::kLinear, {32, 8}}, {Pattern::kZipf, {128, 8}}, {Pattern::kOneLong, {64, 8}}, {Pattern::kTrace, {0, 8}}};

const char* word_of(Pattern pattern) {
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

std::vector<std::int32_t> lengths_of(const CpuRow& row, std::int64_t tokens) {
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

/// "uniform b4 h8 g4 d128 bf16 bhsd n_q1": the same on every machine.
std::string id_of(const CpuRow& row) {
  const std::string batch = row.pattern == Pattern::kTrace ? "" : fmt::format(" b{}", row.batch);
  return fmt::format("{}{} h{} g{} d{} {} {} n_q1", word_of(row.pattern), batch, row.kv_heads, row.group, kHeadDim,
                     name_of(row.dtype), name_of(layout_of(row.pattern)));
}

/// With at least `kv_bytes` of K and V.
ProblemSpec spec_of(const CpuRow& row, std::int64_t kv_bytes) {
  const std::int64_t token_bytes = 2 * std::int64_t{row.kv_heads} * kHeadDim * bytes_of(row.dtype);
  return {.kv_lens = lengths_of(row, ceil_div(kv_bytes, token_bytes)),
          .q_heads = row.kv_heads * row.group,
          .kv_heads = row.kv_heads,
          .head_dim = kHeadDim,
          .dtype = row.dtype,
          .layout = layout_of(row.pattern)};
}

}  // namespace

void add_cpu(Matrix& matrix, std::int64_t kv_bytes) {
  matrix.begin(Suite::kCpu);
  const auto add = [&](const CpuRow& row) { matrix.add_as(id_of(row), spec_of(row, kv_bytes)); };
  for (const DType dtype : kDTypes) {
    for (const std::int32_t group : kGroups) {
      for (const Outputs& o : kUniform) add({Pattern::kUniform, dtype, o.batch, o.kv_heads, group});
      for (const Ragged& r : kRagged) add({r.pattern, dtype, r.outputs.batch, r.outputs.kv_heads, group});
    }
  }
}

}  // namespace lean::cli::suites
