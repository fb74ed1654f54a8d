// RMS normalisation of queries and new keys, a head at a time and ahead of the rotary embedding (arXiv 1910.07467; Qwen3's q_norm
// and k_norm): into memory of the run's own, since the inputs are others' too.
#pragma once

#include <cstdint>

#include "floats.hpp"
#include "norm_rows.hpp"
#include "ort.hpp"

namespace lean::ort {

class HeadNorms {
 public:
  HeadNorms() = default;
  /// `q`, `k`: the indices of the weights. Throws Error unless both or neither are there.
  HeadNorms(const Node& node, std::size_t q, std::size_t k);

  /// Puts normalised queries and new keys in the place of the problem's, which are rows of a [rows, width] each.
  void apply(Run& run, std::int64_t rows, std::int64_t tokens, Problem& problem) const;

 private:
  [[nodiscard]] TensorView normalised(Run& run, const NormRows& given, std::int64_t tokens) const;
  [[nodiscard]] const float* weight_of(Run& run, const FloatsInput& input, std::size_t index, const char* name,
                                       std::int64_t dim) const;

  bool present_ = false;
  std::size_t q_index_ = 0;
  std::size_t k_index_ = 0;
  FloatsInput q_{};
  FloatsInput k_{};
  float q_epsilon_ = 0.0F;
  float k_epsilon_ = 0.0F;
};

}  // namespace lean::ort
