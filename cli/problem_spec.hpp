// ProblemSpec: a decode problem by its sizes, as every command describes it. ProblemShape gives it strides and length
// arrays: a Problem without data, which is all that a schedule needs.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "lean/problem.hpp"

namespace lean::cli {

/// Axes of K and V from the slowest to the fastest: b sequence, h head, s token, d dim. Without b the tokens of all
/// sequences are packed end to end.
enum class Layout : std::int32_t { kBhsd, kBshd, kHsd, kShd };

struct ProblemSpec {
  std::vector<std::int32_t> kv_lens;  // tokens of each sequence
  std::int32_t q_heads = 32;
  std::int32_t kv_heads = 8;
  std::int32_t head_dim = 128;
  DType dtype = DType::kBFloat16;
  std::int32_t q_tokens = 1;
  bool causal = false;
  Layout layout = Layout::kBhsd;

  [[nodiscard]] std::int64_t batch() const { return static_cast<std::int64_t>(kv_lens.size()); }
  [[nodiscard]] std::int32_t group() const { return q_heads / kv_heads; }
  [[nodiscard]] bool packed() const { return layout == Layout::kHsd || layout == Layout::kShd; }
  [[nodiscard]] std::int64_t kv_tokens() const;  // of all sequences
  [[nodiscard]] std::int32_t longest_kv_tokens() const;
  [[nodiscard]] std::int64_t stored_elements() const;  // of K, padding included; V has as many
  [[nodiscard]] std::int64_t query_elements() const;
  [[nodiscard]] std::int64_t kv_bytes() const;  // of K and V, without padding: what a call must read
  [[nodiscard]] std::int64_t products() const;  // multiply-adds with an element of K or V
};

[[nodiscard]] const char* name_of(Layout layout);
[[nodiscard]] const char* name_of(DType dtype);

/// Contiguous for a uniform batch, packed for a ragged one.
[[nodiscard]] Layout natural_layout(const std::vector<std::int32_t>& kv_lens);

/// "32 requests of 128 to 4,082 tokens (37,814), 32/8 heads of 128, bf16, hsd, 154.9 MB of K/V".
[[nodiscard]] std::string describe(const ProblemSpec& spec);

class ProblemShape {
 public:
  explicit ProblemShape(const ProblemSpec& spec);

  [[nodiscard]] const Problem& problem() const { return problem_; }
  [[nodiscard]] const std::vector<std::int32_t>& lengths() const { return lengths_; }

 private:
  std::vector<std::int32_t> lengths_;  // [B] lengths, or [B + 1] cumulative
  Problem problem_;
};

}  // namespace lean::cli
