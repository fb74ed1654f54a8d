// What GroupQueryAttention and PagedAttention of com.microsoft have in common: grouped heads whose new keys and values come
// with the queries, packed in their rows or apart, and go into a cache that may be of fp8.
#pragma once

#include <cstdint>

#include "floats.hpp"
#include "head_norms.hpp"
#include "ort.hpp"

namespace lean::ort {

/// Where an operator has these inputs, and how it calls some of them.
struct GroupedInputs {
  std::size_t query, key, value, k_cache, v_cache, cos, sin, sink, k_scale, v_scale, q_norm, k_norm;
  const char* k_cache_name;
  const char* v_cache_name;
  const char* causal_name;  // of the attribute
};

class Grouped {
 public:
  /// Throws Error for what the model asks and neither operator does.
  Grouped(const Node& node, const GroupedInputs& inputs);

  [[nodiscard]] std::int64_t q_heads() const noexcept { return q_heads_; }
  [[nodiscard]] std::int64_t kv_heads() const noexcept { return kv_heads_; }
  [[nodiscard]] bool causal() const noexcept { return causal_; }
  [[nodiscard]] std::int64_t window() const noexcept { return window_; }
  [[nodiscard]] bool rotates() const noexcept { return rotates_; }

  /// Of rows of query that are so wide. Throws Error.
  [[nodiscard]] std::int64_t head_dim_of(std::int64_t width, bool packed) const;
  /// Throws Error unless key and value, where they come apart, are of this shape and query's type.
  void check_key_and_value(const Run& run, const Tensor& query, const Shape& wanted) const;
  /// Sets q, and k and v of append, normalised where the model asks for it. `tokens`: rows of a sequence, 0 where those of all are packed end to end.
  void set_new_tokens(Run& run, std::int64_t tokens, Problem& problem) const;
  /// Sets the scales of an fp8 cache.
  void set_scales(const Run& run, Problem& problem) const;
  /// Sets the rules of scores; a mask is the operator's.
  void set_scores(Run& run, Problem& problem) const;
  /// Sets the rotary embedding where there is one; `tokens`: a sequence has no more of them in this call.
  void set_rotary(Run& run, std::int64_t tokens, Problem& problem) const;

 private:
  void check_heads(const Node& node) const;
  void check_cache(const Node& node) const;

  GroupedInputs in_;
  std::int64_t q_heads_;
  std::int64_t kv_heads_;
  float scale_;
  float softcap_;
  std::int64_t window_;
  bool causal_;
  bool rotates_;
  bool has_sink_;
  HeadNorms norms_;
  Rotary tables_{};
  FloatsInput sink_{};
  Floats zero_sinks_;  // of smooth_softmax
};

}  // namespace lean::ort
