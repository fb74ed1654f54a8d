// DecodeProblem: a ProblemSpec with memory behind it. K and V are carved from a KvPool of N(0, 1) numbers, which many
// problems may share one after the other; q, o and lse are its own.
#pragma once

#include <cstdint>

#include "cli/memory.hpp"
#include "cli/problem_spec.hpp"
#include "lean/problem.hpp"

namespace lean::cli {

struct KvPool {
  DType dtype;
  Buffer k;
  Buffer v;

  /// `elements` of K and as many of V.
  KvPool(DType pool_dtype, std::int64_t elements, std::uint64_t seed);
};

class DecodeProblem {
 public:
  /// `pool` holds spec.stored_elements() of spec.dtype or more, and outlives this.
  DecodeProblem(const ProblemSpec& spec, const KvPool& pool, std::uint64_t seed);

  [[nodiscard]] const ProblemSpec& spec() const { return spec_; }
  [[nodiscard]] const Problem& problem() const { return problem_; }

  /// NaN in every element of o and lse: what a call forgets to write cannot pass.
  void poison_outputs() const;

 private:
  ProblemSpec spec_;
  ProblemShape shape_;
  Buffer q_;
  Buffer o_;
  Buffer lse_;
  Problem problem_;
};

}  // namespace lean::cli
