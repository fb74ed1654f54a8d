// The rotary embedding's tables as the library wants them: fp32, one row a position.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "ort.hpp"

namespace lean::ort {

class Rotary {
 public:
  Rotary() = default;
  /// Tables that the model fixes are converted here, once for all nodes that use them. `cos`, `sin`: the inputs' indices.
  Rotary(const Node& node, std::size_t cos, std::size_t sin, bool interleaved);

  /// Sets `append`'s rotary fields for positions below `tokens`. Throws Error where the tables do not fit.
  void set(Run& run, std::int64_t tokens, std::int64_t head_dim, Append& append) const;

 private:
  using Floats = std::shared_ptr<const std::vector<float>>;

  [[nodiscard]] const float* table_of(Run& run, const Tensor& table, const Floats& constant, std::int64_t tokens) const;

  std::size_t cos_ = 0;
  std::size_t sin_ = 0;
  bool interleaved_ = false;
  Floats constant_cos_;  // null: not fixed, or fp32 already
  Floats constant_sin_;
};

}  // namespace lean::ort
