// ProblemSpec: a decode problem by its sizes, as every command describes it. ProblemShape gives it strides and length
// arrays: a Problem without data, which is all that a schedule needs.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "lean/problem.hpp"
#include "problem/reach.hpp"

namespace lean::cli {

/// Axes of K and V from the slowest to the fastest: b sequence, h head, s token, d dim. Without b the tokens of all
/// sequences are packed end to end.
enum class Layout : std::int32_t { kBhsd, kBshd, kHsd, kShd };

struct ProblemSpec {
  std::vector<std::int32_t> kv_lens;  // tokens of each sequence
  std::int32_t q_heads = 32;
  std::int32_t kv_heads = 8;
  std::int32_t head_dim = 128;
  std::int32_t value_dim = 0;   // of a value; 0: head_dim
  bool values_in_keys = false;  // values are the first dims of keys, in the same memory: multi-head latent attention
  DType dtype = DType::kBFloat16;
  std::int32_t q_tokens = 1;
  bool causal = false;
  Layout layout = Layout::kBhsd;  // of pages: b is the page, s the token in it

  std::optional<DType> kv_dtype{};  // none: as dtype
  std::int32_t page_tokens = 0;     // 0: not paged
  std::int32_t window_left = -1;
  std::int32_t window_right = -1;
  float softcap = 0.0F;
  bool alibi = false;  // slopes 2^(-8 (h + 1) / q_heads)
  bool sinks = false;  // of logit 0

  [[nodiscard]] std::int64_t batch() const { return static_cast<std::int64_t>(kv_lens.size()); }
  [[nodiscard]] std::int32_t group() const { return q_heads / kv_heads; }
  [[nodiscard]] std::int32_t dims_of_value() const { return value_dim != 0 ? value_dim : head_dim; }
  [[nodiscard]] std::int32_t kv_tensors() const { return values_in_keys ? 1 : 2; }
  [[nodiscard]] DType kv_type() const { return kv_dtype.value_or(dtype); }
  [[nodiscard]] Reach reach() const { return {.left = window_left, .right = causal ? 0 : window_right}; }
  [[nodiscard]] std::int64_t pages() const;  // of all sequences
  [[nodiscard]] bool packed() const { return layout == Layout::kHsd || layout == Layout::kShd; }
  [[nodiscard]] std::int64_t kv_tokens() const;  // of all sequences
  [[nodiscard]] std::int32_t longest_kv_tokens() const;
  [[nodiscard]] std::int64_t stored_elements() const;  // of K or V, whichever has more, padding included
  [[nodiscard]] std::int64_t query_elements() const;
  [[nodiscard]] std::int64_t output_elements() const;
  [[nodiscard]] std::int64_t kv_bytes() const;  // of K and V, without padding and what no window shows: what a call must read
  [[nodiscard]] std::int64_t products() const;  // multiply-adds with an element of K or V

  bool operator==(const ProblemSpec&) const = default;
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
  [[nodiscard]] const std::vector<std::int32_t>& block_table() const { return block_table_; }
  [[nodiscard]] const std::vector<float>& alibi_slopes() const { return alibi_slopes_; }
  [[nodiscard]] const std::vector<float>& sinks() const { return sinks_; }

 private:
  void make_pages(const ProblemSpec& spec);

  std::vector<std::int32_t> lengths_;      // [B] lengths, or [B + 1] cumulative
  std::vector<std::int32_t> block_table_;  // empty: not paged
  std::vector<float> alibi_slopes_;        // empty: none
  std::vector<float> sinks_;               // empty: none
  Problem problem_;
};

}  // namespace lean::cli
