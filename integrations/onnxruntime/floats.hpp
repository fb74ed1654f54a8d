// Inputs that the library wants in fp32, whatever a model has them in: rotary tables and sinks. Those that the model fixes are
// converted once, when the session is made.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "ort.hpp"

namespace lean::ort {

/// Numbers in memory of the processor that a node runs on.
using Floats = std::shared_ptr<const float>;

/// Every node keeps what it is given as long as it lives.
[[nodiscard]] Floats keep(const Node& node, std::vector<float> values);

class FloatsInput {
 public:
  FloatsInput() = default;
  FloatsInput(const Node& node, std::size_t index, const char* name);

  /// The first `count` numbers, until the end of the run. Throws Error where they are of another type.
  [[nodiscard]] const float* of(Run& run, std::int64_t count) const;

 private:
  std::size_t index_ = 0;
  const char* name_ = "";
  Floats constant_;  // null: not fixed, or fp32 already
};

/// The rotary embedding's tables: one row a position.
class Rotary {
 public:
  Rotary() = default;
  /// `cos`, `sin`: the inputs' indices.
  Rotary(const Node& node, std::size_t cos, std::size_t sin, bool interleaved);

  /// Sets the problem's rotary fields for positions below `tokens`, and no capacity beyond the tables. Throws Error where they
  /// do not fit.
  void set(Run& run, std::int64_t tokens, Problem& problem) const;

 private:
  std::size_t cos_index_ = 0;
  std::size_t sin_index_ = 0;
  FloatsInput cos_{};
  FloatsInput sin_{};
  bool interleaved_ = false;
};

}  // namespace lean::ort
