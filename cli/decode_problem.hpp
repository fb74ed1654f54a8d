// DecodeProblem: a ProblemSpec with memory behind it, on the host or the GPU. K and V are carved from a KvPool of N(0, 1)
// numbers, which many problems may share one after the other; q, o and lse are its own.
#pragma once

#include <cstdint>

#include "cli/memory.hpp"
#include "cli/problem_spec.hpp"
#include "lean/problem.hpp"

namespace lean::cli {

/// K and V, once or several times: calls that go round the copies find none of them in a cache. Copy 0 holds the same numbers
/// on the host and on the GPU; every copy has its own.
class KvPool {
 public:
  /// `elements` of K and as many of V in every copy; with one tensor V is K.
  KvPool(DType dtype, std::int64_t elements, std::uint64_t seed, Place place = Place::kHost, std::int64_t copies = 1,
         std::int32_t tensors = 2);

  [[nodiscard]] DType dtype() const { return dtype_; }
  [[nodiscard]] Place place() const { return memory_.place(); }
  [[nodiscard]] std::int64_t copies() const { return copies_; }
  [[nodiscard]] std::byte* k(std::int64_t copy = 0) const { return memory_.data() + tensors_ * copy * tensor_bytes_; }
  [[nodiscard]] std::byte* v(std::int64_t copy = 0) const { return k(copy) + (tensors_ - 1) * tensor_bytes_; }

  /// What a pool takes.
  [[nodiscard]] static std::int64_t bytes_for(DType dtype, std::int64_t elements, std::int64_t copies, std::int32_t tensors = 2);

 private:
  DType dtype_;
  std::int64_t copies_;
  std::int32_t tensors_;       // of a copy
  std::int64_t tensor_bytes_;  // of one, padded
  Buffer memory_;              // K and V of copy 0, of copy 1 ..
};

/// What a problem on `copies` copies of K and V takes: these, q, o and lse.
[[nodiscard]] std::int64_t bytes_to_hold(const ProblemSpec& spec, std::int64_t copies);

class DecodeProblem {
 public:
  /// `pool` holds spec.stored_elements() of spec.kv_type() or more, and outlives this, which lies where the pool does.
  DecodeProblem(const ProblemSpec& spec, const KvPool& pool, std::uint64_t seed);

  [[nodiscard]] const ProblemSpec& spec() const { return spec_; }
  [[nodiscard]] Place place() const { return pool_.place(); }
  [[nodiscard]] const KvPool& pool() const { return pool_; }

  /// On copy 0 of the pool.
  [[nodiscard]] const Problem& problem() const { return problem_; }
  [[nodiscard]] Problem problem_on(std::int64_t copy) const;
  /// Without data, and its lengths on the host: what schedules are explained from.
  [[nodiscard]] const Problem& shape() const { return shape_.problem(); }
  [[nodiscard]] const Buffer& o() const { return o_; }
  [[nodiscard]] const Buffer& lse() const { return lse_; }

  /// NaN in every element of o and lse: what a call forgets to write cannot pass.
  void poison_outputs() const;

 private:
  ProblemSpec spec_;
  const KvPool& pool_;
  ProblemShape shape_;
  // On the GPU only.
  Buffer lengths_;
  Buffer block_table_;
  Buffer alibi_slopes_;
  Buffer sinks_;
  Buffer q_;
  Buffer o_;
  Buffer lse_;
  Problem problem_;
};

}  // namespace lean::cli
