// The benchmark's matrix for the CPU: which problems are measured, declared once and run whole. Tokens are not fixed but
// follow from the K/V bytes asked for, which depend on the machine's last-level cache.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cli/problem_spec.hpp"

namespace lean::cli {

enum class Pattern : std::int32_t {
  kUniform,
  kLinear,   // lengths 1, 2, 3 .. times the shortest
  kZipf,     // the longest over 1, 2, 3 ..
  kOneLong,  // one request has half of all tokens
  kTrace,    // conversation requests (trace.hpp)
};

struct MatrixRow {
  Pattern pattern = Pattern::kUniform;
  DType dtype = DType::kBFloat16;
  std::int32_t batch = 1;  // kTrace: as many as the bytes ask for
  std::int32_t kv_heads = 1;
  std::int32_t group = 1;  // query heads that share a kv head
};

/// Rows of one dtype stand together.
[[nodiscard]] std::vector<MatrixRow> cpu_matrix();

/// "uniform b4 h8 g4 d128 bf16 bhsd n_q1": the same on every machine.
[[nodiscard]] std::string id_of(const MatrixRow& row);

/// The row's problem with at least `kv_bytes` of K and V.
[[nodiscard]] ProblemSpec spec_of(const MatrixRow& row, std::int64_t kv_bytes);

}  // namespace lean::cli
